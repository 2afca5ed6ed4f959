"""Peak live bytes: storages, not tensors, are what is live."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fuse.cost.memory import peak_of_dispatches, peak_of_graph
from fuse.graph.signature import Dispatch

aten = torch.ops.aten
ROW = 1024  # bytes of one value below


def dispatch(op: torch._ops.OpOverload, *args: object) -> tuple[Dispatch, Tensor]:
    result = op(*args)
    return Dispatch(op, args, {}, result, ""), result


def chain(length: int) -> list[Dispatch]:
    value, record = torch.ones(256), []
    for _ in range(length):
        step, value = dispatch(aten.relu.default, value)
        record.append(step)
    return record


def test_a_chain_holds_its_input_and_two_values_at_a_time() -> None:
    assert peak_of_dispatches(chain(10)) == 3 * ROW


def test_a_view_keeps_its_base_and_adds_nothing() -> None:
    x = torch.ones(256)
    first, y = dispatch(aten.relu.default, x)
    second, look = dispatch(aten.view.default, y, [16, 16])
    third, _ = dispatch(aten.tanh.default, x)
    fourth, _ = dispatch(aten.exp.default, look)
    assert peak_of_dispatches([first, second, third, fourth]) == 4 * ROW
    assert peak_of_dispatches([first, second]) == 2 * ROW


def test_an_operator_in_place_allocates_nothing() -> None:
    x = torch.ones(256)
    assert peak_of_dispatches([dispatch(aten.relu_.default, x)[0]]) == ROW


def test_a_result_that_nothing_reads_is_an_output_and_lives_on() -> None:
    x = torch.ones(256)
    record = [dispatch(op, x)[0] for op in (aten.relu.default, aten.tanh.default, aten.exp.default)]
    assert peak_of_dispatches(record) == 4 * ROW


def node(graph: Graph, value: object, target: object, *args: object) -> Node:
    created = graph.call_function(target, args) if callable(target) else graph.call_module(str(target), args)
    created.meta["val"] = value
    return created


def graph_with_input() -> tuple[Graph, Node]:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(256, device="meta")
    return graph, x


def row(count: int = 1) -> Tensor:
    return torch.empty(256 * count, device="meta")


def test_pieces_of_an_assembled_buffer_lie_in_it() -> None:
    peaks = {}
    for joins in (torch.ops.fuse.assemble.default, aten.cat.default):
        graph, x = graph_with_input()
        pieces = [node(graph, row(), aten.relu.default, x) for _ in range(3)]
        graph.output((node(graph, row(3), joins, pieces, 0),))
        peaks[joins] = peak_of_graph(GraphModule({}, graph))
    assert peaks == {torch.ops.fuse.assemble.default: 4 * ROW, aten.cat.default: 7 * ROW}


def test_results_of_one_region_die_one_by_one() -> None:
    graph, x = graph_with_input()
    region = node(graph, (row(), row()), "region", x)
    first, second = (node(graph, row(), operator.getitem, region, i) for i in range(2))
    a = node(graph, row(), aten.relu.default, first)
    b = node(graph, row(), aten.add.Tensor, a, second)
    graph.output((node(graph, row(), aten.relu.default, b),))
    body = GraphModule({}, Graph())
    body.meta["kind"] = "region"
    assert peak_of_graph(GraphModule({"region": body}, graph)) == 4 * ROW


def test_long_graphs_of_views_take_linear_time_and_no_recursion() -> None:
    graph, x = graph_with_input()
    look = node(graph, row(), aten.relu.default, x)
    for _ in range(5000):
        look = node(graph, row(), aten.alias.default, look)
    graph.output((node(graph, row(), aten.relu.default, look),))
    assert peak_of_graph(GraphModule({}, graph)) == 3 * ROW
