"""Operators that write at computed positions are kernels, alone and in loops, if they write one row or one number, or
add a few rows."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check
from fuse.graph.function import Function

ROWS, WIDTH, STEPS = 6, 8, 10


def copied(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return m.index_copy(0, i, y)


def copied_by_column(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return m.t().index_copy(1, i, y.t())


def added(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return m.index_add(0, i, y)


def filled(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return m.index_fill(0, i, 3.0) + y


def put(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return m.index_put((i,), y)


def put_from_the_end(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return m.index_put((i - ROWS,), y)


def put_in_columns(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    m = m.clone()
    m[:, i] = y[0, :1]
    return m


def put_and_added(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return m.index_put((i,), y, accumulate=True)


def put_by_two(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return m.index_put((i, i + 1), y[0, 0])


def put_by_two_where_rows_share_memory(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return m[:, :1].expand(ROWS, WIDTH).index_put((i, i + 1), y[0, 0])


def scattered(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return m.scatter(0, i[:, None].expand(1, WIDTH), y)


def scattered_and_added(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return m.scatter_add(0, i[:, None].expand(1, WIDTH), y)


def one_number_in_many_places(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    places = torch.stack([i, i, i - i], 1).expand(ROWS, 3)
    return m.scatter(1, places, 2.0) + y


def one_number_in_places_of_two_dimensions(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    rows = torch.arange(ROWS)[:, None]
    mask = torch.zeros(ROWS, WIDTH)
    mask[rows, torch.stack([i, i, i - i - 1], 1)] = 1.0
    return m * mask + y


WRITES = [
    copied,
    copied_by_column,
    added,
    filled,
    put,
    put_from_the_end,
    put_in_columns,
    put_and_added,
    put_by_two,
    scattered,
    scattered_and_added,
    one_number_in_many_places,
    one_number_in_places_of_two_dimensions,
]
Write = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_write_of_one_row_or_number_is_a_kernel(write: Write) -> None:
    fused = fuse.compile(Function(write))
    for row in (4, 0, 5):
        given = torch.randn(ROWS, WIDTH), torch.tensor([row]), torch.randn(1, WIDTH)
        assert torch.equal(fused(*given), write(*given))
    assert fused.last_run.kernels
    assert not fused.last_run.aten


@pytest.mark.parametrize("write", [copied, added, put, put_by_two, scattered], ids=lambda write: write.__name__)
def test_a_position_out_of_range_raises_as_in_eager(write: Write) -> None:
    fused = fuse.compile(Function(write))
    fused(torch.randn(ROWS, WIDTH), torch.tensor([2]), torch.randn(1, WIDTH))
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        fused(torch.randn(ROWS, WIDTH), torch.tensor([ROWS + WIDTH]), torch.randn(1, WIDTH))


def test_a_write_to_elements_that_share_memory_stays_with_the_library() -> None:
    given = torch.randn(ROWS, WIDTH), torch.tensor([2]), torch.randn(1, WIDTH)
    fused = fuse.compile(Function(put_by_two_where_rows_share_memory))
    assert torch.equal(fused(*given), put_by_two_where_rows_share_memory(*given))


def scattered_and_added_by_column(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return m.t().scatter_add(1, i.expand(WIDTH, len(i)), y.t())


def put_and_added_by_two(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return m.index_put((i, i + 1), y[:, 0], accumulate=True)


def one_number_added(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return m.index_put((i - ROWS,), y[0, 0], accumulate=True)


def several_scattered(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return torch.cos(m).scatter(0, i[:, None].expand(len(i), WIDTH), y)  # of equal positions the last stays


def several_scattered_by_column(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return m.t().scatter(1, i.expand(WIDTH, len(i)), y.t()) * 2


ADDED = [added, put_and_added, scattered_and_added_by_column, put_and_added_by_two, one_number_added]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("write", ADDED, ids=lambda write: write.__name__)
def test_several_rows_are_added_by_a_kernel(write: Write, dtype: torch.dtype) -> None:
    fused = fuse.compile(Function(write))
    m, y = torch.randn(ROWS, WIDTH).mul(9).to(dtype), torch.randn(3, WIDTH).mul(9).to(dtype)
    m[0, 0] = -0.0  # no row is added to row 0
    for places in ([4, 1, 4], [1, 2, 3], [5, 5, 5]):
        i = torch.tensor(places)
        got, wanted = fused(m, i, y), write(m.double(), i, y.double()).to(dtype)
        torch.testing.assert_close(got, wanted)
        assert (got.dtype, got.stride()) == (dtype, write(m, i, y).stride())
        assert torch.equal(got[0, :1].float().signbit(), m[0, :1].float().signbit())
    assert fused.last_run.kernels
    assert not fused.last_run.aten
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        fused(m, torch.tensor([0, ROWS + WIDTH, 0]), y)


@pytest.mark.parametrize("write", [copied, put], ids=lambda write: write.__name__)
def test_a_write_of_several_rows_stays_with_the_library(write: Write) -> None:
    fused = fuse.compile(Function(write))
    given = torch.randn(ROWS, WIDTH), torch.tensor([2, 2]), torch.randn(2, WIDTH)
    fused(*given)
    assert fused.last_run.aten == 1


def test_rows_added_at_many_positions_stay_with_the_library() -> None:
    fused = fuse.compile(Function(added))
    given = torch.randn(300, WIDTH), torch.randint(300, (300,)), torch.randn(300, WIDTH)
    torch.testing.assert_close(fused(*given), added(*given), rtol=1e-4, atol=1e-4)
    assert fused.last_run.aten == 1


SCATTERED = [several_scattered, several_scattered_by_column]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("write", SCATTERED, ids=lambda write: write.__name__)
def test_of_several_elements_at_one_place_the_last_stays(write: Write, dtype: torch.dtype) -> None:
    fused = fuse.compile(Function(write))
    m, y = torch.randn(ROWS, WIDTH).to(dtype), torch.randn(4, WIDTH).to(dtype)
    y[3, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    for places in ([4, 1, 4, 1], [1, 2, 3, 0], [5, 5, 5, 5]):
        i = torch.tensor(places)
        got, wanted = fused(m, i, y), write(m, i, y)
        torch.testing.assert_close(got, wanted, equal_nan=True)
        assert torch.equal(got[got == 0].signbit(), wanted[got == 0].signbit())
    assert not fused.last_run.aten
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        fused(m, torch.tensor([0, ROWS + WIDTH, 0, 0]), y)


class Memory(nn.Module):
    """Each step writes a row of a memory and reads all of it."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.write = write
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, xs: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        m, h, kept = xs.new_zeros(ROWS, WIDTH), xs.new_zeros(1, WIDTH), []
        for t in range(len(xs)):
            m = self.write(m, places[t], xs[t] + h)
            h = torch.tanh(torch.cos(m).sum(0, keepdim=True) @ self.weight)
            kept.append(h)
        return torch.stack(kept), m


