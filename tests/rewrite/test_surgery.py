from __future__ import annotations

import operator

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fuse.graph.capture import capture
from fuse.rewrite import effects, surgery

aten = torch.ops.aten


class Model(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.exp(x)
        b = torch.sin(a)
        c, d = b.split(1)
        return c * d, torch.cos(a[1:])


def model_graph() -> GraphModule:
    return capture(Model(), (torch.randn(2, 3),))


def first(graph: GraphModule, target: object) -> Node:
    return graph.graph.find_nodes(op="call_function", target=target)[0]


def test_inserted_nodes_know_value_and_source():
    graph = model_graph()
    sine = first(graph, aten.sin.default)
    node = surgery.insert(sine, aten.mm.default, surgery.insert(sine, aten.t.default, sine.args[0]), sine.args[0])
    assert (node.meta["val"].shape, node.meta["val"].stride()) == ((3, 3), (3, 1))
    assert node.meta["val"].fake_mode is surgery.fake_mode(graph.graph)
    assert node.meta["source"] == sine.meta["source"] != ""


def test_replacing_moves_users_output_and_views_along():
    graph = model_graph()
    exponential = first(graph, aten.exp.default)
    x = graph.graph.find_nodes(op="placeholder")[0]
    wide = surgery.insert(exponential, aten.cat.default, [x, x], 1)
    surgery.replace(exponential, surgery.insert(exponential, aten.slice.Tensor, wide, 1, 0, 3))
    sliced = first(graph, aten.cos.default).all_input_nodes[0]
    assert sliced.meta["val"].stride() == (6, 1)
    graph.graph.lint()


def test_erasing_takes_along_what_nothing_else_needs():
    graph = model_graph()
    product = first(graph, aten.mul.Tensor)
    surgery.replace(product, graph.graph.find_nodes(op="placeholder")[0])
    names = [str(node.target) for node in graph.graph.nodes]
    assert "aten.sin.default" not in names
    assert "aten.exp.default" in names, "the cosine still needs it"


def test_hoisting_takes_operands_along_in_order():
    graph = model_graph()
    sine, cosine = first(graph, aten.sin.default), first(graph, aten.cos.default)
    surgery.hoist([cosine], sine)
    order = [str(node.target) for node in graph.graph.nodes]
    assert order[1:5] == ["aten.exp.default", "aten.slice.Tensor", "aten.cos.default", "aten.sin.default"]
    graph.graph.lint()


def test_roots_are_found_through_operators_with_several_views():
    graph = model_graph()
    sine, output = first(graph, aten.sin.default), graph.graph.output_node()
    part = surgery.insert(output, operator.getitem, surgery.insert(output, aten.split.Tensor, sine, 1), 1)
    assert effects.root(part) is sine
    assert part.meta["val"].storage_offset() == 3


def test_parts_of_operators_that_compute_several_tensors_are_their_own_roots():
    class Deviation(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            variance, mean = torch.var_mean(x, 0)
            return variance + mean

    graph = capture(Deviation(), (torch.randn(2, 3),))
    part = graph.graph.find_nodes(op="call_function", target=operator.getitem)[0]
    assert effects.root(part) is part


def test_added_constants_are_described_in_the_signature():
    graph = model_graph()
    node = surgery.add_constant(graph, torch.arange(3), like=first(graph, aten.sin.default))
    placeholders = graph.graph.find_nodes(op="placeholder")
    assert placeholders.index(node) == len(placeholders) - 1
    assert graph.meta["signature"].inputs[-1].value.tolist() == [0, 1, 2]
    assert node.meta["val"].dtype == torch.int64


def test_equal_calls_have_equal_keys():
    graph = model_graph()
    sine = first(graph, aten.sin.default)
    again = surgery.insert(sine, aten.sin.default, sine.args[0])
    assert surgery.constant_key(sine.args) == surgery.constant_key(again.args)
    assert surgery.constant_key(sine.args) != surgery.constant_key((again,))
