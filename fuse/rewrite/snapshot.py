"""Store the contents of a graph, to restore them if a pass fails.

    before = taken(graph)      the contents of each node, in order, and of the modules inside
    ...                        passes change the graph in place
    put_back(before)           new nodes with the same contents

Objects that passes only replace as a whole (values, signatures) are not copied, so that this takes a twentieth of the
time of a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node, map_arg
from torch.fx.node import Argument, Target
from torch.nn import Module


@dataclass(frozen=True)
class _NodeState:
    node: Node
    name: str
    op: str
    target: Target
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    meta: dict[str, Any]


@dataclass(frozen=True)
class _ModuleState:
    """The metadata and children of a graph, region or loop; ``nodes`` is None for a module without a graph."""

    module: Module
    meta: dict[str, Any]
    children: dict[str, Module | None]
    nodes: tuple[_NodeState, ...] | None


Snapshot = tuple[_ModuleState, ...]


def taken(graph: GraphModule) -> Snapshot:
    """The contents of ``graph`` and of the modules in it, outermost first."""
    return tuple(
        _ModuleState(module, dict(getattr(module, "meta", {})), dict(module._modules), _nodes(module))
        for module in graph.modules()
    )


def _nodes(module: Module) -> tuple[_NodeState, ...] | None:
    if not isinstance(module, GraphModule):
        return None
    return tuple(_NodeState(n, n.name, n.op, n.target, n.args, n.kwargs, n.meta.copy()) for n in module.graph.nodes)


def put_back(before: Snapshot) -> None:
    """Restore the contents of every module in ``before``.

    >>> import torch, fuse
    >>> graph = fuse.capture(torch.nn.Tanh(), (torch.zeros(3),))
    >>> before = taken(graph)
    >>> graph.graph.output_node().args = ((),)
    >>> put_back(before)
    >>> graph.graph.output_node().args
    ((tanh,),)
    """
    for state in before:
        state.module._modules.clear()
        state.module._modules.update(state.children)
        meta = getattr(state.module, "meta", {})
        meta.clear()
        meta.update(state.meta)
        if isinstance(state.module, GraphModule) and state.nodes is not None:
            state.module.graph = _rebuilt(state.nodes)


def _rebuilt(nodes: tuple[_NodeState, ...]) -> Graph:
    graph = Graph()
    made: dict[Node, Node] = {}
    for state in nodes:
        args, kwargs = map_arg((state.args, dict(state.kwargs)), made.__getitem__)
        node = made[state.node] = graph.create_node(state.op, state.target, args, kwargs, name=state.name)
        node.meta = state.meta.copy()
    return graph
