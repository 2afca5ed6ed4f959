"""Loops that end early: right after every number of steps, one program for all, and nothing that is not proved."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse
from benchmarks.ending_loops import CASES, calls
from fuse.runtime.variants.compiled import Compiled
from tests.samples import outcome

LEAST = 4


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.cell = nn.Linear(8, 8)
        with torch.no_grad():
            self.cell.weight *= 0.8 / torch.linalg.matrix_norm(self.cell.weight, 2)
        self.register_buffer("total", torch.zeros(8))

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def layouts(value: Any) -> Any:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [(t.stride(), t.storage_offset(), t.untyped_storage().nbytes()) for t in leaves if isinstance(t, Tensor)]


def held(model: nn.Module, series: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Assert that each call does what eager's does, layouts and memory included; returns what each launched."""
    eager, fused = copy.deepcopy(model), fuse.compile(model)
    runs = []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for args in series:
            expected, found = outcome(eager, copy.deepcopy(args)), outcome(fused, copy.deepcopy(args))
            if type(expected[0]) is tuple and type(expected[0][0]) is str:
                assert found[0] == expected[0]
                found, expected = found[1:], expected[1:]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
            assert layouts(found[0]) == layouts(expected[0])
            runs.append(fused.last_run)
    held.variants = [one for state in fused._own()._known.states for one in state.variants]  # type: ignore[attr-defined]
    return runs


def variants() -> list[Compiled]:
    """The specialisations of the model that :func:`held` saw last."""
    found: list[Compiled] = held.variants  # type: ignore[attr-defined]
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_every_number_of_steps_is_right_and_one_program_serves_from_four_on(name: str) -> None:
    torch.manual_seed(0)
    model = CASES[name].make().eval()
    made = calls(CASES[name], model)
    numbers = [n for n in made if n < 8 or n % 8 == 0]
    most = max(numbers)
    order = [5, most, *numbers, *numbers[::-1]]
    runs = held(model, [made[number] for number in order])
    assert [run.fallbacks for run in runs] == [()] * len(order)
    first = LEAST + (name == "adaptive")  # whose first step is unlike the others
    launches = {run.launches for run, number in zip(runs, order, strict=True) if number >= first}
    assert len(launches) == 1
    whole = {id(one) for one in variants() if one.ending}
    assert len(whole) == 1
    assert len(variants()) <= first + 2  # each of the few steps that are no loop, and a loop that ran to its end


def steps_of(one: float) -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 8), torch.tensor(one)


SERIES = [steps_of(10.0**-power) for power in (0.5, 2.5, 1, 2, 3, 1.5, 2.5, 1, 3, 0.2, 2)]


def settled(model: Calls, x: Tensor, tolerance: Tensor, most: int = 40) -> tuple[Tensor, list[Tensor]]:
    """A loop that ends when its state hardly moves; what it was in all steps."""
    h, kept = torch.zeros_like(x), []
    for _ in range(most):
        following = torch.tanh(model.cell(h) + x)
        moved = (following - h).abs().max()
        h = following
        kept.append(h)
        if moved < tolerance:
            break
    return h, kept


def divided(model: Calls, x: Tensor, tolerance: Tensor) -> Tensor:
    h, kept = settled(model, x, tolerance)
    return h / len(kept)


def branched(model: Calls, x: Tensor, tolerance: Tensor) -> Tensor:
    h, kept = settled(model, x, tolerance)
    return -h if len(kept) > 5 else h


def averaged(model: Calls, x: Tensor, tolerance: Tensor) -> Tensor:
    return torch.stack(settled(model, x, tolerance)[1]).mean(0)


def last_two(model: Calls, x: Tensor, tolerance: Tensor) -> Tensor:
    _, kept = settled(model, x, tolerance)
    return kept[-1] - kept[-2] if len(kept) > 1 else kept[-1]


def first_step(model: Calls, x: Tensor, tolerance: Tensor) -> Tensor:
    h, kept = settled(model, x, tolerance)
    return h - kept[0]


def as_list(model: Calls, x: Tensor, tolerance: Tensor) -> list[Tensor]:
    return settled(model, x, tolerance)[1]


def checked(model: Calls, x: Tensor, tolerance: Tensor) -> Tensor:
    h, kept = settled(model, x, tolerance)
    torch._assert_async((h < 2 + len(kept)).all())
    return h


def read_behind(model: Calls, x: Tensor, tolerance: Tensor) -> Tensor:
    h, _ = settled(model, x, tolerance)
    return h * 2 if h.sum() > 0.3 else h


def twice(model: Calls, x: Tensor, tolerance: Tensor) -> Tensor:
    h, _ = settled(model, x, tolerance)
    return settled(model, h, tolerance)[0]


