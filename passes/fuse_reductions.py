"""Fuse a reduction with the operators before and after it into one kernel.

    s = x + y                      r = region(x, y):  for each row:
    m = mean(s, -1)      ->            load x + y, sum           the row stays in cache
    z = (s - m) * w                    load x + y again, scale, store

Lowering splits softmax, log-softmax, logsumexp, layer and group norm, mean and variance (two passes, sums in double)
and arg-reductions (eager's ties and NaN) into such rows, so that scaling before and activation after cost no launch.

A further reduction of the rows' results (a mean of losses) joins as a second loop nest, up to 4,096 rows. Declined
where two reductions run over different rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from fuse import ops
from fuse.passes.region_growing import fuse_groups
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict


@register_pass(stage="fuse", after="fuse_pointwise")
def fuse_reductions(graph: GraphModule) -> Iterator[Verdict]:
    """Fuse a reduction with the operators before and after it into one kernel."""
    yield from fuse_groups(graph, is_reduction_or_pointwise)


def is_reduction_or_pointwise(node: Node) -> bool:
    return ops.kind(node.target) in ("reduction", "pointwise")
