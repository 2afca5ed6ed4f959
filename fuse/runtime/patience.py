"""Whether a call with sizes that are new is worth a capture yet.

    the first eight sizes of a kind of call      captured, or given the graph of others, each at its first call
    further ones                                 eager, until one more would have taken as long as either takes
    those beyond all that were captured          the same, but that their eager seconds are counted together

Batches cut at their own length seldom have one size twice, and a capture takes as long as many eager calls: whoever
captured each size would be slower with fuse than without. A size that returns is worth its capture. Which those are
is not known before; as with skis that are rented until the rent has added up to the price, no order of sizes costs
more than twice what would have been best. One capture of a size beyond the others serves all that lie between
(:mod:`fuse.runtime.reaching`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from statistics import median

SETTLED = 8
"""Sizes of one kind of call that are captured at once."""
LARGEST_CAPTURED = 64
"""Captures that are remembered of a kind of call: as many as programs are kept."""
LARGEST_EAGER = 4096
"""Sizes whose eager calls are remembered."""


@dataclass
class Patience:
    """Seconds that captures took, by kind of call and size, and that eager calls of a size took so far.

    >>> patience = Patience()
    >>> for size in range(SETTLED):
    ...     patience.captured("kind", size, 0.08)
    >>> patience.expected("kind", 100), patience.expected("kind", 3)
    (0.08, None)
    >>> patience.ran_eager("kind", 100, 0.05)
    >>> patience.expected("kind", 100), patience.expected("kind", 101)
    (None, 0.08)
    """

    _captured: dict[Hashable, dict[Hashable, float]] = field(default_factory=dict)
    _resized: dict[Hashable, dict[Hashable, float]] = field(default_factory=dict)
    _eager: dict[Hashable, float] = field(default_factory=dict)
    _least: dict[Hashable, float] = field(default_factory=dict)  # that an eager call of each kind took

    def captured(self, kind: Hashable, size: Hashable, seconds: float, resized: bool = False) -> None:
        """A call of this kind and size was captured, or got the graph of others (``resized``)."""
        self._eager.pop(size, None)
        if not resized:
            self._eager.pop(kind, None)
        known = (self._resized if resized else self._captured).setdefault(kind, {})
        known.pop(size, None)
        known[size] = seconds
        _shorten(known, LARGEST_CAPTURED)

    def expected(self, kind: Hashable, size: Hashable, resized: bool = False, together: bool = False) -> float | None:
        """The seconds that a capture is expected to take, or the graph of other sizes (``resized``); None where a call
        of this size has its program made now. ``together``: what other sizes took counts as well."""
        captured, graphs = self._captured.get(kind, {}), self._resized.get(kind, {})
        known = graphs if resized else captured
        if size in captured or not known or len(captured) + len(graphs) < SETTLED:
            return None
        seconds = min(known.values()) if resized else median(known.values())  # without what is done once
        with_this = self._eager.get(kind if together else size, 0.0) + self._least.get(kind, 0.0)
        return seconds if with_this < seconds else None

    def ran_eager(self, kind: Hashable, size: Hashable, seconds: float, together: bool = False) -> None:
        """A call of this kind and size ran eager for so long."""
        counted = kind if together else size
        self._eager[counted] = self._eager.pop(counted, 0.0) + seconds
        self._least[kind] = min(self._least.pop(kind, seconds), seconds)
        _shorten(self._eager, LARGEST_EAGER)
        _shorten(self._least, LARGEST_CAPTURED)


def _shorten(known: dict[Hashable, float], most: int) -> None:
    """Forget the oldest entries."""
    while len(known) > most:
        del known[next(iter(known))]
