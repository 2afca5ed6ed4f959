"""Calls of operators from Python, whose arguments are put together from slots with little work in every call.

    add(%3, 2)              ->   a copy of [None, 2], and the tensor of slot 3 in its first place
    cat((%3, %5), dim=1)    ->   a copy of [None], and a list of two tensors in its first place; {"dim": 1} as it is

A reference is a :class:`fuse.runtime.steps.Ref` whose ``index`` is the slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._ops import OpOverload

from fuse.runtime.arrangement import refs_in
from fuse.runtime.steps import Ref

Slots = Sequence[Any]


def calling(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[Slots], Any]:
    """``function`` of these arguments, as a function of the slots.

    >>> calling(max, (Ref(0), 2), {})([5])
    5
    """
    gathered = gathering(args)
    behind = function._op if isinstance(function, OpOverload) else function  # what ``OpOverload.__call__`` calls
    if refs_in(kwargs):
        return lambda slots: behind(*gathered(slots), **filled(kwargs, slots))
    named = filled(kwargs, ())
    return lambda slots: behind(*gathered(slots), **named)


def gathering(args: Sequence[Any]) -> Callable[[Slots], list[Any]]:
    """The arguments as a function of the slots.

    >>> gathering((Ref(1), 2, (Ref(0), 3)))(["a", "b"])
    ['b', 2, ['a', 3]]
    """
    direct = [(place, one.index) for place, one in enumerate(args) if isinstance(one, Ref)]
    nested = [(place, one) for place, one in enumerate(args) if not isinstance(one, Ref) and refs_in(one)]
    varying = {place for place, _ in (*direct, *nested)}
    template = [None if place in varying else filled(one, ()) for place, one in enumerate(args)]

    def gathered(slots: Slots) -> list[Any]:
        given = template.copy()
        for place, slot in direct:
            given[place] = slots[slot]
        for place, one in nested:
            given[place] = filled(one, slots)
        return given

    return gathered


def filled(argument: Any, slots: Slots) -> Any:
    """An argument with every reference replaced by what the slot holds; tuples become lists."""
    if isinstance(argument, Ref):
        return slots[argument.index]
    if isinstance(argument, tuple):
        return [filled(item, slots) for item in argument]
    if isinstance(argument, dict):
        return {name: filled(item, slots) for name, item in argument.items()}
    return argument
