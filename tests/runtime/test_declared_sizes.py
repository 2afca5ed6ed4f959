"""Sizes that the user declares to vary: right at every size, compiled at the first call."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import fuse
from fuse.check.oracle import check
from fuse.errors import FuseError
from fuse.runtime.sizes.declared import elsewhere

T = Dim("T")
B, H = 3, 16


class Function(nn.Module):
    """A function of the arguments and two weights as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(H, H) / H**0.5)
        self.u = nn.Linear(H, H)
        self.function = function
        self.scale = 2.0

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        return self.function(self, x, *others, **named)


def recurrent(m: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    h = x.new_zeros(x.shape[1], H)
    states = []
    for step in x:
        h = torch.tanh(m.u(step) + h @ m.w)
        states.append(h)
    return torch.stack(states), h


def backwards_batch_first(m: Function, x: Tensor) -> Tensor:
    h, states = x[:, -1], []
    for t in range(x.shape[1] - 2, -1, -1):
        h = torch.tanh(m.scale * (x[:, t] @ m.w) + h)
        states.append(h)
    return torch.stack(states, 1).flip(1)


def both_directions(m: Function, x: Tensor) -> Tensor:
    ahead, back = recurrent(m, x)[0], recurrent(m, x.flip(0))[0].flip(0)
    return recurrent(m, m.u(ahead) + back)[0]


def masked_mean(m: Function, x: Tensor, mask: Tensor) -> Tensor:
    h = torch.zeros(B, H)
    total = torch.zeros(B, H)
    for t in range(x.shape[0]):
        h = torch.where(mask[:, t : t + 1], torch.tanh(x[t] + h @ m.w), h)
        total = total + h
    return (total / x.shape[0] + x.mean(0)) @ m.w


def written_in_place(m: Function, x: Tensor, out: Tensor) -> int:
    h = torch.zeros(B, H)
    for t in range(x.shape[0]):
        h = torch.tanh(x[t] + h @ m.w)
        out[:, t] = h
    return x.shape[0]


def with_positions(m: Function, x: Tensor) -> dict[str, Any]:
    x = x + torch.arange(x.shape[0]).view(-1, 1, 1) * 0.01
    return {"states": recurrent(m, x)[0], "first": x[:1], "steps": x.shape[0]}


def views_of_one(m: Function, x: Tensor) -> tuple[Tensor, ...]:
    y = torch.tanh(m.u(x))
    return y, y[1:], y.transpose(0, 1), x[2:]


def twice_as_long(m: Function, x: Tensor, other: Tensor) -> Tensor:
    return recurrent(m, torch.cat([x, other]))[0] * m.scale


def long_chain(m: Function, x: Tensor) -> Tensor:
    for number in range(6):
        x = torch.exp(-x * x) * (0.5 + 0.01 * number)
    return x


def sequence(length: int) -> Tensor:
    return torch.randn(length, B, H)


def batch_first(length: int) -> Tensor:
    return torch.randn(B, length, H)


CASES: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]], Any]] = {
    "recurrent": (recurrent, lambda t: (sequence(t),), {"x": {0: T}}),
    "backwards, batch first": (backwards_batch_first, lambda t: (batch_first(t),), {"x": (None, T, None)}),
    "transposed input": (recurrent, lambda t: (batch_first(t).transpose(0, 1),), {"x": {0: T}}),
    "stack of loops": (both_directions, lambda t: (sequence(t),), ({0: Dim.DYNAMIC},)),
    "two inputs": (
        masked_mean,
        lambda t: (sequence(t), torch.rand(B, t) > 0.3),
        {"x": {0: Dim.AUTO}, "others": ({1: Dim.AUTO},)},
    ),
    "writes": (written_in_place, lambda t: (sequence(t), torch.zeros(B, t, H)), ({0: T}, ({1: T},))),
    "positions and numbers": (with_positions, lambda t: (sequence(t),), {"x": {0: T}}),
    "a body in phases": (long_chain, lambda t: (torch.randn(t, 3, 2 + t % 5),), {"x": {0: T, 2: Dim.AUTO}}),
    "views": (views_of_one, lambda t: (sequence(t),), {"x": {0: T}}),
    "derived": (twice_as_long, lambda t: (sequence(t), sequence(2 * t + 3)), ({0: T}, ({0: 2 * T + 3},))),
}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_every_size_is_right(name: str) -> None:
    function, inputs, declared = CASES[name]
    model = Function(function)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (2, 7, 38, 64):
            report = check(model, inputs(length), dynamic_shapes=declared)
            assert report.passed, report
            assert not report.fallbacks


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_kernels_of_the_first_call_serve_other_sizes(name: str, compiled_sources: list[str], empty_cache: Path) -> None:
    function, inputs, declared = CASES[name]
    model = Function(function)
    fused = fuse.compile(model, dynamic_shapes=declared)
    fused(*inputs(50))
    launches = fused.last_run.launches
    assert compiled_sources
    del compiled_sources[:]
    for length in (51, 70, 12, 50, 51):
        args = inputs(length)
        expected = model(*[a.clone() for a in args])
        torch.testing.assert_close(fused(*args), expected)
        assert fused.last_run.launches == launches
        assert fused.last_run.fallbacks == ()
    assert not compiled_sources


