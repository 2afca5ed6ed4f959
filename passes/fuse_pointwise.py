"""Run neighbouring elementwise operators as one kernel.

    a = x * 2                      r = region(x, y):
    b = tanh(a)          ->            a = x * 2
    c = b + y                          return tanh(a) + y      a and b live in registers

One launch and one trip through memory instead of one for each operator. Slices, transposes and broadcasts between them
become index arithmetic. A cheap value of lower rank (a scaled mask) is computed again where it is broadcast; a costly
one is not. A convolution of few taps in single channels is elementwise work too.

Declined where the loops differ, or where a reshape follows no loop order.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.passes.growing import fuse_groups
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict


@register_pass(stage="fuse")
def fuse_pointwise(graph: GraphModule) -> Iterator[Verdict]:
    """Run neighbouring elementwise operators as one kernel."""
    yield from fuse_groups(graph, is_pointwise)


def is_pointwise(node: Node) -> bool:
    target: OpOverload = node.target  # type: ignore[assignment]
    return ops.is_pointwise(target) or ops.kind(target) == "convolution"
