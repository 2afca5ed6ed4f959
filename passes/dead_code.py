"""Remove operators whose results are unused, except random ones.

    y = sin(x)      (nobody reads y)      ->      (nothing)

Random operators stay, because they advance the generator and later draws would change. Operators that the table does
not know stay, because they may have effects. States that a loop's last step computes for a next step stay until loops
are rolled (``fuse/loops/last_steps.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from fuse.loops.last_steps import last_steps
from fuse.rewrite import effects, surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite


@register_pass(stage="clean")
def dead_code(graph: GraphModule) -> Iterator[Verdict]:
    """Remove operators whose results are unused, except random ones."""
    kept = last_steps(graph)
    for node in reversed(list(graph.graph.nodes)):
        if node in kept or node._erased or node.users or node.op in ("placeholder", "output"):
            continue
        if effects.is_pure(node):
            yield rewrite(node, surgery.erase, node)
        elif returns_something(node):
            yield declined(node, "unused, but running it has an effect (random numbers, or unknown)")


def returns_something(node: Node) -> bool:
    """Whether ``node`` computes a value at all; an assertion, for one, is there only for its effect."""
    return node.meta.get("val") is not None
