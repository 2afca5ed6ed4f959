"""Compute an operator once if all steps of a loop repeat it.

    for t: h = tanh(h @ softmax(w))      ->      s = softmax(w)
                                                 for t: h = tanh(h @ s)

Before loops are rolled, operators are merged where as many are equal as a loop has steps at least. Two or three equal
ones may be those of a first step whose states begin alike (``h = c = zeros``): merged, this step would differ from the
others. After rolling, ``common_subexpressions`` merges them, too. Declined where both nodes are results.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule

from fuse.loops.rolling import LEAST_STEPS
from fuse.passes.common_subexpressions import equal_nodes, merged
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict


@register_pass(stage="clean", after="plain_fills")
def step_invariants(graph: GraphModule) -> Iterator[Verdict]:
    """Compute an operator once if all steps of a loop repeat it."""
    yield from merged(graph, [equal for equal in equal_nodes(graph) if len(equal) >= LEAST_STEPS])
