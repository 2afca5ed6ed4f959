"""Remember what a graph says, to put it back when a pass fails halfway.

    before = taken(graph)      what each node says, in order, and the modules inside
    ...                        passes change the graph in place
    put_back(graph, before)    new nodes that say the same

Nothing is copied that passes replace as a whole (values, signatures), so that taking costs a twentieth of a copy.
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
    """A graph, region or loop: its metadata and its children; ``nodes`` is None for what is no graph."""

    module: Module
    meta: dict[str, Any]
    children: dict[str, Module | None]
    nodes: tuple[_NodeState, ...] | None


Snapshot = tuple[_ModuleState, ...]


def taken(graph: GraphModule) -> Snapshot:
    """State of ``graph`` and the modules inside of it, outermost first."""
    return tuple(
        _ModuleState(module, dict(getattr(module, "meta", {})), dict(module._modules), _nodes(module))
        for module in graph.modules()
    )


def _nodes(module: Module) -> tuple[_NodeState, ...] | None:
    if not isinstance(module, GraphModule):
        return None
    return tuple(_NodeState(n, n.name, n.op, n.target, n.args, n.kwargs, n.meta.copy()) for n in module.graph.nodes)


def put_back(before: Snapshot) -> None:
    """Let every module of which ``before`` was taken say again what it said then.

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
