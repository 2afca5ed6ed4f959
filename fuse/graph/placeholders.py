"""Inputs of graphs under names that are unique.

FX gives each node a name of its own, but writes the functions that run a graph with the names that were asked for.
"""

from __future__ import annotations

from torch.fx import Graph, Node


def add_placeholder(graph: Graph, name: str) -> Node:
    """A placeholder called ``name``, or like it where that is taken.

    >>> graph = Graph()
    >>> [add_placeholder(graph, "x").target for _ in range(2)]
    ['x', 'x_1']
    """
    node = graph.placeholder(name)
    if node.name != name and any(
        node is not other and other.target == name for other in graph.find_nodes(op="placeholder")
    ):
        node.target = node.name
    return node
