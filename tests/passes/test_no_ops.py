from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.graph.function import Function
from fuse.kernel.sizes.sized import lowering_for
from fuse.rewrite.pipeline import run_passes
from fuse.testing import assert_fuses

PASSES = ["no_ops"]
EDGES = torch.tensor([[0.0, -0.0, 1.5], [float("nan"), float("inf"), -2.0]])


class Inside(nn.Module):
    """An operator between two that compute something, so that nobody sees its result."""

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return torch.neg(self.operator(torch.neg(x)))


NOTHING = {
    "times one": lambda x: x * 1,
    "times one point zero": lambda x: x * 1.0,
    "divided by one": lambda x: x / 1,
    "to the power of one": lambda x: x**1,
    "one, times": lambda x: torch.mul(1, x),
    "plus negative zero": lambda x: x + -0.0,
    "negative zero, plus": lambda x: torch.add(-0.0, x),
    "minus zero": lambda x: x - 0.0,
    "minus integer zero": lambda x: x - 0,
    "times a tensor that is one": lambda x: x * torch.full((), 1.0),
    "a tensor that is one, times": lambda x: torch.full((), 1.0, dtype=torch.float64) * x,
    "minus a tensor that is zero": lambda x: x - torch.full((), 0),
    "plus a tensor that is negative zero": lambda x: torch.full((), -0.0) + x,
    "cloned": lambda x: x.clone(),
    "concatenated alone": lambda x: torch.cat([x], 1),
    "concatenated with nothing": lambda x: torch.cat([x[:, :0], x, torch.empty(0)], 1),
    "padded by nothing": lambda x: nn.functional.pad(x, (0, 0)),
    "repeated once": lambda x: x.repeat(1, 1),
    "flipped nowhere": lambda x: x.flip([]),
    "overwritten whole": lambda x: torch.slice_scatter(torch.sin(x), x, 0, 0, 2),
}
SOMETHING = {
    "plus zero clears the sign of zero": lambda x: x + 0.0,
    "plus integer zero clears it too": lambda x: x + 0,
    "minus negative zero clears it too": lambda x: x - -0.0,
    "times minus one": lambda x: x * -1,
    "a tensor that is one, divided": lambda x: torch.full((), 1.0) / x,
    "a tensor that is zero, minus": lambda x: torch.full((), 0.0) - x,
    "minus a tensor that is negative zero": lambda x: x - torch.full((), -0.0),
    "times a tensor that is two": lambda x: x * torch.full((), 2.0),
    "times ones that broadcast": lambda x: (x[:1] * torch.full((2, 3), 1.0)) + x,
    "times one in another dtype": lambda x: (x[0, 0] * torch.full((), 1.0, dtype=torch.float64)).float() + x,
    "repeated into a new dimension": lambda x: x.repeat(1, 1, 1),
    "cast down and up again": lambda x: x.to(torch.float16).to(torch.float32),
    "cast to double": lambda x: x.to(torch.float64),
    "a copy that transposes": lambda x: x.t().clone(memory_format=torch.contiguous_format),
    "flipped": lambda x: x.flip([1]),
    "concatenated with nothing of another dtype": lambda x: torch.cat([x, x[:, :0].double()], 1).float(),
    "concatenated with something": lambda x: torch.cat([x, x[:, :1]], 1),
    "zero minus": lambda x: 0 - x,
    "zero minus, as a function": lambda x: torch.sub(0, x),
    "a number, plus": lambda x: torch.add(1, x),
    "one, divided": lambda x: torch.div(1, x),
}


@pytest.mark.parametrize("operator", NOTHING.values(), ids=NOTHING)
def test_what_changes_nothing_is_left_out(rewritten, operator):
    result = rewritten(Inside(operator), EDGES, passes=["dead_code", *PASSES])
    assert result.fired["no_ops"] == 1
    assert result.launches == 2


@pytest.mark.parametrize("operator", SOMETHING.values(), ids=SOMETHING)
def test_what_changes_something_stays(rewritten, operator):
    assert rewritten(Inside(operator), EDGES, passes=PASSES).fired == {}


