"""Graphs inside graphs: the body of a loop is a graph that passes rewrite and counters count like any other.

    graph                    walk(graph) yields   graph       1
      call_module loop                            loop.body   its trip count
        body: GraphModule

Regions, and loops that run as one persistent kernel, are not walked: each is one launch, and final.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node
from torch.nn import Module

from fuse.graph.loop import Loop

MATCHED = "matched"
"""The kind of a module with the operators of a pattern's match, until gradients are taken."""


def kind(node: Node) -> str | None:
    """``"region"``, ``"loop"`` or ``MATCHED`` for a call of such a module; None for any other node."""
    module = called_module(node)
    return None if module is None else getattr(module, "meta", {}).get("kind")


def called_module(node: Node) -> Module | None:
    """The submodule that a ``call_module`` node calls; None for any other node."""
    owner = node.graph.owning_module
    return owner.get_submodule(str(node.target)) if node.op == "call_module" and owner is not None else None


def walk(graph: GraphModule, steps: int = 1) -> Iterator[tuple[GraphModule, int]]:
    """``graph`` and the loop bodies in it, outermost first, each with its number of runs in one call."""
    yield graph, steps
    for _, loop in _loops(graph, persistent=False):
        yield from walk(loop.body, steps * loop.trip_count)


def loop_kernels(graph: GraphModule) -> Iterator[tuple[Node, GraphModule]]:
    """The loops of ``graph`` that run as one persistent kernel, and their bodies."""
    for node, loop in _loops(graph, persistent=True):
        yield node, loop.body


def _loops(graph: GraphModule, *, persistent: bool) -> Iterator[tuple[Node, Loop]]:
    for node in graph.graph.find_nodes(op="call_module"):
        module = called_module(node)
        if isinstance(module, Loop) and module.persistent == persistent:
            yield node, module
