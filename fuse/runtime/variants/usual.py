"""A fast path to the variant that served the last calls.

    call -> guards of the last variant  -- hold -->  program
               |  do not hold
               v
            search among all variants

Most calls of a model are like the call before. The search runs many small Python functions, which are slow between
other work, because their code has left the processor's caches. This path compares the guards of one variant, with few
calls of C functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from fuse.runtime.guards.call_guards import any_nested, function_modes, same_value
from fuse.runtime.variants.compiled import Compiled
from fuse.runtime.variants.states import States

_global_state: Any = torch._C._dynamo.guards.GlobalStateGuard
"""One C function that compares torch's modes: gradients, autocast, default dtype, determinism, number of threads."""


@dataclass(frozen=True, eq=False)
class Usual:
    """A variant that may serve the next call, too.

    ``tensors`` returns the variant's tensors for a call's arguments; None if the variant does not serve the call. It is
    valid as long as the engine has these ``states``.
    """

    compiled: Compiled
    states: States
    tensors: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None]


def usual(states: States, compiled: Compiled) -> Usual | None:
    """The fast path for a variant that serves a call in torch's current modes; None if more than its guards decide
    whether it serves a call."""
    guard = compiled.guard
    state = next((s for s in states if compiled in s.variants), None)
    reads_more = compiled.carried and (compiled.carried.slots or compiled.carried.containers)
    special = guard.context or reads_more or compiled.family
    # the guard of tensors compares inference mode, so that it must have a tensor
    if state is None or special or not guard.pick((*range(guard.count), *guard.state)):
        return None
    unpack = guard.unpack
    if unpack is None or function_modes() or forward_ad._current_level >= 0:
        return None
    count, values, held, pick, check = guard.count, guard.values, guard.state, guard.pick, guard.check
    repeated, pinned, holds, in_mode = guard.repeated, guard.pinned, state.guard.holds, _global_state().check

    def tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        leaves = unpack(args, kwargs)
        if leaves is None or len(leaves) != count:
            return None
        if not in_mode() or function_modes() or forward_ad._current_level >= 0 or not holds():
            return None
        for index, value in values:
            if leaves[index] is not value and not same_value(leaves[index], value):
                return None
        for first, second in repeated:
            if leaves[first] is not leaves[second]:
                return None
        for index, tensor in pinned:
            if leaves[index] is not tensor:
                return None
        if any_nested(leaves):
            return None
        found = pick((*leaves, *held))
        return found if check(*found) else None

    return Usual(compiled, states, tensors)
