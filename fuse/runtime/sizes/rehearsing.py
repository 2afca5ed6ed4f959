"""Declared sizes vary from the first call on: a made-up call at other sizes is planned before it.

dynamic_shapes={"x": {0: T}}      call with x[64, 8]  ->  x[11, 8] is planned first: 64 became 11, so it varies
"""

from __future__ import annotations

from typing import Any

from fuse.errors import FaultWarning, FuseError, reason_of_fault
from fuse.kernel.sizes.sized import lowering_for
from fuse.runtime.building import tuning
from fuse.runtime.guards.call_guards import integers_of
from fuse.runtime.guards.call_keys import Key
from fuse.runtime.making import Maker, ModelCall
from fuse.runtime.programs.refusals import without_kernels
from fuse.runtime.programs.schedule import schedule
from fuse.runtime.sizes.declared import elsewhere
from fuse.runtime.sizes.made_up_calls import graphs_of, made_up_call
from fuse.runtime.sizes.varying import SizesSeen
from fuse.runtime.variants.states import LARGEST_VARIANTS

Kind = tuple[Key, bool, bool]
"""Equal for calls that differ in sizes only. The second part says whether autograd records the call."""


def kind(maker: Maker, call: ModelCall) -> Kind:
    """The kind of a call, as the model is now."""
    return call.kind, maker.needs_gradients(call.leaves), maker.model.training


def rehearse(maker: Maker, call: ModelCall, declared: Any, seen: SizesSeen) -> None:
    """Before the first call of a kind with declared sizes, plan a made-up call at other sizes, which is then ``seen``.

    The numbers that differ between both calls are those that follow from sizes.
    """
    of_call = kind(maker, call)
    if of_call in seen.rehearsed or tuning.enabled():
        return
    useless = f"dynamic_shapes of {maker.name} has no effect"
    try:
        layouts = elsewhere(maker.model, declared, call.args, call.kwargs, call.leaves)
        if layouts is None:
            return
        if len(seen.rehearsed) < LARGEST_VARIANTS:
            seen.rehearsed.add(of_call)
        other = made_up_call(call, (*integers_of(call.leaves), *layouts))
        with lowering_for(None):
            graphs_of(maker, other, each=lambda graph: without_kernels(graph) or schedule(graph))
        seen.varying(call.kind, other.leaves)
    except FuseError as why:  # the call itself may be captured nevertheless
        maker.warn(f"{useless}: {why}")
    except FaultWarning:  # the user made warnings errors
        raise
    except Exception as error:  # a fault in fuse must not reach the user
        maker.warn(f"{useless}: {reason_of_fault(error)}")
