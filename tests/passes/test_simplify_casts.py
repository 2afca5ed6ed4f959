from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.graph.function import Function
from fuse.rewrite import registry

PASSES = ["dead_code", "common_subexpressions", "view_chains", "no_ops", "simplify_casts"]

EDGES = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1.0 + 2**-7, 3.14159, -65520.0, 1e38, torch.inf, -torch.inf, 7.0])
VALUES = torch.cat([EDGES, torch.randn(37)]).view(6, 8)
B, I = VALUES.bfloat16(), torch.arange(-24, 24, dtype=torch.int16).view(6, 8)  # noqa: E741


def there_and_back(x: Tensor) -> Tensor:
    return torch.neg(x.float().bfloat16())


def by_way_of_float64(x: Tensor) -> Tensor:
    return torch.neg(x.double().half())


def counted_in_float32(x: Tensor) -> Tensor:
    return torch.neg(x.float().bfloat16())


def relu_in_float32(x: Tensor) -> Tensor:
    return torch.relu(x.float()).bfloat16() * 2


def moved_in_float32(x: Tensor) -> Tensor:
    wide = x.float()
    return torch.cat([wide.t(), wide.t().flip(0)], 1)[:, 2:9].abs().bfloat16()


def chosen_in_float32(x: Tensor) -> Tensor:
    other = (x * 3).float()
    return torch.where(x > 0, torch.maximum(x.float(), other), torch.minimum(other, -x.float())).bfloat16()


def looked_up_in_float32(x: Tensor) -> Tensor:
    return nn.functional.embedding(torch.tensor([3, 0, 3]), x.float()).bfloat16() + 1


FEWER: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, int]] = {
    "a cast there and back": (there_and_back, B, 0),
    "a cast by way of a wider dtype": (by_way_of_float64, VALUES, 1),
    "integers by way of float32": (counted_in_float32, I, 1),
    "a relu between casts": (relu_in_float32, B, 0),
    "movement between casts": (moved_in_float32, B, 0),
    "a choice between casts": (chosen_in_float32, B, 0),
    "a look-up between casts": (looked_up_in_float32, B, 0),
}


@pytest.mark.parametrize(("function", "x", "casts"), FEWER.values(), ids=FEWER)
def test_casts_that_change_no_bit_are_left_out(rewritten, function, x, casts) -> None:
    result = rewritten(Function(function), x, passes=PASSES)
    assert result.fired["simplify_casts"] >= 1
    assert result.count("_to_copy") == casts


class Steps(nn.Module):
    def forward(self, xs: Tensor) -> Tensor:
        h = torch.zeros(8, dtype=torch.bfloat16)
        for x in xs:
            h = torch.tanh(h + x.bfloat16())
        return h


def test_casts_of_all_steps_are_one_cast(rewritten) -> None:
    result = rewritten(Steps(), VALUES, passes=PASSES)
    assert result.fired["simplify_casts"] == 1
    assert result.count("_to_copy") == 1


def rounds(x: Tensor) -> Tensor:
    return torch.neg(x.bfloat16().float())


def sums_in_float32(x: Tensor) -> Tensor:
    return (x.float() + x.flip(0).float()).bfloat16()


def read_in_float32_too(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.relu(x.float())
    return wide.bfloat16() * 2, wide * 3


def transposed_by_the_cast(x: Tensor) -> Tensor:
    return torch.neg(x[:, ::2].float().bfloat16())


def range_is_lost(x: Tensor) -> Tensor:
    return torch.neg(x.half().bfloat16())


def some_of_many_steps(x: Tensor) -> Tensor:
    return torch.neg(x[0].bfloat16()) + x[1].bfloat16()


def results_of_their_own(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(row.bfloat16() for row in x.unbind())


def may_wrap(x: Tensor) -> Tensor:
    return torch.neg(x.float().to(torch.uint8).to(torch.int32))


NEAR = {
    "a rounding": (rounds, VALUES),
    "arithmetic between the casts": (sums_in_float32, B),
    "another reader of what is wide": (read_in_float32_too, B),
    "a layout that the cast makes": (transposed_by_the_cast, B),
    "a dtype of less range between": (range_is_lost, B),
    "few parts of a large tensor": (some_of_many_steps, VALUES),
    "results that must be apart": (results_of_their_own, VALUES),
    "integers that may wrap": (may_wrap, I.abs()),
}


@pytest.mark.parametrize(("function", "x"), NEAR.values(), ids=NEAR)
def test_near_misses_stay(rewritten, function, x) -> None:
    result = rewritten(Function(function), x, passes=PASSES)
    assert "simplify_casts" not in result.fired


def test_a_cast_there_and_back_of_an_input_is_a_copy(rewritten) -> None:
    result = rewritten(Function(lambda x: x.float().bfloat16()), B, passes=PASSES)
    assert "the result must not share memory with an input" in result.reasons


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
]


@pytest.mark.parametrize("between", DTYPES, ids=str)
@pytest.mark.parametrize("first", DTYPES, ids=str)
def test_any_two_casts_are_bit_for_bit_what_they_were(rewritten, first, between) -> None:
    x = (VALUES if first.is_floating_point else I.abs()).to(first)
    if first.is_floating_point and not between.is_floating_point:
        x = torch.randn(6, 8).abs().mul(100).to(first)  # what an integer cannot hold is undefined
    for last in (torch.bfloat16, torch.float16, torch.float32, first):
        rewritten(Function(lambda x, last=last: x.to(between).to(last).view(8, 6)), x, passes=PASSES)


def test_roundings_are_dropped_where_asked_for(rewritten) -> None:
    model = Function(rounds)
    assert "drop_roundings" not in [info.name for info in registry.select(None)]
    graph = fuse.capture(model, (VALUES,))
    ledger = fuse.run_passes(graph, [*PASSES, "drop_roundings"])
    assert {one.pass_name: one.count for one in ledger.fired} == {"drop_roundings": 1}
    assert torch.equal(graph(VALUES)[0].nan_to_num(), -VALUES.nan_to_num())


def test_what_is_no_number_stays_none(rewritten) -> None:
    x = torch.where(B > 1, torch.nan, B)
    result = rewritten(Function(lambda x: torch.isnan(torch.relu(x.float()).bfloat16()).float()), x, passes=PASSES)
    assert result.fired["simplify_casts"] == 1
    assert result.results[0].sum() == (B > 1).sum()
