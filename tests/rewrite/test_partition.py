from __future__ import annotations

import operator

import networkx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph, Node

from fuse.rewrite.partition import Partition, partition
from fuse.rewrite.regions import owner

aten = torch.ops.aten
OPERATORS = (aten.tanh.default, aten.mm.default, aten.rand.default, aten.t.default)


def always(earlier: int, later: int) -> int | str:
    return earlier + later


def never(earlier: int, later: int) -> int | str:
    return "these stay apart"


def at_most_three(earlier: int, later: int) -> int | str:
    return earlier + later if earlier + later <= 3 else "three are enough"


def one_if_pointwise(node: Node) -> int | None:
    return 1 if node.target is aten.tanh.default or node.target is aten.add.Tensor else None


def groups_of(graph: Graph, join=always) -> list[list[str]]:
    return [[m.name for m in g.members] for g in partition(graph, one_if_pointwise, join).groups]


def graph_of(edges: list[tuple[object, list[int]]]) -> tuple[Graph, list[Node]]:
    """Nodes with their target and the numbers of their operands (0 is the input), and an output that reads all."""
    graph = Graph()
    nodes = [graph.placeholder("x")]
    for target, operands in edges:
        nodes.append(graph.call_function(target, tuple(nodes[o] for o in operands)))
    graph.output(tuple(nodes[1:]))
    return graph, nodes


def test_a_chain_is_one_group():
    graph, _ = graph_of([(aten.tanh.default, [0]), (aten.tanh.default, [1]), (aten.tanh.default, [2])])
    assert groups_of(graph) == [["tanh_default", "tanh_default_1", "tanh_default_2"]]


def test_what_waits_for_a_product_in_between_is_not_grouped_around_it():
    graph, _ = graph_of([(aten.tanh.default, [0]), (aten.mm.default, [1, 1]), (aten.add.Tensor, [1, 2])])
    assert groups_of(graph) == [["tanh_default"], ["mm_default"], ["add_tensor"]]


def test_operands_that_are_ready_join_what_reads_them_last():
    graph, _ = graph_of([(aten.tanh.default, [0]), (aten.mm.default, [0, 0]), (aten.add.Tensor, [1, 2])])
    assert ["tanh_default", "add_tensor"] in groups_of(graph)


def test_views_and_parts_tie_a_group_together():
    graph = Graph()
    x = graph.placeholder("x")
    view = graph.call_function(aten.t.default, (graph.call_function(aten.tanh.default, (x,)),))
    both = graph.call_function(aten.split.Tensor, (graph.call_function(aten.tanh.default, (view,)), 1))
    last = graph.call_function(aten.tanh.default, (graph.call_function(operator.getitem, (both, 0)),))
    graph.output((last,))
    assert groups_of(graph) == [["tanh_default", "tanh_default_1", "tanh_default_2"]]


def test_refusals_name_both_sides_and_the_reason():
    graph, nodes = graph_of([(aten.tanh.default, [0]), (aten.tanh.default, [1])])
    (apart,) = partition(graph, one_if_pointwise, never).apart
    assert (apart.earlier, apart.later, apart.reason) == (nodes[1], nodes[2], "these stay apart")


def test_a_long_chain_and_a_wide_fan_take_linear_time():
    chain, _ = graph_of([(aten.tanh.default, [i]) for i in range(3000)])
    fan, _ = graph_of([(aten.tanh.default, [0]) for _ in range(3000)])
    assert [len(g) for g in groups_of(chain)] == [3000]
    assert len(groups_of(fan)) == 3000


edges = st.lists(
    st.tuples(st.sampled_from(OPERATORS), st.lists(st.integers(0, 40), min_size=1, max_size=3)),
    min_size=1,
    max_size=30,
)


@pytest.mark.parametrize("join", [always, at_most_three, never])
@given(edges=edges)
def test_groups_never_wait_for_one_another(join, edges):
    read = [operands[:1] if target is aten.t.default else operands for target, operands in edges]  # a view has one base
    graph, _ = graph_of([(target, [o % (i + 1) for o in read[i]]) for i, (target, _) in enumerate(edges)])
    found = partition(graph, one_if_pointwise, join)
    quotient = dependencies(graph, found)
    assert networkx.is_directed_acyclic_graph(quotient)
    effects = [m for g in found.groups for m in g.members if m.target is aten.rand.default]
    assert all(len(g.members) == 1 for g in found.groups if g.members[0] in effects)
    if join is at_most_three:
        assert all(len(g.members) <= 3 for g in found.groups)


def dependencies(graph: Graph, found: Partition[int]) -> networkx.DiGraph:
    """The graph of groups; every edge must lead to a greater depth."""
    group_of = {member: number for number, group in enumerate(found.groups) for member in group.members}
    quotient = networkx.DiGraph()
    for node, number in group_of.items():
        for argument in node.all_input_nodes:
            below = group_of.get(owner(argument))
            if below is not None and below != number:
                assert found.groups[below].depth < found.groups[number].depth
                quotient.add_edge(below, number)
    return quotient
