"""Remove casts to a narrow dtype that a later cast widens again; results change.

    a = x.bfloat16()
    b = a.float()       ->   b = x          (x is float32)

Values are then not rounded in between. Results are nearer to float32, and differ from eager's bits. The pass runs only
on request: ``fuse.compile(model, precision="relaxed")`` or ``--extend-select drop_roundings``. Declined where the
layout of the result would change, and where it would share memory with an input.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule

from fuse.passes.no_ops import leave_out, obstacle
from fuse.passes.simplify_casts import is_cast, operand
from fuse.rewrite import effects
from fuse.rewrite.dtypes import holds
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite


@register_pass(stage="clean", after="simplify_casts", before_gradients=False, enabled=False)  # as simplify_casts
def drop_roundings(graph: GraphModule) -> Iterator[Verdict]:
    """Remove casts to a narrow dtype that a later cast widens again; results change."""
    escaping = effects.escaping(graph)
    for node in [node for node in graph.graph.nodes if is_cast(node)]:
        rounded = operand(node)
        if not is_cast(rounded):
            continue
        origin = operand(rounded)
        first, between, last = (one.meta["val"].dtype for one in (origin, rounded, node))
        if first != last or not first.is_floating_point or not between.is_floating_point or holds(first, between):
            continue
        if reason := obstacle(node, origin, escaping):
            yield declined(node, reason)
        else:
            yield rewrite((rounded, node), leave_out, node, origin, escaping)
