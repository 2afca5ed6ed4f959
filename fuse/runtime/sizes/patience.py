"""Whether a program for new sizes is worth a capture yet, and worth the compiler.

    the first eight sizes of a kind of call      captured, or given the graph of others, each at its first call
    further ones                                 eager, until one more would have taken as long as either takes
    those beyond all that were captured          the same, but that their eager seconds are counted together
    those whose program helps to make others     likewise (:mod:`fuse.runtime.resizing.sized_programs`)

    x [99, 7, 8]    compiled for these sizes
    x [11, 5, 8]    compiled for all sizes
    x [131, 8, 8]   compiled, if it needs to be: a length may have chosen another way through the model
    x [1, 10, 8]    needs a kernel of its own: eager, until such calls have taken as long as the compiler does

If each batch is cut at a length of its own, few sizes come twice, and a capture takes as long as many eager calls:
captures of all sizes would make fuse slower than eager. A size that returns is worth its capture. A rare size (one row
is left of an epoch) is not worth kernels of its own. Nobody knows beforehand which sizes return. So a further one runs
eager until its eager calls have taken as long as its capture would (the ski-rental rule). In any order of sizes, this
costs at most twice the best choice. One capture of a size beyond the others serves all that lie between
(:mod:`fuse.runtime.sizes.reaching`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from fuse.runtime.building.compiling import Compiling

SETTLED = 8
"""Sizes of one kind of call that are captured at once."""
SETTLED_UNLIKE = 3
"""The same for a size that needs a capture of its own although the graph of others serves most sizes: one that equals
another number of the model, or a batch of one."""
SETTLED_GROWING = 1
"""The same for a tensor of one row that was empty: it grows, and the graphs of none and of one serve no other size."""
SETTLED_NUMBERS = 3
"""The same for calls that differ in numbers only: such a number may count the calls, as a position in a text does."""
LARGEST_CAPTURED = 64
"""Captures of a kind of call, and ways of calling a model, that are remembered: as many as programs are kept."""
LARGEST_EAGER = 4096
"""Sizes whose eager calls are remembered, and that wait for the compiler in one way of calling a model."""
AT_ONCE = 2
"""Programs for one way of calling a model that are compiled at once where sizes are known to vary; where one is 1, one
less: it may be a rare one."""
FEW = 2
"""Eager calls one after another in which the same sizes are one: a further one is not rare."""

Ones = tuple[tuple[int, int], ...]
"""Sizes that are one: each the number of a tensor and a dimension."""


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
    _made_up: dict[Hashable, float] = field(default_factory=dict)
    _resized: dict[Hashable, dict[Hashable, float]] = field(default_factory=dict)
    _eager: dict[Hashable, float] = field(default_factory=dict)
    _least: dict[Hashable, float] = field(default_factory=dict)  # that an eager call of each kind took

    def captured(self, kind: Hashable, size: Hashable, seconds: float, resized: bool = False) -> None:
        """A call of this kind and size was captured, or got the graph of others (``resized``)."""
        self._eager.pop(size, None)
        self._eager.pop((kind, resized), None)
        known = (self._resized if resized else self._captured).setdefault(kind, {})
        known.pop(size, None)
        known[size] = seconds
        _shorten(known, LARGEST_CAPTURED)

    def made_up(self, kind: Hashable, seconds: float) -> None:
        """A made-up call of this kind was captured; it is none of the first sizes."""
        self._made_up[kind] = self._made_up.pop(kind, 0.0) + seconds
        _shorten(self._made_up, LARGEST_CAPTURED)

    def sizes(self, kind: Hashable) -> Iterable[Any]:
        """The captured sizes of this kind, if no further one is captured at once; else none."""
        known = self._captured.get(kind, {})
        return known.keys() if len(known) >= SETTLED else ()

    def spent(self, kind: Hashable) -> float:
        """The seconds that captures of this kind took."""
        return sum(self._captured.get(kind, {}).values()) + self._made_up.get(kind, 0.0)

    def resized(self, kind: Hashable) -> int:
        """How many sizes of this kind got the graph of others."""
        return len(self._resized.get(kind, ()))

    def expected(
        self,
        kind: Hashable,
        size: Hashable,
        resized: bool = False,
        together: bool = False,
        differs_in_numbers: Callable[[Any], bool] = lambda size: False,
        settled_at: Callable[[], int] = lambda: SETTLED,
    ) -> float | None:
        """The seconds that a capture is expected to take, or the graph of other sizes (``resized``); None where a call
        of this size has its program made now. ``together``: what other sizes took counts as well.
        ``differs_in_numbers``: whether a captured size differs from this one in numbers only. ``settled_at``: the
        sizes of this kind that are captured at once, ``SETTLED`` or fewer."""
        captured, graphs = self._captured.get(kind, {}), self._resized.get(kind, {})
        known = graphs if resized else captured
        if size in captured or not known:
            return None
        made = len(captured) + len(graphs)
        settled = made >= SETTLED or made >= settled_at()
        if not settled and sum(map(differs_in_numbers, captured)) < SETTLED_NUMBERS:
            return None
        seconds = min(known.values())  # without what is done once
        with_this = self._eager.get((kind, resized) if together else size, 0.0) + self._least.get(kind, 0.0)
        return seconds if with_this < seconds else None

    def ran_eager(
        self, kind: Hashable, size: Hashable, seconds: float, together: bool = False, resized: bool = False
    ) -> None:
        """A call of this kind and size ran eager for so long; the rest as in :meth:`expected`."""
        counted = (kind, resized) if together else size
        self._eager[counted] = self._eager.pop(counted, 0.0) + seconds
        self._least[kind] = min(self._least.pop(kind, seconds), seconds)
        _shorten(self._eager, LARGEST_EAGER)
        _shorten(self._least, LARGEST_CAPTURED)


@dataclass
class _Way:
    """Programs and waiting sizes of one way of calling a model with sizes that vary.

    ``programs``: with the seconds that each took to make. ``waiting``: sizes that wait for the compiler. ``eager``: the
    seconds of eager calls since the first of them. ``row``: the sizes of one of the last eager calls, and how many.
    """

    programs: list[tuple[Compiling, float]] = field(default_factory=list)
    waiting: dict[Hashable, None] = field(default_factory=dict)
    eager: float = 0.0
    row: tuple[Ones, int] = ((), 0)

    def took(self) -> list[float]:
        """The seconds of those programs for which the compiler ran."""
        return [seconds for how, seconds in self.programs if how.ran]


@dataclass
class Compilations:
    """When the compiler ran for the calls of a model, by ways of calling it: what more than sizes tells apart.

    >>> known = Compilations()
    >>> for seconds in (0.4, 0.6):
    ...     known.made("way", Compiling(ran=True), seconds)
    >>> known.allowed("way", ()), known.allowed("another", ())
    (False, True)
    >>> known.waits("way", 7), known.price("way", 7, ())
    (0.5, 0.5)
    >>> known.ran_eager("way", (), 0.6)
    >>> known.price("way", 7, ()), known.is_due("way"), known.allowed("way", ())
    (None, True, True)
    """

    _ways: dict[Hashable, _Way] = field(default_factory=dict)

    def allowed(self, way: Hashable, ones: Ones) -> bool:
        """Whether a program may be compiled now. ``ones``: the sizes that are one, and another in other calls."""
        of = self._ways.get(way, _Way())
        rare = bool(ones) and not (of.row[0] == ones and of.row[1] >= FEW)
        return len(of.took()) < AT_ONCE - rare or self.is_due(way)

    def made_any(self, way: Hashable) -> bool:
        """Whether a program for sizes that vary was made."""
        return way in self._ways

    def waited_for(self, way: Hashable) -> bool:
        """Whether a size waits for the compiler."""
        return (of := self._ways.get(way)) is not None and bool(of.waiting)

    def is_due(self, way: Hashable) -> bool:
        """Whether eager calls have taken as long as the compiler, for which some sizes wait."""
        of = self._ways.get(way, _Way())
        return bool(of.waiting) and of.eager >= median(of.took())

    def made(self, way: Hashable, how: Compiling, seconds: float) -> None:
        """A program for sizes that vary was made, and perhaps compiled: of a backward pass, the compiler may still
        run."""
        was_due = self.is_due(way)
        of = self._ways[way] = self._ways.pop(way, _Way())
        of.programs = [*(one for one in of.programs if one[0].ran), (how, seconds)][-LARGEST_CAPTURED:]
        of.row = (), 0
        if how.ran:
            of.waiting.clear()
        if how.ran or was_due:
            of.eager = 0.0
        _shorten(self._ways, LARGEST_CAPTURED)

    def waits(self, way: Hashable, size: Hashable) -> float:
        """A call of this size waits for the compiler; the seconds that it would take."""
        of = self._ways[way]
        of.waiting[size] = None
        _shorten(of.waiting, LARGEST_EAGER)
        return median(of.took())

    def price(self, way: Hashable, size: Hashable, ones: Ones) -> float | None:
        """The seconds that the compiler would take for a size that waits for it; None for one that does not."""
        of = self._ways.get(way, _Way())
        return median(of.took()) if size in of.waiting and not self.allowed(way, ones) else None

    def ran_eager(self, way: Hashable, ones: Ones, seconds: float) -> None:
        """A call ran eager for so long, while a size waits."""
        of = self._ways[way]
        of.eager += seconds
        of.row = ones, 1 + (of.row[1] if of.row[0] == ones else 0)


def _shorten(known: dict[Hashable, Any], most: int) -> None:
    """Forget the oldest entries."""
    while len(known) > most:
        del known[next(iter(known))]
