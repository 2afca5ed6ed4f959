"""Made-up captures beyond the captured sizes, for a call whose sizes are out of their range.

    captured at 33 and 37 steps
    a call of 38 steps      57 steps are captured instead: 33 to 57 are in range now, and need no capture
    a call of 28 steps      14 steps are captured

A made-up call has tensors without data, and nothing is compiled for it. Its graph extends the range of sizes of
:mod:`fuse.runtime.generalised`. If it has another text or cannot be captured, the call itself is captured.
"""

from __future__ import annotations

from torch import nn

from fuse.errors import FaultWarning
from fuse.kernel.extents import LEAST_LOWERED
from fuse.kernel.region_text import Numbers
from fuse.runtime.generalised import CapturedCall, Generalised
from fuse.runtime.guards import call_guard
from fuse.runtime.kinds_of_calls import Between, KindOfCalls
from fuse.runtime.made_up_calls import graphs_of, made_up_call
from fuse.runtime.making import Maker, ModelCall

FURTHEST = 1024
"""The largest size of a call for which larger ones are made up."""
LEAST_FURTHER = 16
"""Least distance of a made-up size from the call's; for large sizes, half of the size."""


def further_call(model: nn.Module, call: ModelCall, beyond: Between) -> ModelCall | None:
    """A made-up call beyond the sizes of ``call``.

    None if no more are allowed, or if comparisons of sizes in ``forward`` are known to have other outcomes there.
    """
    common = beyond.common
    if beyond.kind.reaches <= 0:
        return None
    like = Between(beyond.kind, common, common.had()[-1])
    if common.checked and common.met is None and not like.follow(model, call.args, call.kwargs):
        return None
    sizes = further_sizes(common, beyond.sizes)
    if sizes is None:
        return None
    if common.checked and not (common.met is not None and common.met(*beyond.sizes) and common.met(*sizes)):
        return None
    try:
        return made_up_call(call, common.evaluate(*sizes))
    except RuntimeError:  # a formula that was not checked gives a negative size
        return None


def further_sizes(common: Generalised, sizes: Numbers) -> Numbers | None:
    """Sizes with those that are beyond the captured range moved further out, by a multiple of their step.

    None if no size is beyond the range, or if one is too small or too large.
    """
    found = []
    for size, had, (_, step) in zip(sizes, zip(*common.had(), strict=True), common.steps, strict=True):
        if min(had) <= size <= max(had):
            found.append(size)
        elif not LEAST_LOWERED <= size <= FURTHEST:
            return None
        elif size > max(had):
            found.append(size + step * -(-max(size // 2, LEAST_FURTHER) // step))
        else:
            found.append(size - step * min(size // (2 * step), (size - LEAST_LOWERED) // step))
    return None if tuple(found) == tuple(sizes) else tuple(found)


def made_up(maker: Maker, call: ModelCall, kind: KindOfCalls) -> CapturedCall | None:
    """Capture a made-up call; None if that fails, or if it differs from its kind in more than sizes."""
    try:
        return _captured(maker, call, kind)
    except FaultWarning:  # the user made warnings errors
        raise
    except Exception:  # of the user's code at these sizes, or a fault in fuse, which must not reach the user
        return None


def _captured(maker: Maker, call: ModelCall, kind: KindOfCalls) -> CapturedCall | None:
    graph, training = graphs_of(maker, call, each=lambda graph: None)
    if training.joint.own_gradients if training else maker.needs_gradients(call.leaves):
        return None
    signature = graph.meta["signature"]
    guard = call_guard(call.leaves, call.spec, kind.sources, maker.tensors(), signature.context)
    if signature.mutated or signature.learning or signature.drawn or not kind.guard.differs_in_sizes(guard):
        return None
    graphs = training.graphs() if training else (graph,)
    return None if any(one.meta.get("failed") for one in graphs) else CapturedCall(graphs, training, made_up=True)
