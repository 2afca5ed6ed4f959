"""Work of a loop's last step that only the missing next step would read.

    for t: y[t] = f(h);  h = g(h, x[t])              y[0] = f(h0)   h1 = g(h0, x[0])
    return y                                  ->     y[1] = f(h1)   h2 = g(h1, x[1])
                                                     y[2] = f(h2)   h3 = g(h2, x[2])     nobody reads h3

Without it, the last step would be unlike the others, and stay outside of the loop.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from fuse.loops.reads import token
from fuse.rewrite import effects

FEWEST_OTHERS = 3
"""Operators that are read, for each alike one that is not, from which the latter may be of a loop's last step."""


def last_steps(graph: GraphModule) -> set[Node]:
    """The unread operators that are like at least three times as many of the same line that are read. Linear.

    >>> import torch, fuse
    >>> class Lagging(torch.nn.Module):
    ...     def forward(self, x):
    ...         h, ys = torch.zeros(8), []
    ...         for step in x:
    ...             ys.append(h + step)
    ...             h = torch.tanh(h)
    ...         return torch.stack(ys)
    >>> graph = fuse.capture(Lagging(), (torch.ones(5, 8),))
    >>> sorted(str(node.target) for node in last_steps(graph))
    ['aten.tanh.default']
    """
    unread = _unread(graph)
    targets = {node.target for node in unread}
    read: dict[object, int] = {}
    alike: dict[object, list[Node]] = {}
    for node in graph.graph.nodes if unread else ():
        source = node.meta.get("source")
        if node.op == "call_function" and node.target in targets and source:
            key = token(node), source
            if not node.users and effects.is_view(node):
                continue  # it is of no step, and would keep what it looks at in use
            if node in unread:
                alike.setdefault(key, []).append(node)
            else:
                read[key] = read.get(key, 0) + 1
    enough = {key for key, nodes in alike.items() if read.get(key, 0) >= FEWEST_OTHERS * len(nodes)}
    return {node for key in enough for node in alike[key]}


def _unread(graph: GraphModule) -> set[Node]:
    """Values without readers, or whose readers have none."""
    found: set[Node] = set()
    for node in reversed(graph.graph.nodes):
        if node.op == "call_function" and found.issuperset(node.users) and effects.is_pure(node):
            found.add(node)
    return found
