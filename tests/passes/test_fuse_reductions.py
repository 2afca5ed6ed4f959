from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import fuse
from fuse.graph.function import Function
from fuse.testing import assert_fuses

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def scaled_softmax(x):
    return (x * 0.5).softmax(-1).tanh()


def residual_norm(x):
    return F.layer_norm(x + x.tanh(), (8,)).relu()


def centered(x):
    y = x * 2
    return (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True) + 1).sqrt()


def over_columns(x):
    return (x.exp() / x.exp().sum(0)).neg()


def rows_only(x):
    return (x * x).sum(-1).sqrt() + 1


def everything(x):
    return x.tanh().sum() * 2


def both_sizes(x):
    y = x.tanh()
    return y, y.amax(-1)


def one_result_twice(x):
    values, positions = x.sigmoid().max(-1)
    return values * 2, positions


FUSED = [scaled_softmax, residual_norm, centered, over_columns, rows_only, everything, both_sizes, one_result_twice]


@pytest.mark.parametrize("function", FUSED, ids=lambda f: f.__name__)
def test_a_reduction_takes_in_what_feeds_it_and_what_it_feeds(function):
    assert_fuses(Function(function), X, launches=1)


def different_rows(x):
    return x.sum(0), (x - x.sum(0)).sum(1)


def rows_then_columns(x):
    return x.softmax(0).softmax(1)


def a_product_between(x):
    return (x.softmax(-1) @ x.t()).softmax(-1)


def no_rows(x):
    return (x[:0] * 2).sum(-1) + 1


@pytest.mark.parametrize("function", [different_rows, rows_then_columns, a_product_between, no_rows])
def test_near_misses_take_more_launches_and_are_right(function):
    assert assert_fuses(Function(function), X).after.launches > 1


def test_square_tensors_reduced_both_ways_are_told_apart():
    assert_fuses(Function(rows_then_columns), X[:, :6], launches=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_floating_dtype_is_right(dtype):
    assert_fuses(Function(scaled_softmax), X.to(dtype).t(), launches=1)


def test_reductions_of_a_tensor_that_is_filled_row_by_row_are_several_kernels() -> None:
    """Each reduction has a loop for each row written so far: in one kernel, the square of the number of steps."""

    def filled(x):
        memory, state = torch.zeros_like(x), torch.zeros_like(x[0])
        for t in range(len(x)):
            memory[t] = torch.tanh(x[t] + state)
            state = torch.sin(state + memory.mean(0))
        return state

    x = torch.randn(12, 2, 8)
    fused = fuse.compile(Function(filled))
    torch.testing.assert_close(fused(x), filled(x))
    assert fused.last_run.launches <= 5
    report = fuse.show(Function(filled), (x,))
    assert any("each with a loop of its own" in rejected.reason for rejected in report.rejected)
    assert max(len(kernel.source) for kernel in fused._engine.latest().program.kernels.values()) < 16_000
