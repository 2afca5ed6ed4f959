"""Fuse neighbouring elementwise operators into one kernel.

    a = x * 2                      r = region(x, y):
    b = tanh(a)          ->            a = x * 2
    c = b + y                          return tanh(a) + y      a and b live in registers

One launch and one trip through memory replace one of each for every operator. Slices, transposes and broadcasts in
between become index arithmetic. A cheap value of lower rank (a scaled mask) is computed again where it is broadcast; a
costly one is not. A convolution of few taps in single channels counts as elementwise, too.

Declined where the operators' loops differ, and where a reshape fits no loop order.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.passes.region_growing import fuse_groups
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict


@register_pass(stage="fuse")
def fuse_pointwise(graph: GraphModule) -> Iterator[Verdict]:
    """Fuse neighbouring elementwise operators into one kernel."""
    yield from fuse_groups(graph, is_pointwise)


def is_pointwise(node: Node) -> bool:
    target: OpOverload = node.target  # type: ignore[assignment]  # FX types targets loosely
    return ops.is_pointwise(target) or ops.kind(target) == "convolution"
