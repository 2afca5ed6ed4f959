"""Reductions of the results of other reductions: nests one after another, with small arrays between them.

    y = x.amax(-1)              for rows (parallel): the maximum of the row; HELD[row] = it
    z = y - y.mean(0)     ->    for rows: sum so far of HELD
                                for rows: z[row] = HELD[row] - sum / rows

Each stage is one nest over rows (:mod:`fuse.kernel.nests.rows`). Later stages read its reductions from memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fuse.graph.strides import contiguous_strides
from fuse.kernel.arithmetic.extents import always_equal
from fuse.kernel.arithmetic.index import NotAffine
from fuse.kernel.traversals import children, within_stage
from fuse.kernel.values import Concat, Gather, Input, Map, Pad, Ranked, Reduce, Reindex, Scan, Value

MOST_HELD = 4096
"""Most results of one reduction that are held on the stack for the next stage, which one thread computes in a few
microseconds."""
MOST_HELD_IN_ALL = 32 * MOST_HELD
"""Most results of all reductions of a stage together: 1 MiB of float64, which fits on a thread's stack."""
TOO_MANY = f"more than {MOST_HELD} results of a reduction, or {MOST_HELD_IN_ALL} of several, are read in other loops"


@dataclass(frozen=True)
class FirstStage:
    """``held`` are the reductions of the first stage that later stages read; ``later`` are positions of later
    outputs."""

    held: tuple[Reduce, ...]
    later: frozenset[int]


def first_stage(outputs: Sequence[Value]) -> FirstStage | None:
    """The first stage of ``outputs``; None if one stage computes them all.

    Raises:
        NotAffine: more results would be held than the stack has room for.
    """
    values = within_stage(outputs, through_reductions=True)
    keys = [_rows_of(value) for value in values if isinstance(value, Reduce)]
    if not keys:
        return None
    first: set[int] = set()  # values that contain no reductions of later stages
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
    return FirstStage(tuple(held), frozenset(later))


def too_many(rows: int, reductions: int) -> bool:
    """Whether the stack has no room for the results of so many reductions.

    >>> too_many(4096, 32), too_many(4096, 33), too_many(4097, 1)
    (False, True, True)
    """
    return rows > MOST_HELD or rows * reductions > MOST_HELD_IN_ALL


def _rows_of(reduction: Reduce) -> tuple[int, int]:
    return math.prod(reduction.source.shape), math.prod(reduction.shape)


def _has_as_many(output: Value, counts: Sequence[int]) -> bool:
    """Whether the number of elements of a value is among ``counts``, for all sizes."""
    return any(always_equal(math.prod(output.shape), count) for count in counts)


def _met_first(roots: Sequence[Value], first: set[int]) -> list[Reduce]:
    """The topmost reductions among ``first`` below ``roots``: on each path down, the first one."""
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
    """``roots`` with the values ``held`` replaced by inputs from ``position`` on; and names of the new values, by
    id."""
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
        case Reindex() | Reduce() | Scan() | Ranked() | Pad():
            return replace(value, source=new[id(value.source)])
        case _:
            raise NotAffine(f"a {type(value).__name__.lower()} reads the result of a reduction of an earlier stage")
