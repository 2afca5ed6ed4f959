"""One operator for all steps at once: what is recorded, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from fuse.graph.capture import capture
from fuse.graph.function import Function
from fuse.graph.outputs import outputs_of
from fuse.loops.batching import Batcher, CannotBatchError
from fuse.rewrite import surgery

aten = torch.ops.aten
STEPS = 9


def batched(run: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> list[Node]:
    """The operators for all steps of ``run(x[t], w)``."""
    body = capture(Function(run), (x, w)).graph
    graph = Graph()
    known: dict[Node, Node] = {}
    step, weight = body.find_nodes(op="placeholder")
    with surgery.fake_mode(body):
        whole = torch.empty(STEPS, *x.shape)
    for node, value in ((step, whole), (weight, weight.meta["val"])):
        known[node] = graph.placeholder(node.name)
        known[node].meta["val"] = value
    batcher = Batcher(graph, known, {step})
    for node in body.nodes:
        if node.op == "call_function":
            batcher.add(node)
    result = known[outputs_of(body)[0]]
    assert tuple(result.meta["val"].shape) == (STEPS, *run(x, w).shape)
    return [node for node in graph.nodes if node.op == "call_function"]


def test_a_product_with_a_weight_becomes_one_over_the_rows_of_all_steps() -> None:
    made = batched(lambda x, w: torch.addmm(w[0], x, w), torch.randn(3, 5), torch.randn(5, 4))
    assert [node.target for node in made] == [aten.select.int, aten.view.default, aten.addmm.default, aten.view.default]
    assert tuple(made[2].meta["val"].shape) == (STEPS * 3, 4)


def test_a_softmax_runs_along_the_same_dimension_of_all_steps() -> None:
    (softmax,) = batched(lambda x, w: x.softmax(-1), torch.randn(3, 5), torch.randn(5))
    assert softmax.target is aten._softmax.default


@pytest.mark.parametrize(
    "write",
    [
        lambda x, w: x.select_scatter(w[:, 0], -1, 2),
        lambda x, w: w.select_scatter(x[:, 1], 1, 2),
        lambda x, w: x.select_scatter(x[:, 0], 1, -1),
    ],
    ids=["of a weight", "into a weight", "of the step itself"],
)
def test_a_write_of_one_position_stays_one_so_that_its_gradient_is_right(
    write: Callable[[Tensor, Tensor], Tensor],
) -> None:
    made = batched(write, torch.randn(3, 5), torch.randn(3, 3)[:, :1].expand(3, 5))
    (scatter,) = [node for node in made if "scatter" in str(node.target)]
    assert scatter.target is aten.select_scatter.default
    assert scatter.args[2] == 2


def test_a_number_beside_a_scalar_of_each_step_is_a_tensor_of_the_scalars_dtype() -> None:
    nodes = batched(lambda x, w: 0.5 * (x * w).sum(), torch.randn(4), torch.randn(4))
    assert [node.target for node in nodes[-2:]] == [aten.full.default, aten.mul.Tensor]
    assert nodes[-2].meta["val"].dtype is torch.float32
    assert all(isinstance(operand, Node) for operand in nodes[-1].args)


def test_results_that_are_none_are_none_for_all_steps() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        image, of_weight, of_bias = aten.convolution_backward(
            torch.ones(3, 4, 6), x, w, None, [1], [0], [1], False, [0], 1, [True, False, False]
        )
        assert of_weight is None
        assert of_bias is None
        return image

    nodes = batched(run, torch.randn(3, 2, 8), torch.randn(4, 2, 3))
    assert [node.target for node in nodes].count(aten.convolution_backward.default) == 1


def test_a_rule_that_takes_one_step_after_the_other_is_refused() -> None:
    with pytest.raises(CannotBatchError, match="one step after another"):
        batched(lambda x, w: torch.index_add(x, 1, (x[0] * 0).long(), x), torch.randn(3, 5), torch.randn(5))
