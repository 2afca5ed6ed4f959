"""Reductions of what other reductions leave: nests one after another, small arrays between them.

    y = x.amax(-1)              for rows (parallel): the maximum of the row; HELD[row] = it
    z = y - y.mean(0)     ->    for rows: sum so far of HELD
                                for rows: z[row] = HELD[row] - sum / rows

A level is what one nest of rows computes (:mod:`fuse.kernel.rows`). Later levels read its results from memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fuse.graph.strides import contiguous_strides
from fuse.kernel.extents import always_equal
from fuse.kernel.index import NotAffine
from fuse.kernel.values import Concat, Gather, Input, Map, Pad, Reduce, Reindex, Scan, Value
from fuse.kernel.walks import children, within_stage

MOST_HELD = 4096
"""Results of a reduction that are held, on the stack, for the next level: it takes one thread a few microseconds."""
MOST_HELD_IN_ALL = 32 * MOST_HELD
"""Those of all reductions of a level: a thread's stack has room for them."""
TOO_MANY = f"more than {MOST_HELD} results of a reduction, or {MOST_HELD_IN_ALL} of several, are read in other loops"


@dataclass(frozen=True)
class Level:
    """``held`` are the reductions of the first level that outputs of later levels read, ``later`` these outputs."""

    held: tuple[Reduce, ...]
    later: frozenset[int]


def first_level(outputs: Sequence[Value]) -> Level | None:
    """What the first nest computes; None where it computes all.

    Raises:
        NotAffine: too much would have to be held.
    """
    values = within_stage(outputs, through_reductions=True)
    keys = [_rows_of(value) for value in values if isinstance(value, Reduce)]
    if not keys:
        return None
    first: set[int] = set()  # values whose reductions, and their own, are all of the first level
    reducing: set[int] = set()  # values that are reductions, or computed from some
    for value in values:
        below = [id(child) for child in children(value)]
        of_level = not isinstance(value, Reduce) or _rows_of(value) == keys[0]
        if of_level and first.issuperset(below):
            first.add(id(value))
        if isinstance(value, Reduce) or not reducing.isdisjoint(below):
            reducing.add(id(value))
    later = [
        number
        for number, output in enumerate(outputs)
        if id(output) not in first or (id(output) in reducing and not _has_as_many(output, keys[0]))
    ]
    held = _met_first([outputs[number] for number in later], first)
    if not held:
        return None
    if too_many(max(math.prod(reduction.shape) for reduction in held), len(held)):
        raise NotAffine(TOO_MANY)
    return Level(tuple(held), frozenset(later))


def too_many(rows: int, reductions: int) -> bool:
    """Whether the stack has no room for the results of so many reductions.

    >>> too_many(4096, 32), too_many(4096, 33), too_many(4097, 1)
    (False, True, True)
    """
    return rows > MOST_HELD or rows * reductions > MOST_HELD_IN_ALL


def _rows_of(reduction: Reduce) -> tuple[int, int]:
    return math.prod(reduction.source.shape), math.prod(reduction.shape)


def _has_as_many(output: Value, counts: Sequence[int]) -> bool:
    """Whether a value has as many elements as one of these numbers says, whatever the sizes."""
    return any(always_equal(math.prod(output.shape), count) for count in counts)


def _met_first(roots: Sequence[Value], first: set[int]) -> list[Reduce]:
    """The reductions among ``first`` that are met on the ways down from ``roots``, none of them below another."""
    found: list[Reduce] = []
    seen: set[int] = set()
    stack = list(reversed(roots))
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Reduce) and id(value) in first:
            found.append(value)
        else:
            stack.extend(reversed(children(value)))
    return found


def read_from_memory(
    roots: Sequence[Value], held: Sequence[Value], position: int, names: Mapping[int, str]
) -> tuple[list[Value], dict[int, str]]:
    """``roots`` with what is ``held`` in memory as inputs from ``position`` on; and the names of what is new."""
    new: dict[int, Value] = {}
    for number, value in enumerate(held, position):
        new[id(value)] = Input(value.shape, value.dtype, number, contiguous_strides(value.shape))
    for value in within_stage(roots, through_reductions=True):
        if id(value) not in new:
            new[id(value)] = _with_children(value, new)
    return [new[id(root)] for root in roots], {id(new[key]): name for key, name in names.items() if key in new}


def _with_children(value: Value, new: Mapping[int, Value]) -> Value:
    if all(new[id(child)] is child for child in children(value)):
        return value
    match value:
        case Map():
            return replace(value, args=tuple(new[id(part)] for part in value.args))
        case Concat():
            return replace(value, pieces=tuple(new[id(part)] for part in value.pieces))
        case Gather():
            return replace(value, positions=new[id(value.positions)])
        case Reindex() | Reduce() | Scan() | Pad():
            return replace(value, source=new[id(value.source)])
        case _:
            raise NotAffine(f"a {type(value).__name__.lower()} reads what is held in memory")
