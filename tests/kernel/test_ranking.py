"""``topk`` and ``sort`` in a step of a loop: the library's elements and positions, where many are equal, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check
from fuse.kernel.nests import ranking
from fuse.kernel.nests.ranking import LONGEST_ROW

STEPS, ROWS, COLUMNS = 6, 3, 8


class Ranking(nn.Module):
    """The ``k`` largest elements of the state are kept in every step."""

    def __init__(self, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> None:
        super().__init__()
        self.how = k, dim, largest, ordered

    def forward(self, xs: Tensor) -> tuple[Tensor, ...]:
        h = torch.zeros_like(xs[0])
        values, positions = [], []
        for x in xs:
            h = x - h
            value, position = h.topk(*self.how)
            values.append(value)
            positions.append(position)
        return torch.stack(values), torch.stack(positions), h


class Sorting(nn.Module):
    """The state is sorted in every step."""

    def __init__(self, dim: int = -1, descending: bool = False, stable: bool = False) -> None:
        super().__init__()
        self.how = {"dim": dim, "descending": descending, "stable": stable}

    def forward(self, xs: Tensor) -> tuple[Tensor, ...]:
        h = torch.ones_like(xs[0])
        values, positions = [], []
        for x in xs:
            h, position = (x - h).sort(**self.how)
            values.append(h)
            positions.append(position)
        return torch.stack(values), torch.stack(positions)


class Allocation(nn.Module):
    """The state is weighted by products over its smaller elements, as the memory of a differentiable computer is
    allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(COLUMNS, COLUMNS)

    def forward(self, xs: Tensor) -> Tensor:
        h = torch.zeros_like(xs[0])
        for x in xs:
            least, places = torch.sort(torch.sigmoid(self.linear(h) + x), 1)
            free = (1 - least) * torch.cumprod(torch.cat([torch.ones(ROWS, 1), least[:, :-1]], 1), 1)
            h = free.gather(1, places.argsort(1))
        return h


class Router(nn.Module):
    """Each step is computed by the two of four experts that score best."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(2 * COLUMNS, 4)
        self.experts = nn.Parameter(torch.randn(4, COLUMNS, 2 * COLUMNS) / 4)

    def forward(self, xs: Tensor) -> Tensor:
        h = torch.zeros_like(xs[0])
        for x in xs:
            both = torch.cat([x, h], 1)
            weights, chosen = self.router(both).topk(2, -1)
            results = torch.einsum("bkde,be->bkd", self.experts[chosen], both)
            h = torch.tanh((results * weights.softmax(-1).unsqueeze(-1)).sum(1))
        return h


class SparseAttention(nn.Module):
    """The weights of all but the best places are zero: what is kept is written to where it was."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(COLUMNS, COLUMNS)

    def forward(self, xs: Tensor) -> Tensor:
        h = torch.zeros_like(xs[0])
        for x in xs:
            scores = self.linear(h) + x
            best, places = scores.topk(3, -1)
            h = torch.tanh(torch.zeros_like(scores).scatter(1, places, best.softmax(-1)) * scores + x)
        return h


class Sparse(nn.Module):
    """Only the largest elements of the state are handed on."""

    def forward(self, xs: Tensor) -> Tensor:
        h = torch.zeros_like(xs[0])
        for x in xs:
            h = torch.tanh(h + x)
            h = h * (h >= h.topk(2, -1).values[:, -1:])
        return h


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a.nan_to_num(77), b.nan_to_num(77))


@pytest.mark.usefixtures("unoptimised")
@settings(max_examples=10, deadline=None)  # the headers that a kernel needs take the compiler a second
@given(data=st.data())
def test_elements_and_positions_are_the_librarys(data: st.DataObject) -> None:
    draw = data.draw
    size = draw(st.sampled_from([(3, 8), (2, 300), (5, 65), (1, 130), (4, 1)]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32]))
    dim = draw(st.sampled_from([0, 1, -1]))
    model = Ranking(draw(st.integers(1, size[dim])), dim, draw(st.booleans()), draw(st.booleans()))
    xs = torch.randint(-3, 4, (STEPS, *size)).to(dtype)
    if dtype.is_floating_point and draw(st.booleans()):
        xs[torch.rand(xs.shape) < 0.1] = torch.nan
    fused = fuse.compile(model)
    with torch.no_grad():
        assert all(map(same, fused(xs), model(xs)))
    assert fused.last_run.launches == 1
    assert not fused.last_run.fallbacks


@pytest.mark.usefixtures("unoptimised")
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_sorted_elements_and_positions_are_the_librarys(data: st.DataObject) -> None:
    draw = data.draw
    size = draw(st.sampled_from([(3, 8), (2, 300), (5, 65), (1, 130), (4, 1), (40, 3)]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]))
    model = Sorting(draw(st.sampled_from([0, 1, -1])), draw(st.booleans()), draw(st.booleans()))
    xs = torch.randint(0, draw(st.sampled_from([1, 4, 100])), (STEPS, *size)).to(dtype)
    if dtype.is_floating_point:
        xs[torch.rand(xs.shape) < 0.1] = draw(st.sampled_from([torch.nan, -0.0, torch.inf]))
    fused = fuse.compile(model)
    with torch.no_grad():
        assert all(map(same, fused(xs), model(xs)))
    assert fused.last_run.launches < STEPS  # of integers, the first step stays outside
    assert not fused.last_run.fallbacks


@pytest.mark.parametrize("stable", [False, True])
def test_equal_elements_have_the_librarys_order(stable: bool) -> None:
    xs = torch.zeros(STEPS, 2, ranking.EQUALS)
    positions = fuse.compile(Sorting(stable=stable))(xs)[1]
    assert torch.equal(positions, Sorting(stable=stable)(xs)[1])


def test_an_order_that_no_kernel_knows_stays_with_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "_library_order", lambda: None)
    for stable in (False, True):
        (loop,) = fuse.show(Sorting(stable=stable), (torch.zeros(STEPS, 2, 30),)).loops
        assert (loop.launches_per_step_after == 0) is stable


@pytest.mark.parametrize("model", [Router, SparseAttention, Allocation])
def test_a_loop_that_chooses_the_largest_is_one_kernel_and_trains(model: Any) -> None:
    launches = []
    for steps in (STEPS, 2 * STEPS):
        report = check(model(), (torch.randn(steps, ROWS, COLUMNS),), train=True)
        assert report.passed, report
        assert report.fallbacks == ()
        assert report.observed[1] == 1
        launches.append(report.launches_after)
    assert launches[0] == launches[1]


@pytest.mark.parametrize("columns", [LONGEST_ROW, LONGEST_ROW + 1])
def test_longer_rows_stay_with_the_library(columns: int) -> None:
    (loop,) = fuse.show(Sparse(), (torch.randn(STEPS, 1, columns),)).loops
    assert (loop.launches_per_step_after == 0) is (columns == LONGEST_ROW)
