"""The variant that served the last calls, found again by few calls of C functions.

    call -> as the last?  -> program        comparisons of guards and states, without what finds one among many
               |  no
               v
            search among all variants

Most calls of a model are like the call before. Code that ran long ago is slow, as what the processor keeps near of it
was replaced meanwhile: a call of many small functions between other work takes several times as long as one of many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from fuse.runtime.guards import function_modes, same_value
from fuse.runtime.states import States
from fuse.runtime.variants import Compiled

_global_state: Any = torch._C._dynamo.guards.GlobalStateGuard
"""A guard of torch's modes in one call: gradients, autocast, default dtype, determinism, number of threads."""


@dataclass(frozen=True, eq=False)
class Usual:
    """A variant that may serve the next call, too.

    ``tensors`` gives those of a call's positional arguments that the variant is given, None where it does not serve the
    call. It may be asked as long as the engine has these ``states``.
    """

    compiled: Compiled
    states: States
    tensors: Callable[[tuple[Any, ...]], tuple[Any, ...] | None]


def usual(states: States, compiled: Compiled) -> Usual | None:
    """For a variant that serves a call under the modes that torch is in; None where more than guards decides whether it
    does."""
    guard = compiled.guard
    state = next((s for s in states if compiled in s.variants), None)
    special = guard.spec is not None or guard.context or compiled.carried or compiled.family
    # torch's guard of tensors tells inference mode, too: it has to have one
    if state is None or special or not guard.pick((*range(guard.count), *guard.state)):
        return None
    if function_modes() or forward_ad._current_level >= 0:
        return None
    count, values, held, pick, check = guard.count, guard.values, guard.state, guard.pick, guard.check
    repeated, pinned, holds, in_mode = guard.repeated, guard.pinned, state.guard.holds, _global_state().check

    def tensors(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if len(args) != count or not in_mode() or function_modes() or forward_ad._current_level >= 0 or not holds():
            return None
        for index, value in values:
            if args[index] is not value and not same_value(args[index], value):
                return None
        for first, second in repeated:
            if args[first] is not args[second]:
                return None
        for index, tensor in pinned:
            if args[index] is not tensor:
                return None
        found = pick((*args, *held))
        return found if check(*found) else None

    return Usual(compiled, states, tensors)
