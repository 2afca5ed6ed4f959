"""Run the nodes of a graph again, under a recorder, from known inputs.

known = {x: tensor, h: tensor}        for node in graph:  known[node] = operate(node)        parts of one tensor
                                                                                             in one operation
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

from fuse.gradients.sibling_views import SlicedDimension, all_parts, parts_of


def replay(graph: Graph, known: dict[Node, Any], begin: Callable[[Node], None], operate: Callable[[Node], Any]) -> None:
    """Add the result of every operator and module of ``graph`` to ``known``, in order.

    ``begin`` is called with each node before it runs; ``operate`` returns its result, from the values known by then.
    """
    refused: set[SlicedDimension] = set()
    for node in graph.nodes:
        begin(node)
        if node in known or node.op not in ("call_function", "call_module"):
            continue
        if siblings := all_parts(node, refused):
            known.update(zip(siblings, parts_of(known[node.args[0]], siblings), strict=True))
        else:
            known[node] = operate(node)
