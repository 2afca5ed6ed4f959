from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuse.graph.function import Function
from fuse.testing import assert_fuses

PASSES = ["view_chains", "no_ops", "collect_writes", "dead_code"]
X = torch.arange(24.0).view(4, 6) / 7


def rows(x):
    out = torch.zeros(4, 6)
    for t in range(4):
        out[t] = x[t].tanh()
    return out


def rows_backwards(x):
    out = torch.zeros(4, 6)
    for t in (3, 1, 0, 2):
        out[t] = x[t].tanh()
    return out


def columns(x):
    out = torch.zeros(4, 6)
    for t in range(6):
        out[:, t] = x[:, t].tanh()
    return out


def halves(x):
    out = torch.zeros(4, 6)
    out[:, 4:] = x[:, :2].tanh()
    out[:, :4] = x[:, 2:].tanh()
    return out


def new_dtype(x):
    out = torch.zeros(2, 6, dtype=torch.float64)
    out[0] = x[0].tanh()
    out[1] = x[1].exp()
    return out


def from_a_broadcast(x):
    out = torch.zeros(2, 6)
    out[0] = x[0, 0].tanh()
    out[1] = x[1]
    return out


def one_missing(x):
    out = torch.ones(4, 6)
    for t in (0, 1, 3):
        out[t] = x[t].tanh()
    return out


def one_twice(x):
    out = torch.zeros(3, 6)
    for t in (0, 1, 1, 2):
        out[t] = x[t].tanh() * (t + len(out.shape))
    return out


def the_middle(x):
    out = x.clone()
    out[:, 2:3] = x[:, :1].tanh()
    out[:, 3:5] = x[:, 4:].exp()
    return out


def rows_of_a_transposed_tensor(x):
    out = torch.zeros(6, 4).t()
    for t in range(4):
        out[t] = x[t].tanh()
    return out


def columns_of_a_transposed_tensor(x):
    out = torch.zeros(6, 4).t()
    for t in range(6):
        out[:, t] = x[:, t].tanh()
    return out


def halves_of_a_transposed_tensor(x):
    out = torch.zeros_like(x.t())
    out[4:] = x[:, :2].t().tanh()
    out[:4] = x[:, 2:].t().tanh()
    return out


def steps_of_heads(x):
    heads = x.view(1, 4, 3, 2).expand(2, -1, -1, -1).transpose(1, 2)
    out = torch.zeros_like(heads)
    for t in range(4):
        out[:, :, t] = heads[:, :, t].tanh()
    return out


COLLECTED = [
    *(rows, rows_backwards, columns, halves, new_dtype, from_a_broadcast, one_missing, one_twice, the_middle),
    *(rows_of_a_transposed_tensor, columns_of_a_transposed_tensor, halves_of_a_transposed_tensor, steps_of_heads),
]


@pytest.mark.parametrize("function", COLLECTED, ids=lambda f: f.__name__)
def test_writes_that_fill_a_tensor_become_one_collection(rewritten, function):
    result = rewritten(Function(function), X, passes=PASSES)
    assert result.fired["collect_writes"] == 1
    assert result.count("select_scatter") + result.count("slice_scatter") == 0
    assert result.count("stack") + result.count("cat") == 1


def most_missing(x):
    out = torch.zeros(6, 6)
    for t in range(2):
        out[t] = x[t].tanh()
    return out


def overlapping(x):
    out = torch.zeros(4, 6)
    out[:3] = x[:3].tanh()
    out[2:] = x[2:].exp()
    return out


def with_steps(x):
    out = torch.zeros(4, 6)
    out[::2] = x[::2].tanh()
    out[1::2] = x[1::2].exp()
    return out


def of_a_transposed_tensor(x):
    out = torch.zeros(6, 4).t()
    for t in range(4):
        out[t] = x[t].tanh()
    return out


DECLINED = {
    most_missing: "most positions are not written",
    overlapping: "writes overlap in part",
    with_steps: "a write has gaps, or no elements",
}


@pytest.mark.parametrize(("function", "reason"), DECLINED.items(), ids=lambda f: getattr(f, "__name__", ""))
def test_tensors_that_are_not_filled_once_stay_and_say_why(rewritten, function, reason):
    result = rewritten(Function(function), X, passes=PASSES)
    assert "collect_writes" not in result.fired
    assert result.reasons[reason] == 1


def read_in_between(x):
    out = torch.zeros(4, 6)
    for t in range(4):
        out[t] = out[t - 1].tanh() + x[t]
    return out


def read_afterwards(x):
    out = torch.zeros(2, 6)
    out[0] = x[0]
    first = out * 2
    out[1] = x[1]
    return out + first


def along_two_dimensions(x):
    out = torch.zeros(2, 2)
    out[0] = x[0, :2]
    out[:, 1] = x[:2, 1]
    return out


def a_single_write(x):
    out = torch.zeros(4, 6)
    out[1] = x[0]
    return out


@pytest.mark.parametrize(
    "function", [read_in_between, read_afterwards, along_two_dimensions, a_single_write], ids=lambda f: f.__name__
)
def test_what_is_no_chain_of_writes_stays(rewritten, function):
    assert "collect_writes" not in rewritten(Function(function), X, passes=PASSES).fired


@pytest.mark.parametrize(
    "function",
    [
        one_missing,
        one_twice,
        the_middle,
        most_missing,
        overlapping,
        of_a_transposed_tensor,
        read_in_between,
        read_afterwards,
    ],
    ids=lambda f: f.__name__,
)
def test_tensors_that_stay_are_right_when_run(function):
    assert_fuses(Function(function), X)


def test_the_collection_is_written_by_what_computes_it():
    assert_fuses(Function(rows), X, launches=1, fired={"collect_writes": 1})


@given(
    order=st.permutations(range(4)), dim=st.sampled_from([0, 1, -1]), dtype=st.sampled_from([torch.half, torch.float64])
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order_of_writes_collects_by_position(rewritten, order, dim, dtype):
    def function(x):
        out = x.new_zeros(4, 4)
        for t in order:
            out.select(dim, t).copy_(x[t] + t)
        return out

    result = rewritten(Function(function), torch.randn(4, 4).to(dtype), passes=PASSES)
    assert result.fired["collect_writes"] == 1
