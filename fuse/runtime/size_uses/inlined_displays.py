"""Comprehensions that Python 3.12 and later run inside of the code that has them, and where their lists go.

    rows = [f(row) for row in x]        a local variable, which can be looked at
    stack([f(row) for row in x])        a function that takes tensors only
    [t == 23 for t in range(T)][-2]     elsewhere: nobody sees the list

Earlier versions run them as functions of their own, whose results a trace function gets.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType

from fuse.runtime.size_uses.bytecode_uses import instructions

_OF_TENSORS = frozenset({"cat", "concat", "concatenate", "dstack", "hstack", "stack", "vstack"})
_MADE = ("BUILD_LIST", "BUILD_SET", "BUILD_MAP")
_ENDING = ("END_FOR", "POP_TOP", "POP_ITER", "SWAP")
_STORING = ("STORE_FAST", "STORE_DEREF", "STORE_FAST_STORE_FAST", "STORE_FAST_LOAD_FAST")
_ARGUMENTS = ("LOAD_CONST", "LOAD_SMALL_INT", "KW_NAMES")


@dataclass(frozen=True)
class Display:
    """Where the list, set or dictionary of a comprehension goes.

    Attributes:
        variable: the local variable; empty if it goes elsewhere.
        stored: the offset of the instruction that stores it there.
        is_of_tensors: whether a function gets it that takes tensors only.
    """

    variable: str = ""
    stored: int = -1
    is_of_tensors: bool = False


@functools.lru_cache(maxsize=4096)
def displays_of(code: CodeType) -> Mapping[int, Display]:
    """The inlined comprehensions of a code, by the offset of the first instruction of a step.

    >>> def forward(x):
    ...     rows = [row * 2 for row in x]
    ...     return rows, [t for t in range(len(x))][-2]
    >>> is_inlined = not any(hasattr(one, "co_code") for one in forward.__code__.co_consts)
    >>> found = [one.variable for one in displays_of(forward.__code__).values()]
    >>> found == (["rows", ""] if is_inlined else [])
    True
    """
    found = instructions(code)
    places = {one.offset: place for place, one in enumerate(found)}
    made: dict[int, Display] = {}
    for place, one in enumerate(found):
        begins = place > 2 and found[place - 1].opname == "SWAP" and found[place - 2].opname in _MADE
        if one.opname == "FOR_ITER" and begins and found[place - 2].arg == 0:
            made[one.offset] = _display(found, place, places[one.argval])
    return made


def _display(found: Sequence[dis.Instruction], begin: int, end: int) -> Display:
    """The comprehension whose steps begin at one place, and that ends at another."""
    place, cleared = begin - 3, set[str]()  # the variables of the loop get their old values back afterwards
    while found[place].opname in ("SWAP", "LOAD_FAST_AND_CLEAR", "MAKE_CELL"):
        if found[place].opname == "LOAD_FAST_AND_CLEAR":
            cleared.add(found[place].argval)
        place -= 1
    while found[end].opname in _ENDING:
        end += 1
    stored: list[str] = []
    while len(stored) <= len(cleared) and found[end].opname in _STORING:
        names = found[end].argval if isinstance(found[end].argval, tuple) else (found[end].argval,)
        stored += names[:1] if found[end].opname == "STORE_FAST_LOAD_FAST" else names
        end += 1
    if own := [name for name in stored if name not in cleared]:
        return Display(own[0], found[end - 1].offset)
    while found[end].opname in _ARGUMENTS:
        end += 1
    is_argument = found[end].opname in ("CALL", "CALL_KW") and found[place].opname == "GET_ITER"
    return Display(is_of_tensors=is_argument and _called(found, place) in _OF_TENSORS)


def _called(found: Sequence[dis.Instruction], place: int) -> str:
    """The name of the function whose first argument begins with the value that is iterated over at ``place``; empty if
    it has none."""
    missing = 1
    while missing > 0 and place > 0:
        place -= 1
        one = found[place]
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            return ""
        missing -= dis.stack_effect(one.opcode, one.arg)
    before = found[place - 1] if place > 0 and missing == 0 else None
    if before is not None and before.opname == "PUSH_NULL":
        before = found[place - 2]
    return str(before.argval) if before is not None and before.opname.startswith("LOAD_") else ""
