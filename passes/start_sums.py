"""Start a sum over steps from a tensor instead of a number, so that all steps are equal.

    s1 = add(a, 0.0)                 s0 = full([], 0.0)
    s2 = add(s1, b)          ->      s1 = add(s0, a)
    s3 = add(s2, c)                  s2 = add(s1, b)

``loss = 0.0`` before a loop and ``loss = loss + ...`` in it give the graph at the left, whose first step differs from
the others; ``loss = loss - ...`` begins with ``rsub(a, 0.0)``. The sum keeps its bits. Declined where the tensor would
change the dtype or shape of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fuse.loops.rolling import LEAST_STEPS
from fuse.rewrite import surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten

STEP_OF: dict[object, OpOverload] = {aten.add.Tensor: aten.add.Tensor, aten.rsub.Scalar: aten.sub.Tensor}
"""The first operator, of a tensor and a number -> the operator of the other steps."""


@register_pass(stage="clean", after="checks_together")
def start_sums(graph: GraphModule) -> Iterator[Verdict]:
    """Start a sum over steps from a tensor instead of a number, so that all steps are equal."""
    for node in list(graph.graph.nodes):
        if is_first(node) and summands(node) >= LEAST_STEPS:
            if _held(node) != _held(node.args[0]):
                yield declined(node, "adding the number changes the dtype or the shape")
            else:
                yield rewrite(node, start_from_tensor, node)


def is_first(node: Node) -> bool:
    """Whether ``node`` adds a tensor to a number, or subtracts it from one."""
    if node.target not in STEP_OF or node.kwargs or len(node.args) != 2 or not isinstance(node.args[0], Node):
        return False
    return type(node.args[1]) in (int, float)


def summands(node: Node) -> int:
    """The number of terms of the sum that begins with ``node``: each partial sum has one reader, which adds a term."""
    count, size, step = 1, node.meta["val"].shape, STEP_OF[node.target]
    while len(node.users) == 1:
        (following,) = node.users
        if following.target is not step or following.kwargs or following.args[0] is not node:
            break
        if not isinstance(following.args[1], Node) or following.args[1].meta["val"].shape != size:
            break
        node, count = following, count + 1
    return count


def _held(node: object) -> tuple[object, ...]:
    assert isinstance(node, Node)
    return node.meta["val"].dtype, tuple(node.meta["val"].shape)


def start_from_tensor(node: Node) -> None:
    """Let the first step have a tensor filled with its number, as the others have the sum so far."""
    added, number = node.args[:2]
    held = node.meta["val"]
    start = surgery.insert(
        node, aten.full.default, list(held.shape), number, dtype=held.dtype, device=held.device, like=node
    )
    surgery.replace(node, surgery.insert(node, STEP_OF[node.target], start, added, like=node))
