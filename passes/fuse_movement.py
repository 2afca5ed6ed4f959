"""Fuse copies, concatenations and padding into the kernels that write or read them.

    a = x * 2                      r = region(x, y):
    c = cat([a, y], 1)   ->            out[:, :n] = x * 2        written where the concatenation needs it
    d = c.transpose(0, 1).clone()      out[:, n:] = y

These operators become part of the kernel that computes their operands or reads their result; so do stacks, repeats,
flips and copies to another layout. (Slices and transposes are views and never launch.)

Declined where the pieces would have to be read out of order.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from fuse import ops
from fuse.passes.region_growing import fuse_groups
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict


@register_pass(stage="fuse", after="assemble_in_place")
def fuse_movement(graph: GraphModule) -> Iterator[Verdict]:
    """Fuse copies, concatenations and padding into the kernels that write or read them."""
    yield from fuse_groups(graph, is_fusible)


def is_fusible(node: Node) -> bool:
    return ops.kind(node.target) in ("movement", "reduction", "pointwise")
