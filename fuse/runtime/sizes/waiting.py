"""A fast path for calls that run eager while sizes keep changing.

    call -> its size has no program, and was not decided about for long    -> eager; its seconds are counted later
               |  no
               v
            search among all variants -> too early for a program?          -> eager, and the fast path for calls like it
                                              |  no
                                              v
                                           capture -> program

The search and the decision take as long as twenty operators. So a decision stands for calls of any size that have no
graph in common with others, until they have run for a sixteenth of the seconds that a program takes. A call that runs
eager is never wrong: what is compared only tells whether it may be served faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fuse.runtime.guards.call_guards import any_nested, same_value
from fuse.runtime.guards.call_keys import Key, dtypes_and_shapes
from fuse.runtime.guards.state_guard import StateGuard
from fuse.runtime.guards.unpacking import Unpack
from fuse.runtime.making import ModelCall
from fuse.runtime.sizes.new_sizes import NewSizes, Way
from fuse.runtime.variants.last_run import LastRun
from fuse.runtime.variants.states import States

SHARE = 16
"""Decisions in the time in which eager calls take as long as a program."""

Size = tuple[tuple[torch.dtype, torch.Size] | None, ...]
_GLOBAL_STATE: Any = torch._C._dynamo.guards.GlobalStateGuard
_TENSOR_GUARDS: Any = torch._C._dynamo.guards.TensorGuards


@dataclass(eq=False)
class Waiting:
    """Calls that wait for a program as the last one did. It is valid as long as the engine has these ``states``.

    Attributes:
        way: the way of the call.
        key: the key of the call.
        size: returns the size of a call like it that may run eager; None for other calls.
        run: what is observed of such a call.
        left: the seconds until the next decision.
        spent: the seconds that calls of each size took since the last decision.
        due: sizes that wait no longer, and so are decided about.
    """

    states: States
    way: Way
    key: Key
    size: Callable[[tuple[Any, ...], dict[str, Any]], Size | None]
    run: LastRun
    left: float
    due: set[Size]
    spent: dict[Size, float] = field(default_factory=dict)

    def ran(self, size: Size, seconds: float) -> None:
        """Note that a call of this size ran eager."""
        self.left -= seconds
        self.spent[size] = self.spent.get(size, 0.0) + seconds

    def settle(self, new_sizes: NewSizes) -> set[Size]:
        """Count all seconds. Returns the sizes that wait no longer."""
        _, *same = self.key.parts
        for size, seconds in self.spent.items():
            if not new_sizes.ran_unlike(self.way, Key(size, *same), seconds):
                self.due.add(size)
        return self.due


def waiting(
    states: States, state: StateGuard, way: Way, call: ModelCall, apart: Iterable[Size], run: LastRun, seconds: float
) -> Waiting | None:
    """The fast path for calls like this one, which waits in torch's current modes in this ``state`` of the model, as a
    program would take so many seconds; None if more than sizes decides whether a variant serves such a call. Sizes
    ``apart`` are decided about."""
    leaves, due = call.leaves, set(apart)
    tensors = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    unpack: Unpack | None = None
    for compiled in (compiled for one in states for compiled in one.variants):
        guard = compiled.guard
        if guard.context or compiled.carried or tuple(i for i, _ in guard.sizes) != tensors:
            return None
        due.add(_sized(dtypes_and_shapes(leaves), dict(guard.sizes)))
        unpack = guard.unpack if guard.spec == call.spec else unpack
    if unpack is None or not tensors:
        return None
    values = tuple((i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor))
    any_sizes: list[list[int | None]] = [[None] * leaves[i].dim() for i in tensors]
    guards = _TENSOR_GUARDS(*(leaves[i] for i in tensors), dynamic_dims_sizes=any_sizes, dynamic_dims_strides=any_sizes)
    count, check, in_mode, holds = len(leaves), guards.check, _GLOBAL_STATE().check, state.holds

    def size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Size | None:
        leaves = unpack(args, kwargs)
        if leaves is None or len(leaves) != count:
            return None
        for index, value in values:
            if leaves[index] is not value and not same_value(leaves[index], value):
                return None
        if any_nested(leaves) or not check(*[leaves[i] for i in tensors]):
            return None
        found = dtypes_and_shapes(leaves)
        return found if found not in due and in_mode() and holds() else None

    return Waiting(states, way, call.key, size, run, seconds / SHARE, due)


def _sized(like: Size, sizes: dict[int, torch.Size]) -> Size:
    return tuple(one and (one[0], sizes[i]) for i, one in enumerate(like))
