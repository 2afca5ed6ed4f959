"""What a graph is for the matcher: which nodes are steps, what they read and what reads them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, randn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fuse.rewrite.patterns.index import GraphIndex, is_operator

aten = torch.ops.aten


def graph_of(function: Callable[..., Any], *arguments: Tensor) -> GraphModule:
    graph: GraphModule = make_fx(function, tracing_mode="fake")(*arguments)
    return graph


def test_which_nodes_are_operators():
    def model(x):
        largest, _ = torch.exp(x).max(0)
        return largest, x.as_strided((2,), (1,)), aten.sym_size.int(x, 0)

    nodes = graph_of(model, randn(3, 4)).graph.nodes
    assert [node.name for node in nodes if is_operator(node)] == ["exp", "max_1", "getitem", "getitem_1"]


def test_a_call_without_a_tensor_and_a_result_of_a_module_are_no_operators():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    size = graph.call_function(aten.sym_size.int, (x, 0))
    several = graph.call_module("loop", (x,))
    part = graph.call_function(operator.getitem, (several, 0))
    x.meta["val"], size.meta["val"], several.meta["val"], part.meta["val"] = randn(3), 3, (randn(3),), randn(3)
    assert not any(map(is_operator, graph.nodes))


def test_lengths_of_lists_are_those_of_tensors():
    def model(x, y):
        return torch.cat([x, y]).sum(0).view([]), torch.stack([x, x, y]), x.permute(3, 2, 1, 0), y + 1

    index = GraphIndex(graph_of(model, randn(1, 1, 1, 1), randn(1, 1, 1, 1)))
    assert index.list_lengths() == {2, 3}


def test_what_reads_a_value_is_told_through_views_and_no_further():
    def model(x, y):
        return torch.sin(torch.exp(x)) * y, torch.cos(x.t()), torch.addmm(x, y, x)

    graph = graph_of(model, randn(3, 3), randn(3, 3))
    index = GraphIndex(graph)
    x, y, *_ = graph.graph.nodes
    assert [(step.node.name, step.term.name) for step in index.readers_of(x)] == [
        ("exp", "exp"),
        ("cos", "cos"),
        ("addmm", "add"),
        ("addmm", "matmul"),
    ]
    assert [(step.node.name, step.term.name) for step in index.readers_of(y)] == [("mul", "mul"), ("addmm", "matmul")]


@pytest.mark.parametrize("name", ["t", "exp"])
def test_a_view_is_no_step(name):
    graph = graph_of(lambda x: torch.exp(x.t()), randn(3, 4))
    (node,) = (node for node in graph.graph.nodes if node.name == name)
    assert bool(GraphIndex(graph).last_steps(node)) == (name != "t")


def test_calls_that_differ_in_a_keyword_alone_are_two():
    graph = graph_of(
        lambda x, y: (torch.add(x, y, alpha=2), torch.add(x, y, alpha=3), torch.add(y, x, alpha=2)), randn(3), randn(3)
    )
    index = GraphIndex(graph)
    first, second, third = (
        index.own(node) for node in graph.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    )
    assert first.shape is third.shape
    assert first.shape is not second.shape
    assert str(first.shape.term) != str(second.shape.term)


def test_an_operand_may_be_given_by_name():
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    product = graph.call_function(aten.mul.Tensor, (x,), {"other": y})
    graph.output(product)
    for node in (x, y, product):
        node.meta["val"] = randn(3)
    call = GraphIndex(GraphModule(nn.Module(), graph)).own(product)
    assert call.operands == (x, y)
    assert [operand.value[0] for operand in call.shape.term.operands] == [0, 1]
