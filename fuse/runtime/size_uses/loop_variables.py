"""Loops of code, and the local variables that a step of each receives from the step before it, or leaves to the code
after the loop.

    for t in range(T):
        scale = weights[t] * 2      scale is set before it is used, in each step: it does not pass to the next one
        h = cell(x[t], h) * scale   h passes to the next step
        last = t                    last is used after the loop only
    return h, last

The bytecode has the loops, and a variable passes if it is live where a step begins: some path from there uses it before
it is set.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType

from fuse.runtime.size_uses.inlined_displays import Display, displays_of

_ENDING = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
_ALWAYS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")


@dataclass(frozen=True)
class CodeLoop:
    """A loop of a code.

    Attributes:
        body: the offsets of its instructions.
        within: the variables that a later step may use.
        after: those that only the code after the loop may use.
        display: the list that it makes, if it is a comprehension.
    """

    body: frozenset[int]
    within: tuple[str, ...]
    after: tuple[str, ...]
    display: Display | None = None


@functools.lru_cache(maxsize=4096)
def loops_of(code: CodeType) -> Mapping[int, CodeLoop]:
    """The loops of a code, by the offset of the first instruction of a step.

    >>> def forward(x, h, width):
    ...     for t in range(len(x)):
    ...         scale = t * 2
    ...         h = h + x[t] * scale
    ...         last = scale
    ...     return h, last, width
    >>> (loop,) = loops_of(forward.__code__).values()
    >>> loop.within, loop.after
    (('h', 'x'), ('last', 'width'))
    """
    found = [one for one in dis.get_instructions(code) if one.opname != "CACHE"]
    starts = {one.argval for one in found if "JUMP_BACKWARD" in one.opname}
    if not starts:
        return {}
    places = {one.offset: place for place, one in enumerate(found)}
    following = _following(code, found, places)
    before = _turned(following)
    everywhere = _live(found, following)
    made: dict[int, CodeLoop] = {}
    for start in starts:
        head = places[start]
        body, rest = {head}, [one for one in before[head] if one >= head]
        while rest:  # all from which the first instruction is reached without passing it
            if (place := rest.pop()) not in body:
                body.add(place)
                rest += before[place]
        if head and 0 in body:  # no loop: code that handles an exception jumps back behind the loop where it occurred
            continue
        inside = _live(
            found, [[one for one in following[place] if {place, one} <= body] for place in range(len(found))]
        )
        within = inside[head] - {*code.co_cellvars, *code.co_freevars}
        made[start] = CodeLoop(
            frozenset(found[place].offset for place in body),
            tuple(sorted(within)),
            tuple(sorted(everywhere[head] - within)),
            displays_of(code).get(start),
        )
    return made


def _following(code: CodeType, found: Sequence[dis.Instruction], places: Mapping[int, int]) -> list[list[int]]:
    """The places of the instructions that may follow each one, handlers of exceptions among them."""
    following: list[list[int]] = []
    for place, one in enumerate(found):
        nexts = [] if one.opname in (*_ENDING, *_ALWAYS) or place + 1 == len(found) else [place + 1]
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            nexts.append(places[one.argval])
        following.append(nexts)
    for entry in getattr(dis.Bytecode(code), "exception_entries", ()):
        for offset in range(entry.start, entry.end, 2):
            if offset in places:
                following[places[offset]].append(places[entry.target])
    return following


def _live(found: Sequence[dis.Instruction], following: Sequence[Sequence[int]]) -> list[frozenset[str]]:
    """The local variables that are live before each instruction."""
    uses = [_used_and_set(one) for one in found]
    live: list[frozenset[str]] = [frozenset()] * len(found)
    before = _turned(following)
    rest = [*range(len(found))]
    waiting = {*rest}
    while rest:
        place = rest.pop()
        waiting.remove(place)
        used, is_set = uses[place]
        now = used | (frozenset().union(*(live[one] for one in following[place])) - is_set)
        if now != live[place]:
            live[place] = now
            rest += {*before[place]} - waiting
            waiting.update(before[place])
    return live


def _turned(following: Sequence[Sequence[int]]) -> list[list[int]]:
    """The places before each one, from those that follow each one.

    >>> _turned([[1], [2, 0], []])
    [[1], [0], [1]]
    """
    before: list[list[int]] = [[] for _ in following]
    for place, others in enumerate(following):
        for other in others:
            before[other].append(place)
    return before


def _used_and_set(one: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
    kinds = one.opname.split("_")
    if "FAST" not in kinds:
        return frozenset(), frozenset()
    first = kinds[0]
    last = kinds[2] if len(names) > 1 and len(kinds) > 2 else first
    used = {name for name, kind in zip(names, (first, last), strict=False) if kind == "LOAD"}
    is_set = {name for name, kind in zip(names, (first, last), strict=False) if kind in ("STORE", "DELETE")}
    return frozenset(used - is_set), frozenset(is_set)
