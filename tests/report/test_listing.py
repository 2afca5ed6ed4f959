"""The listing of a graph's kernels."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from fuse.graph.capture import capture
from fuse.report.listing import listing
from fuse.report.show import show


class Chain(nn.Module):
    """The same two operators on the same shape from the same line, before and after a product."""

    def forward(self, x: Tensor) -> Tensor:
        x = activated(x)
        return activated(torch.mm(x, x))


def activated(x: Tensor) -> Tensor:
    return torch.tanh(x) + 1


def with_regions(graph: GraphModule) -> GraphModule:
    """Each tanh and the addition after it moved into a region of its own."""
    starts = [node for node in graph.graph.nodes if node.target is torch.ops.aten.tanh.default]
    for number, tanh in enumerate(starts):
        (plus,) = tanh.users
        source = tanh.args[0]
        assert isinstance(source, torch.fx.Node)
        inside = Graph()
        value = inside.placeholder("value")
        value.meta = dict(source.meta)
        first = inside.node_copy(tanh, {source: value}.__getitem__)
        last = inside.node_copy(plus, {tanh: first}.__getitem__)
        inside.output((last,))
        region = GraphModule(nn.Module(), inside)
        region.meta["kind"] = "region"
        graph.add_submodule(f"region_{number}", region)
        with graph.graph.inserting_after(plus):
            call = graph.graph.call_module(f"region_{number}", (source,))
        call.meta = {"val": (plus.meta["val"],), "source": plus.meta["source"]}
        with graph.graph.inserting_after(call):
            read = graph.graph.call_function(operator.getitem, (call, 0))
        read.meta = dict(plus.meta)
        plus.replace_all_uses_with(read)
        graph.graph.erase_node(plus)
        graph.graph.erase_node(tanh)
    return graph


def test_groups_that_compute_the_same_share_one_kernel() -> None:
    text = listing(with_regions(capture(Chain(), (torch.ones(4, 4),))))
    assert text.startswith("// region_0 and 1 more\n")
    assert text.count('extern "C"') == 1
    assert "tanh" in text


class Recurrent(nn.Module):
    """Eight steps on two states that begin as one tensor."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        h = c = torch.zeros(2, 4)
        for step in x:
            c = c + step
            h = torch.tanh(h @ w + c)
        return h


def test_a_rolled_loop_is_listed_with_its_kernel_and_lines() -> None:
    text = listing(show(Recurrent(), (torch.ones(8, 2, 4), torch.ones(4, 4))).graph)
    assert text.startswith("// loop_0: steps = 8, ")
    assert "const int64_t steps = sizes[0];" in text
    assert "test_listing.py:" in text
    assert "runs operator by operator" not in text


def test_the_ir_of_a_loop_has_time_as_its_outermost_loop_and_the_schedule_in_words() -> None:
    text = listing(show(Recurrent(), (torch.ones(8, 2, 4), torch.ones(4, 4))).graph, "ir")
    assert text.startswith("# loop_0: steps = 8, ")
    assert "\n# runs as: weights packed once; " in text
    assert "\n    for step in 8:\n" in text
    assert "test_listing.py:" in text
    assert text.count("tanh(") == 1
    assert 'extern "C"' not in text


class Perceptron(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w + 1)


def test_the_ir_of_a_product_has_a_nest_of_sums_and_what_follows() -> None:
    text = listing(show(Perceptron(), (torch.ones(64, 32), torch.ones(32, 48))).graph, "ir")
    assert "# runs as: blocks of columns" in text
    assert "memory product_0: 3072 of float32" in text
    assert "relu(" in text


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(1, 2), -1) @ v


def test_the_ir_of_attention_has_two_products() -> None:
    text = listing(show(Attention(), (torch.ones(8, 64, 32),) * 3).graph, "ir")
    assert "# runs as: blocks of whole rows of scores" in text
    assert "memory product_1: " in text
    assert "reduces" in text


def test_a_graph_without_groups_says_so() -> None:
    report = show(Chain(), (torch.ones(4, 4),), passes=[])
    assert listing(report.graph) == "// no fused groups, so no generated kernels"
    assert listing(report.graph, "ir") == "# no fused groups, so no generated kernels"


def test_a_group_that_cannot_be_lowered_is_listed_with_the_reason() -> None:
    graph = capture(nn.Tanh(), (torch.ones(4),))
    inside = Graph()
    value = inside.placeholder("value")
    tanh = next(node for node in graph.graph.nodes if node.op == "call_function")
    value.meta = dict(tanh.args[0].meta)
    drawn = inside.call_function(torch.ops.aten.rand_like.default, (value,))
    drawn.meta = dict(tanh.meta)
    inside.output((drawn,))
    region = GraphModule(nn.Module(), inside)
    region.meta["kind"] = "region"
    graph.add_submodule("region_0", region)
    with graph.graph.inserting_before(tanh):
        graph.graph.call_module("region_0", tanh.args)
    assert listing(graph).startswith("// region_0: runs operator by operator, because ")
