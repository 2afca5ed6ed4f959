"""Remove operators whose results are unused, except random ones.

    y = sin(x)      (nobody reads y)      ->      (nothing)

Random operators stay, because they advance the generator and later draws would change. Operators that the table does
not know stay, because they may have effects.

States that a loop's last step computes for a next step stay until loops are rolled, so that all steps are alike;
``unused_steps`` removes them where the loop was not rolled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from fuse.graph.outputs import cone
from fuse.loops.reads import token
from fuse.rewrite import effects, surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

FEWEST_OTHERS = 3
"""An unread operator may belong to a loop's last step if so many equal ones of its line are read."""


@register_pass(stage="clean")
def dead_code(graph: GraphModule) -> Iterator[Verdict]:
    """Remove operators whose results are unused, except random ones."""
    kept = of_last_steps(graph)
    for node in reversed(list(graph.graph.nodes)):
        if node in kept or node._erased or node.users or node.op in ("placeholder", "output"):
            continue
        if effects.is_pure(node):
            yield rewrite(node, surgery.erase, node)
        elif returns_something(node):
            yield declined(node, "its result is unused, but it draws random numbers or has an unknown effect")


def of_last_steps(graph: GraphModule) -> set[Node]:
    """Unread operators, if three equal ones of the same user line are read for each of them. Linear time.

    >>> import fuse, torch
    >>> class Lagging(torch.nn.Module):
    ...     def forward(self, x):
    ...         h, ys = torch.zeros(8), []
    ...         for step in x:
    ...             ys.append(h + step)
    ...             h = torch.tanh(h)
    ...         return torch.stack(ys)
    >>> graph = fuse.capture(Lagging(), (torch.ones(5, 8),))
    >>> sorted(str(node.target) for node in of_last_steps(graph))
    ['aten.tanh.default']
    """
    needed = cone(node for node in graph.graph.nodes if node.op == "output" or not effects.is_pure(node))
    unread = [n for n in graph.graph.nodes if n not in needed and (n.users or not effects.is_view(n))]
    targets = {node.target for node in unread if node.op == "call_function"}
    found = [node for target in targets for node in graph.graph.find_nodes(op="call_function", target=target)]
    kinds = {node: (token(node), source) for node in found if (source := node.meta.get("source"))}
    read = Counter(kind for node, kind in kinds.items() if node in needed)
    others = Counter(kinds[node] for node in unread if node in kinds)
    return {node for node in unread if node in kinds and read[kinds[node]] >= FEWEST_OTHERS * others[kinds[node]]}


def returns_something(node: Node) -> bool:
    """Whether ``node`` computes a value at all; an assertion, for one, is there only for its effect."""
    return node.meta.get("val") is not None
