"""Where intermediate values lie: one workspace, its memory used again as soon as a value is dead.

    value   steps it lives        workspace
      a     0 1                   [ a     ][ c ]
      b       1 2 3        ->     [ b           ]
      c         2 3
      d           3 4             [ d     ]           d takes a's place

Values are placed in the order in which they come to life, each in the smallest gap that holds it, so the time is that
of sorting; and, where few live at once, also the largest first (of equals, the longest-lived), each in the smallest gap
that those beside it leave. The smaller workspace counts. A value may also take over the place of one that dies in the
very step that computes it, where the kernel reads each element before it writes it.
"""

from __future__ import annotations

import bisect
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
    Arena(offsets=(0, 64, 0), size=192)
    >>> arrange([Lifetime(64, 0, 1), Lifetime(64, 1, 2, heir_of=(0,))]).size
    64
    """
    spans, span_of = _inherited(lifetimes)
    start = _aligned(reserved)
    placed = _in_order_of_life(spans, start)
    beside = _beside(spans)
    if beside is not None:
        placed = min(placed, _largest_first(spans, beside, start), key=lambda arena: arena.size)
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


def _in_order_of_life(spans: Sequence[Lifetime], start: int) -> Arena:
    """``spans``, which begin one after the other, each in the smallest gap there is when it begins."""
    gaps = _Gaps(start)
    offsets: list[int] = []
    alive: list[tuple[int, int]] = []  # (last step, span), a heap
    for span, needed in enumerate(spans):
        while alive and alive[0][0] < needed.first:
            _, dead = heapq.heappop(alive)
            gaps.release(offsets[dead], spans[dead].size)
        offsets.append(gaps.take(needed.size))
        heapq.heappush(alive, (needed.last, span))
    return Arena(tuple(offsets), gaps.furthest)


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


class _Gaps:
    """Free stretches between what lives, by place and by size; ``end`` is behind the last, ``furthest`` where it ever
    was."""

    def __init__(self, end: int) -> None:
        self.end = self.furthest = end
        self.by_start: dict[int, int] = {}
        self.by_stop: dict[int, int] = {}
        self.by_size: list[tuple[int, int]] = []  # (size, start), sorted

    def take(self, size: int) -> int:
        position = bisect.bisect_left(self.by_size, (size, 0))
        if size and position < len(self.by_size):
            length, start = self.by_size[position]
            self._remove(start, length)
            if length > size:
                self._add(start + size, length - size)
            return start
        start = self.end
        self.end += size
        self.furthest = max(self.furthest, self.end)
        return start

    def release(self, start: int, size: int) -> None:
        if size == 0:
            return
        stop = start + size
        if start in self.by_stop:
            before = self.by_stop[start]
            self._remove(before, start - before)
            start = before
        if stop == self.end:
            self.end = start
            return
        if stop in self.by_start:
            length = self.by_start[stop]
            self._remove(stop, length)
            stop += length
        self._add(start, stop - start)

    def _add(self, start: int, size: int) -> None:
        self.by_start[start] = size
        self.by_stop[start + size] = start
        bisect.insort(self.by_size, (size, start))

    def _remove(self, start: int, size: int) -> None:
        del self.by_start[start], self.by_stop[start + size]
        del self.by_size[bisect.bisect_left(self.by_size, (size, start))]
