"""Remove what nothing uses.

    y = sin(x)      (nobody reads y)      ->      (nothing)

Random operators stay, read or not: they advance the generator, and what is drawn after them would change. So do
operators that the table does not know, which may do more than compute a value. What a loop computes in its last step
for a next one stays until loops are rolled (``fuse/loops/last_steps.py``).
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
    """Remove what nothing uses, random operators excepted."""
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
