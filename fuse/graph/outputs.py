"""Inputs with unique names, outputs of a graph, and the nodes that lead to a node.

FX gives each node a name of its own, but the functions that it generates use the requested names of placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.nn import Module

T = TypeVar("T")


def finished(graph: Graph, results: Sequence[Node], root: Module | None = None) -> GraphModule:
    """``graph``, which has no output node yet, as a module that returns ``results``."""
    output = graph.output(tuple(results))
    output.meta.update(val=tuple(node.meta["val"] for node in results), source="")
    return _LazyGraphModule(Module() if root is None else root, graph)


def copied(module: GraphModule) -> GraphModule:
    """A copy of a captured graph, which calls the same modules."""
    graph, root = Graph(), Module()
    root._modules.update(module._modules)
    made = finished(graph, graph.graph_copy(module.graph, {}), root)  # type: ignore[arg-type]  # FX types arguments loosely
    made.meta.update(module.meta)
    return made


def add_placeholder(graph: Graph, name: str) -> Node:
    """A new placeholder called ``name``, or ``name_1`` and so on if that is taken.

    Its target is its name: FX writes the target as a parameter of the generated function, where it must not be called
    like another node.

    >>> graph = Graph()
    >>> [add_placeholder(graph, "x").target for _ in range(2)]
    ['x', 'x_1']
    """
    node = graph.placeholder(name)
    node.target = node.name
    return node


def outputs_of(graph: Graph) -> tuple[Node, ...]:
    """The outputs of a captured graph, always a flat sequence of nodes.

    >>> graph = Graph()
    >>> _ = graph.output([graph.placeholder("x")])
    >>> outputs_of(graph)
    (x,)
    """
    (results,) = graph.output_node().args
    return tuple(results)  # type: ignore[arg-type]  # FX allows any structure


def part_of(graph: Graph, results: Sequence[Node], kept: Iterable[Node]) -> GraphModule:
    """A graph of its own that computes ``results`` of ``graph``, and has the ``kept`` placeholders even if nothing
    reads them."""
    wanted, made, copies = cone([*results, *kept]), Graph(), dict[Node, Node]()
    for node in graph.nodes:
        if node in wanted:
            copies[node] = made.node_copy(node, copies.__getitem__)
    return finished(made, [copies[node] for node in results])


def inlined(graph: Graph, inner: Graph, given: Iterable[Node]) -> list[Node]:
    """Copy the operators of ``inner`` to where ``graph`` inserts nodes, with ``given`` nodes for its placeholders.

    Returns the copies of its outputs.
    """
    copies = dict(zip(inner.find_nodes(op="placeholder"), given, strict=True))
    return list(graph.graph_copy(inner, copies))  # type: ignore[arg-type]  # FX types arguments loosely


def cone(nodes: Iterable[Node], within: Callable[[Node], bool] = lambda _: True) -> set[Node]:
    """``nodes`` and all their direct and indirect operands, through nodes accepted by ``within``.

    >>> graph = Graph()
    >>> x, y = graph.placeholder("x"), graph.placeholder("y")
    >>> cone([graph.call_function(abs, (x,))]) & {x, y} == {x}
    True
    """
    found: set[Node] = set()
    worklist = list(nodes)
    while worklist:
        node = worklist.pop()
        if node not in found and within(node):
            found.add(node)
            worklist.extend(node.all_input_nodes)
    return found


def worked_out(node: Node, known: dict[Node, T], of: Callable[[Node], T]) -> T:
    """``of(node)``, after ``of`` was computed for all direct and indirect operands; ``known`` stores the results.

    Iterative, because graphs are deeper than Python's stack.

    >>> graph = Graph()
    >>> x = graph.placeholder("x")
    >>> depth = {x: 0}
    >>> worked_out(graph.call_function(abs, (x,)), depth, lambda node: 1 + max(map(depth.get, node.all_input_nodes)))
    1
    """
    waiting = [node]
    while waiting:
        one = waiting[-1]
        missing = [] if one in known else [operand for operand in one.all_input_nodes if operand not in known]
        waiting.extend(missing)
        if not missing:
            waiting.pop()
            if one not in known:
                known[one] = of(one)
    return known[node]
