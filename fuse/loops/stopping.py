"""Find the condition in each step that ends a loop.

    while err > tol:                 reads    t0: True  t1: True  t2: True  t3: False       learned: all four
        h = f(h)              ->
        err = g(h)                   loop     t1, t2, t3 kept of three steps; it stops after the first that is not True

Capture learns the truth values that ``forward`` reads. If each step computes such a value, equal in all steps but the
last one, then a later call can stop at the first step whose value differs: its results are of no use, or the loop ends
there (:mod:`fuse.runtime.variants.ending`).

The last truth value belongs to the last step, or is computed behind it if the loop begins with the test.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fuse.cost.work import work_of_node
from fuse.graph.loop import Stop
from fuse.graph.numbers.learned import Truths, truths_read
from fuse.graph.outputs import outputs_of
from fuse.graph.signature import Signature
from fuse.loops.body_operands import StepResult
from fuse.loops.collectors import COLLECTORS, pieces_of
from fuse.loops.rolling import Rolled

MOST_WORK = 2**22
"""The most floating-point operations of a step of a loop that may stop: only one thread runs such a loop."""


def stop_of(graph: GraphModule, rolled: Rolled, collected: Sequence[StepResult]) -> tuple[Stop, Truths] | None:
    """The condition that ends the loop ``rolled``, and the truth values that were read of it; None if there is none, or
    if steps are worth several threads."""
    signature: Signature | None = graph.meta.get("signature")
    if not graph.meta.get("may_stop") or signature is None or signature.learning is None:
        return None
    if sum(_flops(node) for node in rolled.typical) > MOST_WORK:
        return None
    outputs = outputs_of(graph.graph)
    for truths in truths_read(signature.learning.learned):
        collector = outputs[signature.outputs[truths.leaf].index]
        if collector.target not in COLLECTORS:
            continue
        pieces = pieces_of(collector)
        for number, result in enumerate(collected):
            values = [node for step in rolled.steps for node in result.of(step)]
            if len(values) != len(rolled.steps) or values[0] not in pieces:
                continue
            first = pieces.index(values[0])
            last = first + len(values)
            if pieces[first:last] == values and truths.first <= first and truths.last - 1 <= last <= truths.last:
                return Stop(number, truths.goes_on, whole=last == truths.last), truths
    return None


def _flops(node: Node) -> int:
    return work_of_node(node).flops if isinstance(node.target, OpOverload) else 0