def two_sizes(m: Function, x: Tensor, y: Tensor) -> Tensor:
    scores = torch.softmax(m.u(x).transpose(0, 1) @ y.permute(1, 2, 0), -1)
    return torch.tanh(scores @ y.transpose(0, 1)).sum(1) + x.mean(0)


def test_any_number_of_sizes_may_be_declared(compiled_sources: list[str], empty_cache: Path) -> None:
    batch = Dim("batch", min=2, max=64)
    declared = {"x": {0: T, 1: batch}, "others": ({0: Dim("S"), 1: batch},)}
    fused = fuse.compile(model := Function(two_sizes), dynamic_shapes=declared)
    fused(torch.randn(9, 4, H), torch.randn(20, 4, H))
    del compiled_sources[:]
    for length, other, rows in [(10, 5, 3), (33, 33, 8), (8, 40, 64), (64, 9, 9)]:
        x, y = torch.randn(length, rows, H), torch.randn(other, rows, H)
        torch.testing.assert_close(fused(x, y), model(x, y))
    assert len(compiled_sources) <= 1


def test_training_is_declared_too(compiled_sources: list[str], empty_cache: Path) -> None:
    model = nn.Sequential(nn.Linear(H, 32), nn.GELU(), nn.LayerNorm(32))
    double = copy.deepcopy(model).double()
    fused = fuse.compile(model, dynamic_shapes={"input": {0: T, 1: Dim("batch")}})
    compiled = []
    with torch.enable_grad():
        for shape in [(9, 4), (12, 7), (30, 2)]:
            x = torch.randn(*shape, H)
            del compiled_sources[:]
            for one, values in ((fused, x), (double, x.double())):
                one.zero_grad()
                one(values).square().mean().backward()
            compiled.append(len(compiled_sources))
            for mine, theirs in zip(model.parameters(), double.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-3, atol=1e-6)
    assert compiled[0]
    assert sum(compiled[1:]) <= 1


def branching(m: Function, x: Tensor) -> Tensor:
    return torch.tanh(x) * 2 if x.shape[0] > 40 else torch.sigmoid(x) / x.shape[0]


def even_number(m: Function, x: Tensor) -> Tensor:
    return torch.cat([part.sum(0) for part in x[: len(x) - len(x) % 2].chunk(2)])


def turned_over(m: Function, x: Tensor) -> Tensor:
    return torch.stack([torch.tanh(step) for step in x.unbind()][::-1])


def decaying(m: Function, x: Tensor) -> Tensor:
    h = torch.zeros(B, H)
    for t, step in enumerate(x):
        h = h * 0.5 + step / (t + 1) + (step if t == 30 else 0)
    return h


def steps_alone(m: Function, x: Tensor) -> list[Tensor]:
    return list(torch.unbind(torch.tanh(x) @ m.w))


