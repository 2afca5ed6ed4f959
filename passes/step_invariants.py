"""Compute an operator once if all steps of a loop repeat it.

    for t: h = tanh(h @ softmax(w))      ->      s = softmax(w)
                                                 for t: h = tanh(h @ s)

Before loops are rolled, equal operators are merged only if there are as many of them as the shortest loop has steps.
Fewer may belong to a first step whose states begin alike (``h = c = zeros``): merging them would make this step differ
from the others. ``common_subexpressions`` merges those after rolling. Declined where both nodes are results.
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
