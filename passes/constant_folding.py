"""Compute values that depend on no input once, before any call.

    a = arange(4)
    b = a * 0.5      ->      c = the constant [1.0, 1.6487, 2.7183, 4.4817]
    c = exp(b)

Each operator is evaluated in float64 on its rounded operands, and its result is rounded to its own dtype, so that it is
at least as close to the exact value as eager's. Integers stay exact. A tensor of equal elements becomes a ``full``,
which kernels read as a number (unless the elements are equal for the sizes of this call only). Any other tensor becomes
a constant of the graph. Declined where the constant would be larger than a megabyte and than its operands, and where it
would be a result: the caller may write to it, so that each call needs a new one. Random operators are never folded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse.kernel.sizes.sized import call_at_hand
from fuse.rewrite import effects, surgery
from fuse.rewrite.constants import LARGEST_CONSTANT, constant_nodes, fold_to_constant, given_constants
from fuse.rewrite.evaluate import FILLS, evaluate, is_uniform
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten


@register_pass(stage="clean", after="drop_roundings", before_gradients=False)  # constants would be new inputs
def constant_folding(graph: GraphModule) -> Iterator[Verdict]:
    """Compute values that depend on no input once, before any call."""
    values = given_constants(graph)
    constant = constant_nodes(graph, values)
    escaping = effects.escaping(graph)
    for node in [node for node in constant if node.target not in FILLS and is_needed(node, constant)]:
        value = evaluate(node, values, LARGEST_CONSTANT)
        if value is None:
            yield declined(
                node, f"the constant would be larger than {LARGEST_CONSTANT >> 20} MiB and than its operands"
            )
        elif is_always_uniform(node, value) and node.meta["val"].is_contiguous():
            yield rewrite(node, fold_to_fill, node, value)
        elif node in escaping or "signature" not in graph.meta:
            yield declined(node, "the constant would be a result, which is made anew in each call")
        else:
            yield rewrite(node, fold_to_constant, graph, node, value, values)


def is_always_uniform(node: Node, value: Tensor) -> bool:
    """Whether the elements of ``node`` are equal at all sizes. A mask of one step, say, is uniform for this size
    only: with a ``full``, this call could not share kernels with calls of other sizes."""
    uniform, call = is_uniform(value), call_at_hand()
    by_sizes = call is not None and call.follows_from_sizes(("fill", node.target, node.meta.get("source")), uniform)
    return uniform and not by_sizes


def is_needed(node: Node, constant: Collection[Node]) -> bool:
    """Whether a non-constant node reads ``node``, directly or through views."""
    if effects.is_view(node):
        return False
    worklist = list(node.users)
    while worklist:
        user = worklist.pop()
        if user not in constant:
            return True
        if effects.is_view(user):
            worklist.extend(user.users)
    return False


def fold_to_fill(node: Node, value: Tensor) -> None:
    """Replace ``node``, whose elements are equal, by a ``full``."""
    val = node.meta["val"]
    element = value.flatten()[0].item()
    fill = surgery.insert(
        node, aten.full.default, list(val.size()), element, dtype=val.dtype, device=val.device, like=node
    )
    surgery.replace(node, fill)
