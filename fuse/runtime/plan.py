"""Where intermediate values lie: one workspace, its memory used again as soon as a value is dead.

    value   steps it lives        workspace
      a     0 1                   [ a     ][ c ]
      b       1 2 3        ->     [ b           ]
      c         2 3
      d           3 4             [ d     ]           d takes a's place

The largest values are placed first (of equals, the longest-lived), each in the smallest gap that those which live
beside it leave. Where so many live at once that this would take too long, each takes the place of a dead one of about
its size. A value may also take over the place of one that dies in the very step that computes it, where the kernel
reads each element before it writes it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
NEIGHBOURS = 32
"""Values that live beside one, on average, up to which the largest are placed first."""


@dataclass(frozen=True)
class Lifetime:
    """``size`` bytes that are needed from step ``first`` to step ``last``, both included.

    ``heir_of`` numbers the values whose place this one may take although they are read in its first step.
    """

    size: int
    first: int
    last: int
    heir_of: tuple[int, ...] = ()


@dataclass(frozen=True)
class Arena:
    """``offsets[i]`` is where value ``i`` begins, ``size`` the bytes of the whole workspace."""

    offsets: tuple[int, ...]
    size: int


def arrange(lifetimes: Sequence[Lifetime], reserved: int = 0) -> Arena:
    """Place every value; two that live at the same step never overlap. The first ``reserved`` bytes stay free.

    >>> arrange([Lifetime(64, 0, 1), Lifetime(128, 1, 3), Lifetime(64, 2, 3)])
    Arena(offsets=(128, 0, 128), size=192)
    >>> arrange([Lifetime(64, 0, 1), Lifetime(64, 1, 2, heir_of=(0,))]).size
    64
    """
    spans, span_of = _inherited(lifetimes)
    start = _aligned(reserved)
    beside = _beside(spans)
    placed = _by_similar_sizes(spans, start) if beside is None else _largest_first(spans, beside, start)
    return Arena(tuple(placed.offsets[span] for span in span_of), placed.size)


def _inherited(lifetimes: Sequence[Lifetime]) -> tuple[list[Lifetime], list[int]]:
    """The places that are needed, each from its first value to the last that takes it over; and each value's."""
    spans: list[Lifetime] = []
    span_of = [0] * len(lifetimes)
    bequeathed: set[int] = set()
    for value in sorted(range(len(lifetimes)), key=lambda v: lifetimes[v].first):
        needed = lifetimes[value]
        donor = next((d for d in needed.heir_of if d not in bequeathed and _may_follow(lifetimes[d], needed)), None)
        if donor is None:
            span_of[value] = len(spans)
            spans.append(replace(needed, size=_aligned(needed.size)))
        else:
            bequeathed.add(donor)
            span_of[value] = span_of[donor]
            spans[span_of[donor]] = replace(spans[span_of[donor]], last=needed.last)
    return spans, span_of


def _may_follow(donor: Lifetime, heir: Lifetime) -> bool:
    return donor.first < donor.last == heir.first and _aligned(donor.size) == _aligned(heir.size)


def _aligned(size: int) -> int:
    return max(-(-size // ALIGNMENT), 1) * ALIGNMENT if size else 0


def _by_similar_sizes(spans: Sequence[Lifetime], start: int) -> Arena:
    """``spans``, which begin one after the other, each in a place that one of about its size has left."""
    free: dict[int, list[int]] = {}
    offsets: list[int] = []
    alive: list[tuple[int, int]] = []  # (last step, span), a heap
    end = start
    for span, needed in enumerate(spans):
        while alive and alive[0][0] < needed.first:
            _, dead = heapq.heappop(alive)
            free.setdefault(_rounded(spans[dead].size), []).append(offsets[dead])
        size = _rounded(needed.size)
        if left := free.get(size):
            offsets.append(left.pop())
        else:
            offsets.append(end)
            end += size
        heapq.heappush(alive, (needed.last, span))
    return Arena(tuple(offsets), end)


def _rounded(size: int) -> int:
    """One of four sizes between a power of two and the next: values of distinct sizes share places.

    >>> _rounded(1024), _rounded(1088), _rounded(1600)
    (1024, 1280, 1792)
    """
    step = max(1 << max(size.bit_length() - 3, 0), ALIGNMENT)
    return -(-size // step) * step


def _beside(spans: Sequence[Lifetime]) -> list[list[int]] | None:
    """The spans that live at some step with each; None where they are too many to look at them all."""
    beside: list[list[int]] = [[] for _ in spans]
    alive: list[int] = []
    pairs = 0
    for span, needed in enumerate(spans):
        alive = [other for other in alive if spans[other].last >= needed.first]
        pairs += len(alive)
        if pairs > NEIGHBOURS * len(spans):
            return None
        beside[span].extend(alive)
        for other in alive:
            beside[other].append(span)
        alive.append(span)
    return beside


def _largest_first(spans: Sequence[Lifetime], beside: Sequence[Sequence[int]], start: int) -> Arena:
    offsets: dict[int, int] = {}
    for span in sorted(range(len(spans)), key=lambda s: (-spans[s].size, spans[s].first - spans[s].last)):
        size, stop = spans[span].size, start
        gaps = []
        for begin, end in sorted((offsets[s], offsets[s] + spans[s].size) for s in beside[span] if s in offsets):
            if begin - stop >= size:
                gaps.append((begin - stop, stop))
            stop = max(stop, end)
        offsets[span] = min(gaps)[1] if gaps else stop
    furthest = max((offset + spans[span].size for span, offset in offsets.items()), default=start)
    return Arena(tuple(offsets[span] for span in range(len(spans))), furthest)