@pytest.mark.parametrize("operator", [lambda x: x * 1.0, lambda x: x / 1], ids=["times 1.0", "over 1"])
def test_arithmetic_that_promotes_integers_stays(rewritten, operator):
    result = rewritten(Inside(operator), torch.arange(4), passes=PASSES)
    assert result.fired == {}
    assert result.reasons == {"it changes the dtype or the device": 1}


def test_integers_have_one_zero(rewritten):
    assert rewritten(Inside(lambda x: x + 0), torch.arange(4), passes=PASSES).fired == {"no_ops": 1}


def test_complex_numbers_times_one_may_become_nan_and_stay(rewritten):
    model = Inside(lambda x: torch.view_as_real(torch.view_as_complex(x) * 1))
    assert rewritten(model, torch.randn(3, 2), passes=PASSES).fired == {}


KEPT_APART = {
    "a clone of the input": lambda x: x.clone(),
    "a clone of a view of the input": lambda x: x[0].clone(),
    "a clone of another result": lambda x: (y := torch.exp(x), y.clone()),
    "two clones of one value": lambda x: (lambda y: (y.clone(), y.clone()))(torch.exp(x)),
    "a clone of a view": lambda x: torch.exp(x)[0].clone(),
    "views of a clone of the input": lambda x: x.clone()[0],
}


@pytest.mark.parametrize("operator", KEPT_APART.values(), ids=KEPT_APART)
def test_results_share_no_memory_that_eager_keeps_apart(rewritten, operator):
    result = rewritten(Function(operator), EDGES, passes=PASSES)
    inputs_kept = all(node.op != "placeholder" for node in result.graph.graph.output_node().all_input_nodes)
    assert inputs_kept
    assert any(reason.startswith("the result must not share memory") for reason in result.reasons)


def test_a_clone_of_an_inner_value_that_is_returned_is_left_out(rewritten):
    assert rewritten(Function(lambda x: torch.exp(x).clone()), EDGES, passes=PASSES).launches == 1


def test_views_of_a_copy_become_views_of_the_original_at_its_offset(rewritten):
    result = rewritten(Inside(lambda x: x[1].clone()[1:]), EDGES, passes=PASSES)
    assert result.fired == {"no_ops": 1}


def test_absolute_views_keep_their_copy(rewritten):
    model = Inside(lambda x: x[1].clone().as_strided((2,), (1,), 0))
    assert rewritten(model, EDGES, passes=PASSES).reasons == {"an operator reads its memory by absolute position": 1}


def test_a_scalar_is_flipped_nowhere(rewritten):
    result = rewritten(Inside(lambda x: x.sum().flip(0)), EDGES, passes=["dead_code", *PASSES])
    assert result.fired["no_ops"] == 1


class Steps(nn.Module):
    """A number that is another one in each step: 1 in one of them, and 0 in one."""

    def forward(self, x: Tensor) -> Tensor:
        h = x[0]
        for t, step in enumerate(x):
            h = torch.sin(h * (t * 0.25)) @ step - (t - 2)
        return h


def test_a_number_that_changes_by_step_is_of_the_loop():
    with torch.no_grad():
        report = assert_fuses(Steps(), torch.randn(6, 8, 8), launches=1, fired={"no_ops": 0})
    assert [loop.trip_count for loop in report.loops] == [6]
    assert not report.loops[0].peeled


def test_the_same_number_in_all_steps_goes(rewritten):
    class Same(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for t in range(6):
                x = x * 1
                x = torch.sin(x) * (t + 2)
            return x

    assert rewritten(Same(), torch.randn(3), passes=PASSES).fired == {"no_ops": 6}


def test_a_number_that_is_one_because_of_the_sizes_stays() -> None:
    """And one that is 1 at every size, on the same line, does not."""
    remarks: dict[Hashable, set[Hashable]] = {}

    def products(steps: int) -> int:
        graph = fuse.capture(
            Function(lambda x: torch.neg(torch.neg(x) * (1 / x.shape[0]) * 1)), (torch.ones(steps, 2),)
        )
        with lowering_for(frozenset({steps}) if remarks else None, remarks):
            run_passes(graph, PASSES)
        return len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor))

    assert [products(steps) for steps in (4, 3, 1)] == [1, 1, 1]
    assert products(1) == 1
    remarks.clear()
    assert products(1) == 0
