"""Where intermediate values lie: one workspace, its memory used again as soon as a value is dead.

    value   steps it lives        workspace
      a     0 1                   [ a     ][ c ]
      b       1 2 3        ->     [ b           ]
      c         2 3
      d           3 4             [ d     ]           d takes a's place

Values are placed in the order in which they come to life, each in the smallest gap that holds it, so the time is that
of sorting. A value may also take over the place of one that dies in the very step that computes it, where the kernel
reads each element before it writes it.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register


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
    gaps = _Gaps(_aligned(reserved))
    offsets = [0] * len(lifetimes)
    alive: list[tuple[int, int]] = []  # (last step, value), a heap
    bequeathed: set[int] = set()
    for value in sorted(range(len(lifetimes)), key=lambda v: lifetimes[v].first):
        needed = lifetimes[value]
        while alive and alive[0][0] < needed.first:
            _, dead = heapq.heappop(alive)
            if dead not in bequeathed:
                gaps.release(offsets[dead], _aligned(lifetimes[dead].size))
        donor = next((d for d in needed.heir_of if d not in bequeathed and _may_follow(lifetimes[d], needed)), None)
        if donor is None:
            offsets[value] = gaps.take(_aligned(needed.size))
        else:
            bequeathed.add(donor)
            offsets[value] = offsets[donor]
        heapq.heappush(alive, (needed.last, value))
    return Arena(tuple(offsets), gaps.end)


def _may_follow(donor: Lifetime, heir: Lifetime) -> bool:
    return donor.first < donor.last == heir.first and _aligned(donor.size) == _aligned(heir.size)


def _aligned(size: int) -> int:
    return max(-(-size // ALIGNMENT), 1) * ALIGNMENT if size else 0


class _Gaps:
    """Free stretches of the workspace, by place and by size; ``end`` is how far it has grown."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.by_start: dict[int, int] = {}
        self.by_stop: dict[int, int] = {}
        self.by_size: list[tuple[int, int]] = []  # (size, start), sorted

    def take(self, size: int) -> int:
        position = bisect.bisect_left(self.by_size, (size, 0))
        if position < len(self.by_size):
            length, start = self.by_size[position]
            self._remove(start, length)
            if length > size:
                self._add(start + size, length - size)
            return start
        start = self.end
        self.end += size
        return start

    def release(self, start: int, size: int) -> None:
        if size == 0:
            return
        stop = start + size
        if start in self.by_stop:
            before = self.by_stop[start]
            self._remove(before, start - before)
            start = before
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
