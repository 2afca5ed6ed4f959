"""Reads of a tensor that is being filled have what was written, and loops that keep their state in it are rolled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuse.check.oracle import check
from fuse.graph.function import Function
from fuse.testing import assert_fuses

NAME = "forward_writes"


def average(x):
    y = torch.empty_like(x)
    y[:, 0] = x[:, 0]
    for t in range(1, x.shape[1]):
        y[:, t] = 0.9 * y[:, t - 1] + 0.1 * x[:, t]
    return y


def two_steps_back(x):
    y = torch.zeros_like(x)
    for t in range(2, x.shape[1]):
        y[:, t] = torch.tanh(x[:, t] + y[:, t - 1] - 0.5 * y[:, t - 2])
    return y


def rows(x):
    y = torch.empty(len(x) + 1, x.shape[1])
    y[0] = x[-1]
    for t in range(len(x)):
        y[t + 1] = torch.sin(y[t]) + x[t]
    return y


def copies_of_turned_values(x):
    y = torch.zeros(3, x.shape[1], len(x))
    for t in range(1, x.shape[1]):
        turned = (x[:, t, None] * torch.arange(3.0)).t()  # eager's sum lies like its first operand
        y[:, t] = turned + torch.tanh(y[:, t - 1].clone().view(-1)).view(3, -1)
    return y


def turned(x):
    """The forward algorithm of a hidden Markov model over ``x[batch, t]``."""
    score = (torch.arange(16.0).view(4, 4) % 5).log_softmax(0)
    y = torch.zeros(len(x), x.shape[1], 4)
    for t in range(1, x.shape[1]):
        above = score.reshape(4, 4, 1) + y[:, t - 1].transpose(0, 1).reshape(1, 4, len(x))
        y[:, t] = torch.logsumexp(above, 1).transpose(0, 1) * x[:, t, None]
    return y.logsumexp(2)


def own_rows(x):
    x = x.clone()
    for t in range(len(x)):
        x[t] = x[t] * x[t] + x[t].sin()
    return x


@pytest.mark.parametrize(
    ("function", "launches"),
    [(average, 2), (two_steps_back, 3), (rows, 2), (copies_of_turned_values, 3), (turned, 3)],
)
def test_a_state_kept_in_the_tensor_that_is_filled_is_carried(function: Callable, launches: int) -> None:
    for steps in (8, 17):
        x = torch.randn(3, steps) if function is not rows else torch.randn(steps, 3)
        assert_fuses(Function(function), x, launches=launches, fired={"roll_whole_loops": 1})


def test_a_turned_state_is_right_where_elements_are_equal_or_special() -> None:
    x = torch.tensor([-0.0, torch.nan, torch.inf, 1, 1, -torch.inf, 0, 1]).repeat(3, 1)
    assert check(Function(turned), (x,)).passed
    assert check(Function(turned), (torch.randn(3, 8, requires_grad=True),), train=True).passed


def test_few_turned_values_stay_where_their_layout_shows() -> None:
    assert_fuses(Function(turned), torch.randn(3, 5), fired={NAME: 0}, rejected={NAME: 3})
    assert_fuses(Function(turned), torch.randn(3, 6), fired={NAME: 4}, rejected={NAME: 0})


def test_positions_that_were_not_written_are_read_from_below() -> None:
    assert_fuses(Function(own_rows), torch.randn(6, 4), launches=1, fired={NAME: 15})


def slices(x):
    y = torch.zeros_like(x)
    y[:, 0:2] = x[:, 0:2].exp()
    y[:, 2:4] = y[:, 0:2] + 1
    return y


def converted(x):
    y = torch.zeros(4, 6, dtype=torch.float64)
    y[0] = x[0].tanh()
    y[1] = y[0] * 3
    return y


def broadcast(x):
    y = torch.zeros(4, 6)
    y[0] = x[0, 0].tanh()
    y[1] = y[0] + x[1]
    return y


def filled(x):
    y = x.clone()
    y[0] = 2.5
    y[1] = y[0] + x[1]
    return y


@pytest.mark.parametrize("function", [slices, converted, broadcast, filled])
def test_what_is_written_is_read_as_the_tensor_holds_it(function: Callable) -> None:
    assert_fuses(Function(function), torch.randn(4, 6), fired={NAME: 1})


def part_of_a_write(x):
    y = torch.zeros_like(x)
    y[:, 0:2] = x[:, 0:2].exp()
    y[:, 2:3] = y[:, 1:2] + 1
    return y


def parts_of_two_writes(x):
    y = torch.zeros_like(x)
    y[:, 0] = x[:, 0].exp()
    y[:, 1] = x[:, 1].exp()
    y[:, 3] = y[:, 0:2].sum(1)
    return y


def with_steps(x):
    y = torch.zeros_like(x)
    y[:, ::2] = x[:, ::2].exp()
    y[:, 1] = y[:, 0] + 1
    return y


def along_another_dimension(x):
    y = torch.zeros_like(x)
    y[:, 0] = x[:, 0].exp()
    y[1] = y[0] + 1
    return y


def strides_show(x):
    y = torch.zeros(3, 6, 4)
    y[0] = x.t().exp()
    return y, y[0] + 1


@pytest.mark.parametrize(
    "function", [part_of_a_write, parts_of_two_writes, with_steps, along_another_dimension, strides_show]
)
def test_near_misses_stay(function: Callable) -> None:
    assert_fuses(Function(function), torch.randn(4, 6), fired={NAME: 0}, rejected={NAME: 1})


def test_a_part_that_the_caller_receives_is_a_view_of_the_whole() -> None:
    def returned(x):
        y = torch.zeros_like(x)
        y[:, 0] = x[:, 0].exp()
        return y, y[:, 0]

    assert_fuses(Function(returned), torch.randn(4, 6), fired={NAME: 0})


def test_a_value_written_later_is_not_read() -> None:
    def overwritten(x):
        y = torch.zeros_like(x)
        y[0] = x[0].exp()
        before = y[0] + 1
        y[0] = x[1].exp()
        return before, y[0] + 1, y

    assert_fuses(Function(overwritten), torch.randn(4, 6), fired={NAME: 2})


places = st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(1, 2), st.booleans())


@given(moves=st.lists(st.tuples(places, places, st.booleans()), min_size=1, max_size=6))
@settings(max_examples=20, deadline=None)
def test_any_order_of_writes_and_reads(moves: list) -> None:
    def part(tensor: Tensor, place: tuple[int, int, int, bool]) -> Tensor:
        dim, start, width, single = place
        return tensor.select(dim, start) if single else tensor.narrow(dim, min(start, 4 - width), width)

    def program(x: Tensor) -> object:
        y, seen = x.clone(), []
        for source, target, kept in moves:
            value = part(y, source).tanh() + 0.5
            place = part(y, target)
            place.copy_(value if value.shape == place.shape else value.sum())
            if kept:
                seen.append(part(y, source) * 2)
        return y, seen

    with torch.no_grad():
        report = check(Function(program), (torch.randn(4, 4),))
    assert report.passed, report