IN_LOOPS = [copied, added, put, put_from_the_end, put_and_added, scattered, scattered_and_added, filled]


@pytest.mark.sampled
@pytest.mark.usefixtures("alternately_optimised")
@pytest.mark.parametrize("write", IN_LOOPS, ids=lambda write: write.__name__)
def test_a_loop_that_writes_a_row_of_its_memory_is_one_kernel_and_trains(write: Write) -> None:
    torch.manual_seed(0)
    model = Memory(write)
    fused = fuse.compile(copy.deepcopy(model))
    xs, places = torch.randn(STEPS, 1, WIDTH), torch.randint(ROWS - 1, (STEPS, 1))
    (loop,) = fuse.show(model, (xs, places)).loops
    assert loop.launches_per_step_after == 0
    for one in (model, fused):
        kept, m = one(xs, places)
        (kept.square().sum() + m.sin().sum()).backward()
    torch.testing.assert_close(fused.weight.grad, model.weight.grad, rtol=1e-4, atol=1e-4)
    assert fused.last_run.launches < STEPS
    assert fused.last_run.backward.launches < STEPS


def degrees(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return torch.zeros(ROWS).scatter_add(0, i, torch.ones(len(i))).clamp(min=1)


def summed_messages(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return torch.zeros_like(m).index_add(0, i, y) + m


def one_hot_of_two(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
    return torch.zeros_like(m).index_put((i, i + 1), torch.ones(()))


@pytest.mark.parametrize("write", [degrees, summed_messages, one_hot_of_two], ids=lambda write: write.__name__)
def test_a_write_into_a_constant_is_one_launch(write: Write) -> None:
    fused = fuse.compile(Function(write))
    m, y = torch.randn(ROWS, WIDTH), torch.randn(3, WIDTH)
    for places in ([4, 1, 4], [5, 5, 5]):
        torch.testing.assert_close(fused(m, torch.tensor(places), y), write(m, torch.tensor(places), y))
    assert fused.last_run.launches == 1
    assert not fused.last_run.aten
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        fused(m, torch.tensor([0, ROWS + WIDTH, 0]), y)


TARGETS, SOURCES = torch.tensor([0, 1, 2, 3, 4, 0, 1, 0, 2, 0]), torch.tensor([1, 2, 3, 4, 0, 3, 3, 2, 4, 4])


class Messages(nn.Module):
    """Nodes receive messages along edges, which are combined; one node receives none."""

    def __init__(self, how: str, with_self: bool) -> None:
        super().__init__()
        self.how, self.with_self = how, with_self
        self.cell = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        places = TARGETS.unsqueeze(1).expand(-1, WIDTH)
        for _ in range(STEPS):
            messages = torch.tanh(self.cell(h[SOURCES]))
            received = (h * 0.1).scatter_reduce(0, places, messages, self.how, include_self=self.with_self)
            h = torch.tanh(h + received)
        return h


@pytest.mark.sampled
@pytest.mark.usefixtures("alternately_optimised")
@pytest.mark.parametrize("with_self", [True, False], ids=["with_self", "without"])
@pytest.mark.parametrize("how", ["sum", "mean", "amax", "amin"])
def test_messages_that_are_combined_in_a_loop_are_one_kernel_and_train(how: str, with_self: bool) -> None:
    torch.manual_seed(0)
    model, h = Messages(how, with_self), torch.randn(ROWS, WIDTH)
    report = check(model, (h,), train=True)
    assert report.passed, report
    assert report.fallbacks == ()
    assert report.observed[1] <= 2
    assert report.observed_backward[1] < STEPS
    h[4, 3] = torch.nan
    fused = fuse.compile(model)
    with torch.no_grad():
        torch.testing.assert_close(fused(h), model(h), equal_nan=True)
    assert fused.last_run.launches == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_products_and_integers_that_are_combined_stay_with_the_library(dtype: torch.dtype) -> None:
    def combined(m: Tensor, i: Tensor, y: Tensor) -> Tensor:
        return m.scatter_reduce(0, i.unsqueeze(1).expand(-1, WIDTH), y, "prod" if m.is_floating_point() else "mean") + 1

    m, i, y = torch.randint(9, (ROWS, WIDTH)).to(dtype), torch.tensor([1, 1, 4]), torch.randint(9, (3, WIDTH)).to(dtype)
    fused = fuse.compile(Function(combined))
    torch.testing.assert_close(fused(m, i, y), combined(m, i, y))
    assert fused.last_run.aten == 1
