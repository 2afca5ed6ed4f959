"""The launches that one rewrite saves: those of erased nodes minus those of created nodes."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from fuse import ops
from fuse.graph.loop import Loop
from fuse.rewrite.nested import MATCHED, called_module, kind


@dataclass
class LaunchChange:
    """The nodes created, and the launches of nodes erased, since the watch began."""

    created: list[Node] = field(default_factory=list)
    erased: int = 0

    @property
    def saved(self) -> int:
        """Launches before minus launches after."""
        return self.erased - sum(node_launches(node) for node in self.created if not node._erased)


@contextmanager
def watch(graph: GraphModule) -> Iterator[LaunchChange]:
    """A context that notes the creation and erasure of nodes of ``graph``."""
    change = LaunchChange()

    def erased(node: Node) -> None:
        change.erased += node_launches(node)

    created = change.created.append
    graph._register_create_node_hook(created)
    graph._register_erase_node_hook(erased)
    try:
        yield change
    finally:
        graph._unregister_create_node_hook(created)
        graph._unregister_erase_node_hook(erased)


def node_launches(node: Node) -> int:
    """The launches of one node: of an operator by the table (otherwise one), of a region one, of a loop those of all
    steps."""
    if node.op == "call_module":
        module = called_module(node)
        if kind(node) == MATCHED and isinstance(module, GraphModule):
            return sum(map(node_launches, module.graph.nodes))
        if isinstance(module, Loop) and not module.persistent:
            return module.gathered + module.trip_count * sum(map(node_launches, module.body.graph.nodes))
        return 1
    if node.op != "call_function" or node.target is operator.getitem:
        return 0
    known = ops.info(node.target)
    return 1 if known is None else known.launches
