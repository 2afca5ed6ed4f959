"""How code uses a value that an instruction loads: what takes it off Python's stack.

    states[t + 1] = h        h is stored, states is a container, t + 1 is a key
    while t < steps          t and steps are compared
    f(t)                     t is used otherwise

Only what is sure is told: instructions that are not listed here, and branches in between, give None.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Literal

Use = Literal["container", "key", "compared", "other"]
"""``container``: indexed by anything but a constant. ``key``: an index, or a part of one."""

FURTHEST = 48
"""Most instructions between the loading of a value and its use."""

_OTHER, _OWN, _CONSTANT = range(3)
_PUSHING = (
    "LOAD_FAST",
    "LOAD_DEREF",
    "LOAD_NAME",
    "LOAD_CLASSDEREF",
    "LOAD_FAST_CHECK",
    "LOAD_FAST_BORROW",
    "PUSH_NULL",
)
_NOTHING = ("PRECALL", "KW_NAMES", "NOP", "RESUME", "CACHE")
_JOINING = {"BUILD_SLICE": 0, "BUILD_TUPLE": 0, "BUILD_LIST": 0, "BINARY_OP": 2, "LIST_EXTEND": 2, "UNARY_NEGATIVE": 1}
"""Instructions that make one value of several, with their number; 0: it is their argument."""
_TAKING = {
    **dict.fromkeys(("POP_TOP", "STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL", "RETURN_VALUE"), 1),
    **dict.fromkeys(("GET_ITER", "UNPACK_SEQUENCE", "YIELD_VALUE", "LIST_APPEND", "FORMAT_VALUE", "UNARY_NOT"), 1),
    **dict.fromkeys(("IS_OP", "CONTAINS_OP", "STORE_ATTR"), 2),
}


def instructions(code: CodeType) -> list[dis.Instruction]:
    """The instructions of code, without those that do nothing."""
    return list(_instructions(code))


@functools.lru_cache(maxsize=4096)
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "EXTENDED_ARG"))


def is_constant(one: dis.Instruction) -> bool:
    """Whether an instruction loads a constant."""
    return one.opname.startswith("LOAD_") and ("CONST" in one.opname or one.opname == "LOAD_SMALL_INT")


def use_of(found: Sequence[dis.Instruction], place: int) -> Use | None:
    """The use of the value that the instruction at ``place`` leaves on the stack; None if that is not known.

    >>> found = instructions(compile("states[t + 1]", "", "eval"))
    >>> [(one.argval, use_of(found, place)) for place, one in enumerate(found) if one.opname == "LOAD_NAME"]
    [('states', 'container'), ('t', 'key')]
    """
    stack = [_OWN]  # the values above it, and those made of it
    for one in found[place + 1 : place + 1 + FURTHEST]:
        name = one.opname
        if name in _NOTHING:
            continue
        if name in ("BINARY_SUBSCR", "STORE_SUBSCR", "BINARY_SLICE") or (name == "BINARY_OP" and one.argrepr == "[]"):
            keys = _popped(stack, 2 if name == "BINARY_SLICE" else 1)
            (container,) = _popped(stack, 1)
            value = _popped(stack, 1) if name == "STORE_SUBSCR" else []
            if container == _OWN and not all(key == _CONSTANT for key in keys):
                return "container"
            if _OWN in keys:
                return "key"
            if _OWN in value or (container == _OWN and name == "STORE_SUBSCR"):
                return "other"
            if name != "STORE_SUBSCR":
                stack.append(container if container == _OWN else _OTHER)
        elif is_constant(one):
            stack.append(_CONSTANT)
        elif name in _PUSHING:
            stack.append(_OTHER)
        elif name == "LOAD_GLOBAL":
            stack += [_OTHER] * (2 if "NULL" in one.argrepr else 1)
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            if _OWN in _popped(stack, 1):
                return "other"
            stack += [_OTHER] * (2 if name == "LOAD_METHOD" or "NULL" in one.argrepr else 1)
        elif name == "CALL":
            if _OWN in _popped(stack, (one.arg or 0) + 2):
                return "other"
            stack.append(_OTHER)
        elif name == "COMPARE_OP":
            if _OWN in _popped(stack, 2):
                return "compared"
            stack.append(_OTHER)
        elif name in _JOINING:
            parts = _popped(stack, _JOINING[name] or one.arg or 0)
            stack.append(max(parts, key=(_CONSTANT, _OTHER, _OWN).index, default=_CONSTANT))
        elif name in _TAKING:
            if _OWN in _popped(stack, _TAKING[name]):
                return "other"
            if name in ("GET_ITER", "FORMAT_VALUE", "UNARY_NOT", "IS_OP", "CONTAINS_OP"):
                stack.append(_OTHER)
        else:
            return None
        if _OWN not in stack:
            return "other"
    return None


@functools.lru_cache(maxsize=4096)
def constant_indices(code: CodeType) -> Mapping[int, tuple[str, tuple[int, ...]]]:
    """Where code indexes or slices a local variable by constants: its name, by the offset of the instruction, and the
    lengths that the variable has or has not. A list of fewer elements has another slice, or no such element.

    >>> def inner(of): return of[24:], of[24], of[-2], of[0], of["a"]
    >>> [lengths for _, lengths in constant_indices(inner.__code__).values()]
    [(24, 25), (25,), (2,), (1,)]
    """
    found, made = _instructions(code), {}
    for place, one in enumerate(found):
        if not one.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            continue
        end = place + 1
        while end < len(found) and is_constant(found[end]):
            end += 1
        given = [each.argval for each in found[place + 1 : end]]
        cuts = end < len(found) and found[end].opname in ("BUILD_SLICE", "BINARY_SLICE")
        end += cuts and found[end].opname == "BUILD_SLICE"
        if not given or end >= len(found):
            continue
        if found[end].opname not in ("BINARY_SUBSCR", "BINARY_SLICE") and found[end].argrepr != "[]":
            continue
        if type(given[0]) is slice:
            cuts, given = True, [given[0].start, given[0].stop]
        numbers = [number for number in given if type(number) is int]
        lengths = {abs(number) + (number >= 0) for number in numbers}
        if cuts:
            lengths |= {abs(number) + (number < 0) for number in numbers}
        name = one.argval[-1] if isinstance(one.argval, tuple) else one.argval
        made[one.offset] = name, tuple(sorted(length for length in lengths if length > 0))
    return {offset: (name, lengths) for offset, (name, lengths) in made.items() if lengths}


def _popped(stack: list[int], count: int) -> list[int]:
    """The last values, taken off. Those below the first one do not depend on it."""
    return [stack.pop() if stack else _OTHER for _ in range(count)]
