"""Loops whose steps code counts by itself share graphs between lengths, unless the count is used otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fuse.runtime.size_uses.hand_counters import counters, counts
from tests.runtime.recapturing import recaptured
from tests.runtime.test_reaching import captures

WIDTH = 8
LENGTHS = 11, 27, 19, 31, 23, 14, 29, 17, 40, 21, 25, 26, 36, 30, 24
"""With all lengths near 25 and 36, at which the near misses do something else."""

__all__ = ["captures"]  # a fixture


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given, self.state = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.chosen = nn.ModuleList(nn.Tanh() if n == 24 else nn.Sigmoid() for n in range(60))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.given(x) + self.state(h))


def while_less(cell: Cell, x: Tensor) -> Tensor:
    h, states, t = x[0] * 0, [], 0
    while t < x.shape[0]:
        h = cell(x[t], h)
        states.append(h)
        t += 1
    return torch.stack(states)


def while_unlike(cell: Cell, x: Tensor) -> Tensor:
    h, out, t, steps = x[0] * 0, torch.zeros_like(x), 0, len(x)
    while t != steps:
        h = cell(x[t], h)
        out[t] = h
        t = t + 1
    return out


def downwards(cell: Cell, x: Tensor) -> Tensor:
    h, states, t = x[0] * 0, [], x.size(0) - 1
    while t >= 0:
        h = cell(x[t], h)
        states.insert(0, h)
        t -= 1
    return torch.stack(states)


def in_a_for(cell: Cell, x: Tensor) -> Tensor:
    h, out, n = x[0] * 0, torch.zeros_like(x), 0
    for y in x:
        h = cell(y + x[n : n + 1, :, :].sum(0), h)
        out[n] = h
        n += 1  # noqa: SIM113 - counted by hand
    return out


def two_layers(cell: Cell, x: Tensor) -> Tensor:
    for _ in range(2):
        h, states, t = x[0] * 0, [], 0
        while t < len(x):
            h = cell(x[t], h)
            states.append(h)
            t += 1
        x = torch.stack(states)
    return x


SHARED = {one.__name__: one for one in (while_less, while_unlike, downwards, in_a_for, two_layers)}


def used_after(cell: Cell, x: Tensor) -> Tensor:
    h, n = x[0] * 0, 0
    for y in x:
        h = cell(y, h)
        n += 1
    return h if n != 25 else -h


def leaves_a_flag(cell: Cell, x: Tensor) -> Tensor:
    h, t, flag = x[0] * 0, 0, False
    while t < x.shape[0]:
        h = cell(x[t], h)
        flag = t == 24
        t += 1
    return -h if flag else h


def branches_to_a_flag(cell: Cell, x: Tensor) -> Tensor:
    h, t, sign = x[0] * 0, 0, 1.0
    while t < x.shape[0]:
        h = cell(x[t], h)
        if t == 24:  # noqa: SIM108 - a branch
            sign = -1.0
        else:
            sign = 1.0
        t += 1
    return h * sign


def goes_on_counting(cell: Cell, x: Tensor) -> Tensor:
    n, scale = 0, 1.0
    for _ in range(2):
        h = x[0] * 0
        for y in x:
            h = cell(y, h)
            if n == 35:
                scale = 2.0
            n += 1
    return h * scale


def looks_up_a_flag(cell: Cell, x: Tensor) -> Tensor:
    signs = [1.0] * 60
    signs[24] = -1.0
    h, t, sign = x[0] * 0, 0, 1.0
    while t < x.shape[0]:
        h, sign = cell(x[t], h), signs[t]
        t += 1
    return h * sign


def chooses_an_activation(cell: Cell, x: Tensor) -> Tensor:
    chosen = {n: torch.sin if n == 24 else torch.cos for n in range(60)}
    h, t, last = x[0] * 0, 0, torch.cos
    while t < x.shape[0]:
        h, last = cell(x[t], h), chosen[t]
        t += 1
    return last(h)


def chooses_a_module(cell: Cell, x: Tensor) -> Tensor:
    h, t, last = x[0] * 0, 0, cell.chosen[0]
    while t < x.shape[0]:
        h, last = cell(x[t], h), cell.chosen[t]
        t += 1
    return last(h)


def chooses_from_a_name_that_is_gone(cell: Cell, x: Tensor) -> Tensor:
    chosen = [*cell.chosen]
    h, t, last = x[0] * 0, 0, cell.chosen[0]
    while t < x.shape[0]:
        h, last = cell(x[t], h), chosen[t]
        t += 1
    chosen = None
    return last(h)


def passed_on(cell: Cell, x: Tensor) -> Tensor:
    h, t, seen = x[0] * 0, 0, list[int]()
    while t < x.shape[0]:
        h = cell(x[t], h)
        seen.append(t)
        t += 1
    return -h if seen[-1] == 24 else h


def with_a_branch(cell: Cell, x: Tensor) -> Tensor:
    h, t = x[0] * 0, 0
    while t < x.shape[0]:
        h = cell(x[t], h)
        t += 1
    return -h if x.shape[0] > 24 else h


def every_second(cell: Cell, x: Tensor) -> Tensor:
    h, t = x[0] * 0, 0
    while t < x.shape[0]:
        h = cell(x[t], h)
        t += 2
    return h


def until_a_break(cell: Cell, x: Tensor) -> Tensor:
    h, t = x[0] * 0, 0
    while True:
        h = cell(x[t], h)
        t += 1
        if t >= x.shape[0] or t == 36:
            break
    return h


def shorter_than_the_batch(cell: Cell, x: Tensor) -> Tensor:
    h, t = x[0] * 0, 0
    while t < x.shape[0]:
        h = cell(x[t], h) if t < x.shape[1] else h * 0.5
        t += 1
    return h


OWN = {
    one.__name__: one
    for one in (
        *(chooses_an_activation, chooses_a_module, chooses_from_a_name_that_is_gone),
        *(used_after, leaves_a_flag, branches_to_a_flag, goes_on_counting, looks_up_a_flag, passed_on, with_a_branch),
        *(every_second, until_a_break, shorter_than_the_batch),
    )
}


class Model(nn.Module):
    def __init__(self, function: Callable[[Cell, Tensor], Tensor]) -> None:
        super().__init__()
        self.cell, self.function = Cell(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.cell, x)


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("name", SHARED)
def test_steps_that_are_counted_by_hand_share_graphs(name: str) -> None:
    assert recaptured(Model(SHARED[name]).eval(), LENGTHS, 3, WIDTH) <= 3


@pytest.mark.sampled
@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("name", OWN)
def test_a_count_that_is_used_otherwise_is_right(name: str) -> None:
    recaptured(Model(OWN[name]).eval(), LENGTHS, 3, WIDTH)


def test_the_uses_of_a_counter_are_known() -> None:
    assert counters(while_less.__code__) == counters(while_unlike.__code__) == {"t"}
    assert not counts(two_layers.__code__)
    for one in (used_after, leaves_a_flag, branches_to_a_flag, goes_on_counting, passed_on, until_a_break):
        assert not counters(one.__code__)
        assert counts(one.__code__)