def drawing(model: Calls, x: Tensor, tolerance: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    for _ in range(40):
        following = torch.tanh(model.cell(h) + x + 0.001 * torch.rand(8))
        moved = (following - h).abs().max()
        h = following
        if moved < tolerance:
            break
    return h + torch.rand(8)


def writing(model: Calls, x: Tensor, tolerance: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    for _ in range(40):
        following = torch.tanh(model.cell(h) + x)
        moved = (following - h).abs().max()
        h = following
        model.total += h
        x.mul_(1.01)
        if moved < tolerance:
            break
    return h


@pytest.mark.sampled
@pytest.mark.parametrize(
    "function",
    [
        divided, branched, averaged, last_two, first_step, as_list, checked, read_behind, twice, drawing, writing,
    ],
)  # fmt: skip
def test_what_comes_behind_may_depend_on_the_number_of_steps(function: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    held(Calls(function), SERIES)


@pytest.mark.parametrize("dim", [0, 1])
def test_counts_and_stacks_in_any_layout_are_served_by_one_program(dim: int) -> None:
    def counted(model: Calls, x: Tensor, tolerance: Tensor) -> tuple[Tensor, int, Tensor]:
        h, kept = settled(model, x, tolerance)
        return h, len(kept), torch.stack(kept, dim)

    torch.manual_seed(0)
    runs = held(Calls(counted), SERIES)
    assert [run.fallbacks for run in runs] == [()] * len(SERIES)
    (whole,) = [one for one in variants() if one.ending]
    assert whole.confirmation is not None
    assert len(whole.confirmation.served) >= 3


def test_constants_that_differ_by_the_sign_of_zero_are_not_taken_for_equal() -> None:
    def function(model: Calls, x: Tensor, tolerance: Tensor) -> Tensor:
        h, kept = settled(model, x, tolerance)
        return torch.atan2(torch.tensor([-0.0 if len(kept) % 2 else 0.0]), -h.abs() - 1)

    torch.manual_seed(0)
    held(Calls(function), SERIES)


@pytest.mark.parametrize("elements", [1, 8])
@pytest.mark.parametrize("read", [False, True])
def test_tensors_that_the_model_holds_for_each_number_of_steps_are_told_apart_while_they_are_equal(
    elements: int, read: bool
) -> None:
    scales = [torch.ones(elements) for _ in range(41)]

    def function(model: Calls, x: Tensor, tolerance: Tensor) -> Tensor:
        h, kept = settled(model, x, tolerance)
        scale = scales[len(kept)]
        return (h * 2 if (x[-1] * scale).sum() > 1.05 * elements else h) if read else h * scale

    torch.manual_seed(0)
    model = Calls(function)
    model.eval()
    eager, fused = copy.deepcopy(model), fuse.compile(model)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for factor in (1.0, 0.1):
            for number, scale in enumerate(scales):
                scale.fill_(1 + (1 - factor) * (number % 3))
            for args in SERIES:
                torch.testing.assert_close(fused(*args), eager(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("numbers", [(-1.0, -2.0), (1, True)])
def test_a_truth_behind_the_loop_is_not_taken_for_that_of_another_number(numbers: tuple[float, float]) -> None:
    """Python has one hash for -1 and -2, and for 1 and True."""

    def function(model: Calls, x: Tensor, tolerance: Tensor, bound: Tensor) -> Tensor:
        h, kept = settled(model, x, tolerance)
        return h * 2 if bound > torch.tensor(numbers[len(kept) % 2]) * 1.0 else h

    torch.manual_seed(0)
    held(Calls(function), [(*args, torch.tensor(bound)) for bound in (-0.5, -1.5) for args in SERIES])


def test_what_a_call_returns_is_not_changed_by_later_calls() -> None:
    torch.manual_seed(0)
    model = Calls(lambda model, *args: torch.stack(settled(model, *args)[1]))
    fused = fuse.compile(model)
    with torch.no_grad():
        found = [fused(*args) for args in SERIES]
        for one, args in zip(found, SERIES, strict=True):
            torch.testing.assert_close(one, model(*args), rtol=1e-4, atol=1e-4)
            one.zero_()
            one.resize_(60, 8)


@pytest.mark.parametrize("goes_on", [True, False])
def test_nan_is_compared_as_eager_compares_it(goes_on: bool) -> None:
    def function(model: Calls, x: Tensor, tolerance: Tensor) -> tuple[Tensor, int]:
        h, error, steps = torch.zeros_like(x), x.abs().max(), 0
        while (not error < tolerance if goes_on else error > tolerance) and steps < 12:
            following = torch.tanh(model.cell(h) + x)
            error, h, steps = (following - h).abs().max(), following, steps + 1
        return h, steps

    torch.manual_seed(0)
    nan = torch.full((8,), torch.nan)
    series = [*SERIES[:6], (nan, SERIES[0][1]), (SERIES[0][0], torch.tensor(torch.nan)), *SERIES[:3]]
    held(Calls(function), series)


def test_an_error_in_a_step_that_is_not_reached_is_none() -> None:
    def function(model: Calls, x: Tensor, end: Tensor) -> Tensor:
        table, h = torch.arange(9.0), torch.zeros(1)
        for step in range(12):
            h = h + table[(x + step).long()]
            if h.max() > end:
                break
        return h

    torch.manual_seed(0)
    x = torch.zeros(1)
    held(Calls(function), [(x, torch.tensor(end)) for end in (35.5, 12.0, 25.0, 40.0, 16.0, 35.5, 12.0, 22.0)])


def test_training_through_such_a_loop_is_right() -> None:
    torch.manual_seed(0)
    model = Calls(lambda model, *args: settled(model, *args)[0])
    eager = copy.deepcopy(model)
    fused = fuse.compile(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for args in SERIES[:7]:
            for one in (eager, fused):
                one(*args).square().sum().backward()
            for expected, found in zip(eager.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-4)
