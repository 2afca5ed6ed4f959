"""Captures at sizes further out, where a call lies beyond all that were captured.

    captured at 33, 37, 41 and 45 steps
    a call of 46 steps      captured at 69 steps instead: 46 to 68 lie between now, and need no capture
    a call of 28 steps      captured at 14

Nobody runs such a call: its tensors have no data, and nothing is compiled for it. Its graph is one more to compare
with those of other sizes (:mod:`fuse.runtime.generalised`); where it has another text, or none can be captured, the
call at hand is captured as it is.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fuse.errors import FaultWarning
from fuse.graph.fake_mode import FakeMode
from fuse.kernel.extents import LEAST_LOWERED
from fuse.kernel.spelled import Numbers
from fuse.runtime.generalised import Between, CapturedCall, Generalised, KindOfCalls
from fuse.runtime.guards import call_guard
from fuse.runtime.making import Maker, ModelCall, captured, joint
from fuse.runtime.reference import Reference
from fuse.runtime.steps import Fallback
from fuse.runtime.telling import arguments_at
from fuse.runtime.training import Finish

FURTHEST = 1024
"""The largest size beyond which others are made up."""
LEAST_FURTHER = 16
"""How much further out the sizes that are made up are at least; large ones are half as large again."""


def further_call(model: nn.Module, call: ModelCall, beyond: Between) -> ModelCall | None:
    """A call at sizes further out than those of a call; None where there are none for which ``forward`` goes the same
    way, or where nothing is to be expected of them."""
    common = beyond.common
    if beyond.kind.reaches <= 0:
        return None
    if common.met is None and not Between(beyond.kind, common, common.had()[-1]).follow(model, call.args, call.kwargs):
        return None
    sizes = further_sizes(common, beyond.sizes)
    if sizes is None or common.met is None or not (common.met(*beyond.sizes) and common.met(*sizes)):
        return None
    args, kwargs = arguments_at(call.args, call.kwargs, common.evaluate(*sizes))
    leaves = pytree.tree_leaves((args, kwargs)) if call.spec is not None else args
    return ModelCall(args, kwargs, leaves, call.spec)


def further_sizes(common: Generalised, sizes: Numbers) -> Numbers | None:
    """Sizes that are further out where these lie beyond those that were captured, and as many steps away; None where
    none lies beyond, or one is too small or too large."""
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
    """A call captured that nobody makes; None where that cannot be done, or where more than its sizes tells it from
    others of its kind."""
    try:
        return _captured(maker, call, kind)
    except FaultWarning:  # warnings are errors here, which is the user's wish
        raise
    except Exception:  # of the user's code at these sizes, or a fault of ours, which must not become the user's
        return None


def _captured(maker: Maker, call: ModelCall, kind: KindOfCalls) -> CapturedCall | None:
    mode = FakeMode(allow_non_fake_inputs=True)
    tensors = {id(leaf): leaf for leaf in call.leaves if isinstance(leaf, Tensor)}
    fakes = {key: mode.from_tensor(leaf) for key, leaf in tensors.items()}
    args, kwargs = pytree.tree_map_only(Tensor, lambda leaf: fakes[id(leaf)], (call.args, call.kwargs))
    leaves = [fakes.get(id(leaf), leaf) for leaf in call.leaves]
    other = ModelCall(args, kwargs, leaves, call.spec)
    training = None
    if maker.needs_gradients(call.leaves):
        graph, training = joint(maker, other, _not_run)
        if training is None or training.joint.own_gradients:
            return None
    else:
        graph = captured(maker, other)
    signature = graph.meta["signature"]
    guard = call_guard(call.leaves, call.spec, kind.sources, maker.tensors(), signature.context)
    if signature.mutated or signature.learning or not kind.guard.differs_in_sizes(guard):
        return None
    graphs = training.graphs() if training else (graph,)
    return None if any(one.meta.get("failed") for one in graphs) else CapturedCall(graphs, training, made_up=True)


def _not_run(graph: GraphModule) -> Finish:
    return lambda: Reference(graph, Fallback("", "", "it is not run"))
