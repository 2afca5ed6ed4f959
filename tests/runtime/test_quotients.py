"""Sizes such as length // 8 and -length % 8: later lengths are served, by formulas that hold for their remainders."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fuse
from tests.fuzz.sizes import WIDTH, Model, infer, train
from tests.runtime.test_reaching import captures  # noqa: F401  (a fixture)


def padded(m: Model, x: Tensor) -> Tensor:
    whole = F.pad(m.first(x), (0, 0, 0, 0, 0, -x.shape[0] % 8))
    parts = whole.view(-1, 8, *x.shape[1:])
    return (parts - parts.mean(1, keepdim=True)).reshape(whole.shape)[: x.shape[0]]


def whole_windows(m: Model, x: Tensor) -> Tensor:
    steps = x.shape[0] // 8
    parts = m.first(x[: steps * 8]).view(steps, 8, *x.shape[1:])
    return torch.softmax(parts, -1) * parts.mean(1, keepdim=True)


def overlapping(m: Model, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x).unfold(0, 8, 4)).sum(-1)


def rounded(m: Model, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x))[: (x.shape[0] + 3) // 8] * 2


def several_rules(m: Model, x: Tensor) -> Tensor:
    """Quotients by another divisor from 40 on."""
    steps = x.shape[0] // 8 if x.shape[0] < 40 else x.shape[0] // 4
    return torch.tanh(m.first(x))[:steps] * 2


def bounded(m: Model, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x))[: min(x.shape[0] // 8, 5)] * 2


def cut(m: Model, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x))[: x.shape[0] % 8 % 3 + 1] * 2


def counted(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    for _ in range(x.shape[0] % 8 % 3 + 1):
        y = torch.tanh(y)
    return y


def looked_up(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    return torch.tanh([y, y * 2, y + 1][x.shape[0] % 8 % 3])


def every_other(m: Model, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x))[::2].softmax(-1)


SERVED = {padded: 24, whole_windows: 24, rounded: 20, every_other: 16}


@pytest.mark.parametrize("function", SERVED)
def test_lengths_with_known_remainders_need_no_capture(
    function: Callable[[Model, Tensor], Tensor],
    captures: list[tuple[int, ...]],  # noqa: F811
) -> None:
    model = Model(function).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    lengths = [*range(8, 100)]
    random.Random(0).shuffle(lengths)
    for length in lengths:
        infer(model, double, fused, torch.randn(length, 4, WIDTH))
        assert not fused.last_run.fallbacks
    assert len(captures) <= SERVED[function]  # type: ignore[index]


@pytest.mark.parametrize("function", [padded, overlapping])
def test_training_with_several_batch_sizes_is_right(
    function: Callable[[Model, Tensor], Tensor],
    captures: list[tuple[int, ...]],  # noqa: F811
) -> None:
    model = Model(function).train()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    draw = random.Random(0)
    for _ in range(40):
        train(model, double, fused, torch.randn(draw.randint(8, 60), draw.randint(2, 9), WIDTH))


@pytest.mark.parametrize("function", [several_rules, bounded])
@pytest.mark.parametrize("seed", range(2))
def test_other_rules_for_some_lengths_are_noticed(
    function: Callable[[Model, Tensor], Tensor],
    seed: int,
    captures: list[tuple[int, ...]],  # noqa: F811
) -> None:
    model = Model(function).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    lengths = [*range(8, 100)]
    random.Random(seed).shuffle(lengths)
    for length in lengths:
        infer(model, double, fused, torch.randn(length, 4, WIDTH))


def test_a_length_with_another_remainder_is_not_served_by_chance(
    captures: list[tuple[int, ...]],  # noqa: F811
) -> None:
    """Lengths that leave 2 to 6 do not tell whether 1 more is another window."""
    model = Model(padded).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for length in (52, 68, 54, 30, 20, 42, 84, 65, 57, 63, 71, 64, 72, 9, 15):
        infer(model, double, fused, torch.randn(length, 4, WIDTH))


@pytest.mark.parametrize("function", [cut, counted, looked_up])
@pytest.mark.parametrize("training", [False, True])
def test_a_remainder_that_was_the_same_in_captured_calls_is_no_constant(
    function: Callable[[Model, Tensor], Tensor],
    training: bool,
    captures: list[tuple[int, ...]],  # noqa: F811
) -> None:
    """The remainder is 0 for 46, 51 and 115 steps, and 2 for 50."""
    model = Model(function).train(training)
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for length in (29, 51, 9, 25, 46, 115, 50, 52, 18, 53, 49):
        (train if training else infer)(model, double, fused, torch.randn(length, 4, WIDTH))


def between_remainders(m: Model, x: Tensor) -> Tensor:
    y, apart = m.first(x), x.shape[0] % 4 - x.shape[0] % 2
    for _ in range(apart + 1):
        y = torch.tanh(y)
    return y[: apart + 2]


@pytest.mark.parametrize("training", [False, True])
def test_remainders_that_vary_but_not_their_difference(
    training: bool,
    captures: list[tuple[int, ...]],  # noqa: F811
) -> None:
    """The difference is 0 for the first lengths, and 2 for 50 and 51."""
    model = Model(between_remainders).train(training)
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for length in (48, 53, 116, 61, 92, 45, 24, 50, 51, 52, 34, 64, 65, 66, 67):
        (train if training else infer)(model, double, fused, torch.randn(length, 4, WIDTH))
