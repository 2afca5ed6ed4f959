"""Find the repeated parts of a sequence, so that sixty-four equal steps are drawn and counted as one.

    a b c b c b c d      ->      a (b c) x 3 d

An unrolled loop leaves its body many times in program order. Comparing tokens (operator, shape, user line) is enough to
show it to a reader; proving that the steps may be rolled into a loop again is a stricter question, asked elsewhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

MINIMUM_COUNT = 3  # two short parts side by side are clearer drawn twice,
LONG_PERIOD = 8  # but two long ones are not
MINIMUM_SINGLE_COUNT = 4  # three gates of a cell are three nodes to their reader, not one node "x 3"
CANDIDATE_PERIODS = 16  # next occurrences of a token that are tried as the start of the second step


@dataclass(frozen=True)
class Run:
    """``count`` equal stretches of ``period`` entries from position ``start``; ``body`` folds the first of them."""

    start: int
    period: int
    count: int
    body: tuple[int | Run, ...]

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count


Folding = tuple[int | Run, ...]


def fold(tokens: Sequence[Hashable]) -> Folding:
    """The positions of ``tokens`` in order, with every repetition replaced by one ``Run``; nested ones too.

    The time is proportional to the number of tokens, times a constant bound on the periods tried at each of them.

    >>> fold("abcbcbcd")
    (0, Run(start=1, period=2, count=3, body=(1, 2)), 7)
    """
    names: dict[Hashable, int] = {}
    return _fold([names.setdefault(token, len(names)) for token in tokens], 0, len(tokens))


def runs(folding: Folding) -> Iterator[Run]:
    """The outermost runs of a folding, in order.

    >>> [run.count for run in runs(fold("xyxyxyzzzz"))]
    [3, 4]
    """
    return (part for part in folding if isinstance(part, Run))


def representatives(folding: Folding, length: int) -> list[int]:
    """For each of ``length`` positions the position that stands for it: its place in the first step of its run.

    >>> representatives(fold("abcbcbcd"), 8)
    [0, 1, 2, 1, 2, 1, 2, 7]
    """
    chosen = list(range(length))
    for run in runs(folding):
        inside = representatives(run.body, run.start + run.period)
        for position in range(run.start, run.stop):
            chosen[position] = inside[run.start + (position - run.start) % run.period]
    return chosen


def _fold(tokens: Sequence[int], start: int, stop: int) -> Folding:
    following = _next_occurrences(tokens, start, stop)
    ends: dict[int, int] = {}
    parts: list[int | Run] = []
    position = start
    while position < stop:
        run = _longest_run(tokens, following, ends, position, start, stop)
        if run is None:
            parts.append(position)
            position += 1
        else:
            body = _fold(tokens, run.start, run.start + run.period)
            parts.append(Run(run.start, run.period, run.count, body))
            position = run.stop
    return tuple(parts)


def _next_occurrences(tokens: Sequence[int], start: int, stop: int) -> list[int]:
    """For each position from ``start``, where the same token comes next (``stop`` if it does not)."""
    following = [stop] * (stop - start)
    seen: dict[int, int] = {}
    for position in range(stop - 1, start - 1, -1):
        following[position - start] = seen.get(tokens[position], stop)
        seen[tokens[position]] = position
    return following


def _longest_run(
    tokens: Sequence[int], following: Sequence[int], ends: dict[int, int], position: int, start: int, stop: int
) -> Run | None:
    """The run beginning at ``position`` that covers most tokens, the shortest period among equals."""
    best: Run | None = None
    second = position
    for _ in range(CANDIDATE_PERIODS):
        second = following[second - start]
        period = second - position
        if position + 2 * period > stop:
            break
        count = (_periodic_end(tokens, ends, position, period, stop) - position) // period
        if count >= _minimum_count(period) and (best is None or count * period > best.count * best.period):
            best = Run(position, period, count, ())
    return best


def _minimum_count(period: int) -> int:
    if period == 1:
        return MINIMUM_SINGLE_COUNT
    return 2 if period >= LONG_PERIOD else MINIMUM_COUNT


def _periodic_end(tokens: Sequence[int], ends: dict[int, int], position: int, period: int, stop: int) -> int:
    """Where ``tokens[position:]`` stops repeating itself after ``period`` entries.

    ``ends`` remembers the last answer for each period: it holds for every later position before it, and asking again
    from each of them would make a long almost-repetition quadratic.
    """
    if position + period <= ends.get(period, 0):
        return ends[period]
    end = position + period
    while end < stop and tokens[end] == tokens[end - period]:
        end += 1
    ends[period] = end
    return end
