"""Counters that code adds up by itself: which of them only count the steps of the loop that they are in.

    t = 0                             t is used in its loop only: step 5 is the same in all lengths that have it
    while t < x.shape[0]:             a comparison that ends the loop is recorded (loop_conditions.py)
        h = cell(x[t], h)
        t += 1

    for step in x: steps += 1         after the loop, steps is a plain number that depends on a size, which no
    if steps > 100: ...               comparison records: refused

A counter may be an index in its loop, of tensors or of lists of tensors: the graph has the same index in a longer loop,
in the steps that both have. Other comparisons are refused, since the last step may leave a flag behind. The bytecode
tells the uses of a counter; whatever is not known to be such a use counts as another one.
"""

from __future__ import annotations

import dis
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import CodeType

from fuse.runtime.size_uses.bytecode_uses import instructions, is_constant, use_of


@functools.lru_cache(maxsize=4096)
def counts(code: CodeType) -> bool:
    """Whether code counts the steps of a loop and may use the count elsewhere: it adds a number or a text in each step,
    or yields or lists one for each.

    >>> def steps(x):
    ...     n = 0
    ...     for _ in x:
    ...         n += 1
    ...     return n
    >>> def positions(x, h):
    ...     n = 0
    ...     while n < len(x):
    ...         h = h + x[n]
    ...         n += 1
    ...     return h
    >>> def last(x):
    ...     n = len(x) - 1
    ...     for y in x:
    ...         y = y * 2
    ...     return y + n
    >>> counts(steps.__code__), counts(positions.__code__), counts(last.__code__)
    (True, False, False)
    >>> counts((lambda sizes: (*sizes, -1)).__code__)
    False
    """
    found, is_inside = _with_loops(code)
    for place, one in enumerate(found[:-1]):
        if not is_constant(one) or type(one.argval) not in (int, str):
            continue
        then, stored = found[place + 1], found[place + 2] if place + 2 < len(found) else None
        if then.opname == "YIELD_VALUE" or (then.opname == "LIST_APPEND" and then.arg != 1):  # no ``[*sizes, 1]``
            return True
        if then.opname != "BINARY_OP" or stored is None:
            continue
        if stored.opname == "STORE_FAST" and stored.argval in counters(code):
            continue
        inside = is_inside(one.offset)
        again = stored.opname.startswith("STORE_") and place and found[place - 1].argval == stored.argval
        lasting = stored.opname in ("STORE_DEREF", "STORE_GLOBAL", "SWAP")
        if (then.argrepr in ("+=", "-=") and (inside or lasting)) or (then.argrepr in ("+", "-") and inside and again):
            return True
    return False


@functools.lru_cache(maxsize=4096)
def added_up(code: CodeType) -> tuple[str, ...]:
    """The local variables to which code assigns sums, products and the like in a loop, without :func:`counters`.

    >>> def places(x, hop):
    ...     place, n = 0, len(x) - 1
    ...     for y in x:
    ...         place = place + hop
    ...         last = y
    ...     return place
    >>> added_up(places.__code__)
    ('place',)
    """
    found, is_inside = _with_loops(code)
    sums = (stored for one, stored in itertools.pairwise(found) if one.opname == "BINARY_OP")
    names = ("STORE_FAST", "STORE_DEREF", "STORE_NAME")
    added = {one.argval: None for one in sums if one.opname in names and is_inside(one.offset)}
    return tuple(name for name in added if name not in counters(code))


@functools.lru_cache(maxsize=4096)
def counters(code: CodeType) -> frozenset[str]:
    """The local variables that count the steps of one loop, and that nothing uses after it.

    >>> def forward(x, h):
    ...     t = n = 0
    ...     for y in x:
    ...         h = h + x[t] * y[:, t : t + 1]
    ...         t += 1
    ...         n += 1
    ...     return h * n
    >>> sorted(counters(forward.__code__))
    ['t']
    """
    found = instructions(code)
    added = dict.fromkeys(one.argval for one in found if one.opname == "STORE_FAST")
    return frozenset(name for name in added if _only_counts(found, name))


def _only_counts(found: Sequence[dis.Instruction], name: str) -> bool:
    increments = [place for place in range(len(found)) if _is_increment(found, place, name)]
    loop = _innermost(found, found[increments[0]].offset) if increments else None
    if loop is None or any(_innermost(found, found[place].offset) != loop for place in increments):
        return False
    start, end = loop
    outer = _innermost(found, end, beyond=loop)
    begun = [
        one.offset
        for place, one in enumerate(found)
        if one.opname == "STORE_FAST" and one.argval == name and place - 3 not in increments
    ]
    if any(start <= offset <= end for offset in begun):
        return False
    if outer is not None and not any(outer[0] <= offset <= outer[1] for offset in begun):
        return False  # it goes on counting in the next round
    compared: list[tuple[int | None, bool]] = []
    for place, one in enumerate(found):
        if place in increments or not _names(one, name) or one.opname == "STORE_FAST":
            continue
        use = use_of(found, place) if one.opname.startswith("LOAD_FAST") and one.argval == name else None
        inside = start <= one.offset <= end
        if use == "compared":
            compared.append((one.positions.lineno if one.positions else None, inside))
        elif use != "key" or not inside:
            return False
    # The condition of ``while`` is checked before the loop, and at the end of each step: it is there twice.
    twice = 2 * sum(inside for _, inside in compared) == len(compared)
    return not compared or (twice and len({line for line, _ in compared}) == 1)


def _is_increment(found: Sequence[dis.Instruction], place: int, name: str) -> bool:
    """Whether ``name += 1`` begins at this instruction, or the like."""
    if place + 3 >= len(found):
        return False
    loaded, constant, added, stored = found[place : place + 4]
    return (
        loaded.opname.startswith("LOAD_FAST")
        and loaded.argval == name
        and is_constant(constant)
        and type(constant.argval) is int
        and added.opname == "BINARY_OP"
        and added.argrepr in ("+", "-", "+=", "-=")
        and stored.opname == "STORE_FAST"
        and stored.argval == name
    )


def _names(one: dis.Instruction, name: str) -> bool:
    return one.argval == name or (isinstance(one.argval, tuple) and name in one.argval)


def _loops(found: Sequence[dis.Instruction]) -> Iterator[tuple[int, int]]:
    for one in found:
        if "JUMP_BACKWARD" in one.opname:
            yield one.argval, one.offset


def _innermost(
    found: Sequence[dis.Instruction], offset: int, beyond: tuple[int, int] | None = None
) -> tuple[int, int] | None:
    """The innermost loop with this offset, as the offsets of its start and end; the next one ``beyond`` a loop."""
    around: dict[int, int] = {}
    for start, end in _loops(found):  # several jumps lead to one start, such as those of ``continue``
        around[start] = max(end, around.get(start, end))
    inside = [(start, end) for start, end in around.items() if start <= offset <= end and (start, end) != beyond]
    return max(inside, default=None)


def _with_loops(code: CodeType) -> tuple[list[dis.Instruction], Callable[[int], bool]]:
    """The instructions of code, and whether one at an offset is inside of a loop."""
    found = instructions(code)
    loops = [*_loops(found)]
    return found, lambda offset: any(start <= offset <= end for start, end in loops)
