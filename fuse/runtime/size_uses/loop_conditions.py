"""Comparisons that end a loop: they count its steps, and leave no condition on the size.

    while t < x.shape[0]:         0 < n0, 1 < n0, 2 < n0 and so on, in one line, and at last 37 < n0, which is false:
        h, t = cell(x[t], h), t + 1        the loop takes n0 steps, as ``for t in range(n0)`` does
    if x.shape[0] > 36:           in another line: a condition

A comparison belongs to such a row if the distance of its two sides shrinks by one each time, and the row ends where the
outcome changes. Graphs of other lengths then have another number of steps, which their text and numbers show. The first
comparison of a row stays: the loop has a step.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import CodeType, FrameType

from fuse.kernel.arithmetic.extents import Conditions, outcome_of
from fuse.kernel.arithmetic.polynomials import Terms

FEWEST = 3
"""A row has more comparisons: so many may be those of a few branches."""


@dataclass(frozen=True)
class _Compared:
    """A comparison of ``apart``, the distance of two sizes, with zero; ``value`` is the distance in the current
    call."""

    text: str
    apart: Terms
    value: int
    symbol: str

    @property
    def outcome(self) -> bool:
        return outcome_of(self.symbol, self.value)

    @property
    def varying(self) -> Terms:
        return tuple(one for one in self.apart if one[0])

    def ends_at(self, step: int) -> bool:
        """Whether the outcome is another one where the distance is one ``step`` further."""
        return outcome_of(self.symbol, self.value + step) is not self.outcome


@dataclass
class LoopConditions:
    """The comparisons of sizes, by the line of code that made them.

    >>> __name__ = "model"
    >>> conditions, loops = Conditions(of_text=False), LoopConditions()
    >>> conditions.told = loops.note
    >>> steps, t = conditions.size("n0", 37), 0
    >>> while t < steps: t += 1
    >>> steps > 100, len(conditions.noted)
    (False, 39)
    >>> loops.drop(conditions)
    >>> [*conditions.noted]
    ['n0 >= 1', '((-1)+(1)*n0) > 0', '((-100)+(1)*n0) > 0']
    """

    _by_line: dict[tuple[CodeType, int], list[_Compared]] = field(default_factory=dict)

    def note(self, text: str, apart: Terms, value: int, symbol: str) -> None:
        """Note a comparison, which code outside of fuse has just made."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_ours(frame):
            frame = frame.f_back
        if frame is not None:
            line = frame.f_code, frame.f_lineno
            self._by_line.setdefault(line, []).append(_Compared(text, apart, value, symbol))

    def drop(self, conditions: Conditions) -> None:
        """Remove comparisons that end loops, unless another line made them, too. Where two sizes are equal, nobody
        knows which of them a loop counts to, and nothing is removed."""
        if len(set(conditions.values)) < len(conditions.values):
            return
        dropped: set[str] = set()
        kept: set[str] = set()
        for compared in self._by_line.values():
            rows = _rows(compared)
            ends = all(map(_is_counted, rows))
            for row in rows:
                varying = row[0].varying
                own = {one.text for one in row[1:] if one.varying == varying} if ends else set()
                dropped |= own
                kept |= {one.text for one in row} - own
        for text in dropped - kept:
            conditions.noted.pop(text, None)


def _rows(compared: list[_Compared]) -> list[list[_Compared]]:
    """The comparisons of one line, parted where a distance is not one less, or one more, as it was before."""
    rows: list[list[_Compared]] = []
    for one in compared:
        step = one.value - rows[-1][-1].value if rows else 0
        if abs(step) == 1 and (len(rows[-1]) < 2 or step == rows[-1][1].value - rows[-1][0].value):
            rows[-1].append(one)
        else:
            rows.append([one])
    return rows


def _is_counted(row: list[_Compared]) -> bool:
    """Whether the comparisons of a row end a loop: all have one outcome, but for the last one or the next one."""
    if len(row) <= FEWEST or len({one.symbol for one in row}) > 1:
        return False
    *before, last = row
    step = last.value - before[-1].value
    same = all(one.outcome is row[0].outcome for one in before)
    return same and (last.outcome is not row[0].outcome or last.ends_at(step))


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("fuse.")
