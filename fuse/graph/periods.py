"""Find repeated stretches of a sequence, the candidates for loops, in linear time.

    a  b c d  b c d  b c d  e      ->      RepeatedStretch(start=1, period=3, count=3)

For each period, the search determines once how far the sequence repeats itself; the answer holds for every later
position up to there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

CANDIDATES = 16
"""The most later occurrences of an item that are tried as the period: one step may repeat its first operator this
often."""


@dataclass(frozen=True)
class RepeatedStretch:
    """``count`` equal stretches of ``period`` items, one after another, from position ``start``."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.count


def find_repetitions(
    items: Sequence[Hashable], least: int | Callable[[int], int] = 3, below: int | None = None
) -> list[RepeatedStretch]:
    """Repetitions of at least ``least`` stretches, in order, without overlap; at each start the one that covers most
    items.

    ``least`` may be a function of the period. ``below``: only shorter periods are tried.

    >>> find_repetitions("abcdbcdbcde")
    [RepeatedStretch(start=1, period=3, count=3)]
    >>> [(found.start, found.period, found.count) for found in find_repetitions("aaabaaabaaab", below=4)]
    [(0, 1, 3), (4, 1, 3), (8, 1, 3)]
    >>> find_repetitions("abcabd")
    []
    """
    numbers: dict[Hashable, int] = {}
    codes = [numbers.setdefault(item, len(numbers)) for item in items]
    following, ends = _following(codes), dict[int, int]()
    runs: list[RepeatedStretch] = []
    start = 0
    while start < len(codes):
        best: RepeatedStretch | None = None
        second = start
        for _ in range(CANDIDATES):
            second = following[second]
            period = second - start
            if second < 0 or second + period > len(codes) or (below is not None and period >= below):
                break
            if ends.get(period, 0) < second:
                known = ends[best.period] if best is not None and period % best.period == 0 else 0
                ends[period] = _end(codes, period, max(second, known))
            count = (ends[period] - start) // period
            enough = least if isinstance(least, int) else least(period)
            if count >= enough and (best is None or count * period > best.end - best.start):
                best = RepeatedStretch(start, period, count)
        if best is None:
            start += 1
        else:
            runs.append(best)
            start = best.end
    return runs


def _end(codes: Sequence[int], period: int, known: int) -> int:
    """The first position from ``known`` on whose item differs from the item ``period`` positions before."""
    end = known
    while end < len(codes) and codes[end] == codes[end - period]:
        end += 1
    return end


def smallest_period(items: Sequence[object]) -> int | None:
    """The smallest period that the sequence contains at least twice; None if there is none. Linear time.

    Knuth, Morris and Pratt, "Fast pattern matching in strings", 1977.

    >>> smallest_period("abcabcab"), smallest_period("aaaa"), smallest_period("abcd")
    (3, 1, None)
    """
    border = [0] * len(items)  # for each prefix, the length of the longest proper prefix that is also its suffix
    for at in range(1, len(items)):
        length = border[at - 1]
        while length and items[at] != items[length]:
            length = border[length - 1]
        border[at] = length + 1 if items[at] == items[length] else 0
    period = len(items) - border[-1] if items else 0
    return period if 0 < 2 * period <= len(items) else None


def _following(codes: Sequence[int]) -> list[int]:
    """For each position, the next position with the same item, or -1."""
    last: dict[int, int] = {}
    following = [-1] * len(codes)
    for position in range(len(codes) - 1, -1, -1):
        following[position] = last.get(codes[position], -1)
        last[codes[position]] = position
    return following
