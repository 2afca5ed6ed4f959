"""Undo `draw_ahead` where no loop was rolled.

    ms = stack([m0, m1, m2, m3])
    y = mul(x, select(ms, 0, 1))          ->         y = mul(x, m1)

``draw_ahead`` stacks the numbers of all steps in the hope of a loop. Declined where a loop reads the stack.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.loops.collectors import pieces_of
from fuse.rewrite import surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten


@register_pass(stage="loops", after="broadcast_starts", before_gradients=False)  # for the kernel only
def draw_apart(graph: GraphModule) -> Iterator[Verdict]:
    """Undo `draw_ahead` where no loop was rolled."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.stack.default):
        if not all(is_draw(piece) for piece in pieces_of(node)) or node.args[1:] not in ((), (0,)):
            continue
        if all(user.target is aten.select.int and user.args[1] == 0 for user in node.users):
            yield rewrite(node, read_apart, node)
        else:
            yield declined(node, "a loop reads the stacked draws")


def is_draw(node: Node) -> bool:
    """Whether ``node`` is a random operator."""
    return ops.is_random(node.target)


def read_apart(stack: Node) -> None:
    """Let each reader of one step of ``stack`` read that step's draw."""
    pieces = pieces_of(stack)
    for part in list(stack.users):
        surgery.replace(part, pieces[part.args[2]])  # type: ignore[index]  # FX types arguments loosely
