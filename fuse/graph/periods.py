"""Find stretches of a sequence that repeat: candidates for loops, in linear time.

    a  b c d  b c d  b c d  e      ->      Run(start=1, period=3, count=3)

Equality of two stretches is asked of a polynomial rolling hash (Karp and Rabin, "Efficient randomized pattern-matching
algorithms", 1987), so that one question costs constant time; a hash that lies costs nothing but time, since every run
is proved afterwards.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_MODULUS = (1 << 61) - 1
_BASE = 1_000_003
CANDIDATES = 16
"""Later occurrences of an item that are tried as the period: how often one step may repeat its first operator."""


@dataclass(frozen=True)
class Run:
    """``count`` equal stretches of ``period`` items, one after another from ``start`` on."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.count


def find_runs(items: Sequence[Hashable], least: int = 3, below: int | None = None) -> list[Run]:
    """Runs of at least ``least`` stretches, left to right, none overlapping; at each start the one that covers most.

    With ``below``, only those with shorter periods.

    >>> find_runs("abcdbcdbcde")
    [Run(start=1, period=3, count=3)]
    >>> find_runs("aaabaaabaaab", below=4)
    [Run(start=0, period=1, count=3), Run(start=4, period=1, count=3), Run(start=8, period=1, count=3)]
    >>> find_runs("abcabd")
    []
    """
    numbers: dict[Hashable, int] = {}
    codes = [numbers.setdefault(item, len(numbers) + 1) for item in items]
    following = _following(codes)
    hashes = _Hashes(codes)
    runs: list[Run] = []
    start = 0
    while start < len(codes):
        best: Run | None = None
        at = start
        for _ in range(CANDIDATES):
            at = following[at]
            if at < 0 or (below is not None and at - start >= below):
                break
            count = hashes.repeats(start, at - start)
            if count >= least and (best is None or count * (at - start) > best.end - best.start):
                best = Run(start, at - start, count)
        if best is None:
            start += 1
        else:
            runs.append(best)
            start = best.end
    return runs


def smallest_period(items: Sequence[object]) -> int | None:
    """The smallest period of a sequence that holds it at least twice; None where there is none. Linear.

    Knuth, Morris and Pratt, "Fast pattern matching in strings", 1977.

    >>> smallest_period("abcabcab"), smallest_period("aaaa"), smallest_period("abcd")
    (3, 1, None)
    """
    border = [0] * len(items)  # for each prefix the longest one that it also ends with
    for at in range(1, len(items)):
        length = border[at - 1]
        while length and items[at] != items[length]:
            length = border[length - 1]
        border[at] = length + 1 if items[at] == items[length] else 0
    period = len(items) - border[-1] if items else 0
    return period if 0 < 2 * period <= len(items) else None


def _following(codes: Sequence[int]) -> list[int]:
    """For each position the next one that holds the same item, or -1."""
    last: dict[int, int] = {}
    following = [-1] * len(codes)
    for position in range(len(codes) - 1, -1, -1):
        following[position] = last.get(codes[position], -1)
        last[codes[position]] = position
    return following


class _Hashes:
    """Hashes of all prefixes, from which that of any stretch follows."""

    def __init__(self, codes: Sequence[int]) -> None:
        self.prefix = [0]
        self.power = [1]
        for code in codes:
            self.prefix.append((self.prefix[-1] * _BASE + code) % _MODULUS)
            self.power.append(self.power[-1] * _BASE % _MODULUS)
        self.length = len(codes)

    def equal(self, first: int, second: int, length: int) -> bool:
        if second + length > self.length:
            return False
        return self._of(first, length) == self._of(second, length)

    def _of(self, start: int, length: int) -> int:
        return (self.prefix[start + length] - self.prefix[start] * self.power[length]) % _MODULUS

    def repeats(self, start: int, period: int) -> int:
        """How many equal stretches of ``period`` items stand one after another from ``start`` on."""
        low, high = 1, (self.length - start) // period
        while low < high:  # the longest prefix that equals itself shifted by one period
            middle = (low + high + 1) // 2
            if self.equal(start, start + period, period * (middle - 1)):
                low = middle
            else:
                high = middle - 1
        return low