@pytest.mark.parametrize("function", [branching, even_number, turned_over, decaying, steps_alone])
def test_what_python_decides_by_a_size_is_right(function: Callable[..., Any]) -> None:
    fused = fuse.compile(model := Function(function), dynamic_shapes={"x": {0: T}})
    for length in (20, 21, 41, 64, 2):
        x = sequence(length)
        torch.testing.assert_close(fused(x), model(x))


@pytest.mark.parametrize("name", ["gaps", "shared memory", "repeated"])
def test_inputs_that_are_not_made_up_are_right(name: str) -> None:
    fused = fuse.compile(model := Function(twice_as_long), dynamic_shapes=({0: T}, ({0: T},)))
    for length in (20, 33, 12):
        x = sequence(length)
        args = {
            "gaps": (torch.randn(length, B, 2 * H)[..., ::2], x),
            "shared memory": (x, x[:]),
            "repeated": (x[:, :1].expand(length, B, H), x),
        }[name]
        torch.testing.assert_close(fused(*args), model(*args))


def test_calls_outside_of_the_bounds_and_of_size_one_are_right() -> None:
    fused = fuse.compile(model := Function(recurrent), dynamic_shapes={"x": {0: Dim("T", min=5, max=30), 1: Dim("b")}})
    for length, rows in [(1, 1), (8, 3), (40, 3), (2, 1), (31, 2), (5, 5)]:
        x = torch.randn(length, rows, H)
        torch.testing.assert_close(fused(x), model(x))


@pytest.mark.parametrize(
    ("bounds", "others"), [((0, None), {"T": 11}), ((0, 9), {"T": 9}), ((20, None), {"T": 20}), ((0, 7), {"T": 6})]
)
def test_other_sizes_lie_within_bounds_and_apart_from_what_is_there(
    bounds: tuple[int, int | None], others: dict[str, int]
) -> None:
    declared = {"x": {0: Dim("T", min=bounds[0], max=bounds[1])}}
    x = torch.randn(7, B, H)
    assert elsewhere(Function(recurrent), declared, (x,), {}, [x]) == (others["T"], B, H, B * H, H, 1)


def test_a_size_that_is_two_is_said_so() -> None:
    fused = fuse.compile(model := Function(twice_as_long), dynamic_shapes=({0: T}, ({0: T},)))
    with pytest.warns(UserWarning, match="T is one size, and a call has several"):
        fused(sequence(20), sequence(21))
    torch.testing.assert_close(fused(x := sequence(30), x + 1), model(x, x + 1))


def test_none_makes_kernels_for_one_size_each(compiled_sources: list[str], empty_cache: Path) -> None:
    fused = fuse.compile(model := Function(recurrent), dynamic_shapes=None)
    for length, rows in [(8, 3), (9, 4), (10, 5)]:
        del compiled_sources[:]
        x = torch.randn(length, rows, H)
        torch.testing.assert_close(fused(x), model(x))
        assert compiled_sources


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"y": {0: T}}, "names 'y'.*forward does not take"),
        (T, "give a dictionary"),
    ],
)
def test_a_declaration_that_names_nothing_is_an_error(declared: Any, message: str) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(FuseError, match=message):
        fuse.compile(Model(), dynamic_shapes=declared)


@pytest.mark.parametrize(
    ("declared", "message"),
    [({"x": {3: T}}, "dimension 3 of x, which has 3"), ({"x": {0: "T"}}, "give a torch.export.Dim")],
)
def test_a_declaration_that_does_not_fit_is_said_so(declared: Any, message: str) -> None:
    fused = fuse.compile(Function(recurrent), dynamic_shapes=declared)
    with pytest.warns(UserWarning, match=message):
        fused(sequence(50))


def test_arguments_may_be_nested_and_named() -> None:
    def nested(m: Function, x: Tensor, *, others: dict[str, list[Tensor]]) -> Tensor:
        return recurrent(m, x + others["more"][0] * others["more"][1])[0]

    declared = {"x": {0: T}, "named": {"others": {"more": [{0: T}, None]}}}
    fused = fuse.compile(model := Function(nested), dynamic_shapes=declared)
    for length in (50, 60):
        x, others = sequence(length), {"more": [sequence(length), torch.randn(H)]}
        torch.testing.assert_close(fused(x, others=others), model(x, others=others))
