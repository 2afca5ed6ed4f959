"""Find the repeated parts of a sequence, so that sixty-four equal steps are drawn and counted as one.

    a b c b c b c d      ->      a (b c) x 3 d

An unrolled loop repeats its body in program order. Equal tokens (operator, shape, user line) are enough to show the
repeats to a reader; :mod:`fuse.loops.rolling` proves that the steps may be rolled.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from fuse.graph.periods import find_repetitions

MINIMUM_COUNT = 3  # two short parts side by side are clearer drawn twice,
LONG_PERIOD = 8  # but two long ones are not
MINIMUM_SINGLE_COUNT = 4  # three gates of a cell are three nodes to their reader, not one node "x 3"


@dataclass(frozen=True)
class Repeat:
    """``count`` equal stretches of ``period`` entries from position ``start``; ``body`` folds the first of them."""

    start: int
    period: int
    count: int
    body: tuple[int | Repeat, ...]

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count


Folding = tuple[int | Repeat, ...]


def fold(tokens: Sequence[Hashable], first: int = 0) -> Folding:
    """The positions of ``tokens``, counted from ``first``; a repetition, nested or not, is one ``Repeat``.

    >>> fold("abcbcbcd")
    (0, Repeat(start=1, period=2, count=3, body=(1, 2)), 7)
    """
    parts: list[int | Repeat] = []
    at = first
    for run in find_repetitions(tokens, _minimum_count):
        parts += range(at, first + run.start)
        body = fold(tokens[run.start : run.start + run.period], first + run.start)
        parts.append(Repeat(first + run.start, run.period, run.count, body))
        at = first + run.end
    return (*parts, *range(at, first + len(tokens)))


def runs(folding: Folding) -> Iterator[Repeat]:
    """The outermost runs of a folding, in order.

    >>> [run.count for run in runs(fold("xyxyxyzzzz"))]
    [3, 4]
    """
    return (part for part in folding if isinstance(part, Repeat))


def representatives(folding: Folding, length: int) -> list[int]:
    """For each of ``length`` positions, the corresponding position in the first step of its repeat.

    >>> representatives(fold("abcbcbcd"), 8)
    [0, 1, 2, 1, 2, 1, 2, 7]
    """
    chosen = list(range(length))
    for run in runs(folding):
        inside = representatives(run.body, run.start + run.period)
        for position in range(run.start, run.stop):
            chosen[position] = inside[run.start + (position - run.start) % run.period]
    return chosen


def _minimum_count(period: int) -> int:
    if period == 1:
        return MINIMUM_SINGLE_COUNT
    return 2 if period >= LONG_PERIOD else MINIMUM_COUNT
