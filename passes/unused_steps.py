"""Remove results of an unrolled loop's last step that nothing reads.

    y1 = f(h1)    h2 = g(h1)             y1 = f(h1)    h2 = g(h1)
    y2 = f(h2)    h3 = g(h2)      ->     y2 = f(h2)
    stack([y1, y2])                      stack([y1, y2])

``dead_code`` keeps them, so that all steps are alike until loops are rolled. In a rolled loop such a result is a state
that nothing reads after the last step.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from fuse.rewrite import effects, surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, rewrite


@register_pass(stage="loops", after="roll_loops")
def unused_steps(graph: GraphModule) -> Iterator[Verdict]:
    """Remove results of an unrolled loop's last step that nothing reads."""
    for node in reversed(list(graph.graph.nodes)):
        if node._erased or node.users or node.op != "call_function" or _is_part_of_loop(node):
            continue
        if effects.is_pure(node):
            yield rewrite(node, surgery.erase, node)


def _is_part_of_loop(node: Node) -> bool:
    """Whether ``node`` is a result of a rolled loop, which exists even if nothing reads it."""
    return node.target is operator.getitem and node.all_input_nodes[0].op == "call_module"
