"""Whether the compiler is worth it for a call whose sizes are new.

    x [99, 7, 8]    compiled for these sizes
    x [11, 5, 8]    compiled for all sizes
    x [131, 8, 8]   compiled, if it needs to be: a length may have chosen another way through the model
    x [1, 10, 8]    needs a kernel of its own: eager, until such calls have taken as long as the compiler does

Kernels that are made once sizes are known to vary serve all sizes. Where further ones are needed, the size is a rare
one (one row is left of an epoch), or each size has its own (as many results as steps). Which it is nobody knows before;
as in :mod:`fuse.runtime.patience`, no order of calls costs more than twice what would have been best.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from statistics import median

AT_ONCE = 2
"""Programs for one way of calling a model that are compiled at once where sizes are known to vary; where one is 1, one
less: it may be a rare one."""
FEW = 2
"""Eager calls one after another in which the same sizes are one: a further one is not rare."""
LARGEST_WAYS = 64
"""Ways of calling a model that are remembered."""
LARGEST_WAITING = 4096
"""Sizes of one way that are remembered."""

Ones = tuple[tuple[int, int], ...]
"""Sizes that are one: each the number of a tensor and a dimension."""


class NotYet(Exception):
    """Kernels are in no library, and are not to be compiled."""


@dataclass
class Compiling:
    """Whether kernels of a program may be compiled, and whether some were."""

    allowed: bool = True
    ran: bool = False


_COMPILING: ContextVar[Compiling | None] = ContextVar("compiling", default=None)


@contextlib.contextmanager
def compiling(how: Compiling) -> Iterator[None]:
    """Programs that are made inside may be compiled, or not."""
    token = _COMPILING.set(how)
    try:
        yield
    finally:
        _COMPILING.reset(token)


def begin_compiling() -> None:
    """The compiler is about to run for whatever program is made.

    Raises:
        NotYet: it must not.
    """
    how = _COMPILING.get()
    if how is not None and not how.allowed:
        raise NotYet
    if how is not None:
        how.ran = True


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

    def is_due(self, way: Hashable) -> bool:
        """Whether eager calls have taken as long as the compiler, for which some sizes wait."""
        of = self._ways.get(way, _Way())
        return bool(of.waiting) and of.eager >= median(of.took())

    def made(self, way: Hashable, how: Compiling, seconds: float) -> None:
        """A program for sizes that vary was made, and perhaps compiled: of a backward pass, the compiler may still
        run."""
        was_due = self.is_due(way)
        of = self._ways[way] = self._ways.pop(way, _Way())
        of.programs = [*(one for one in of.programs if one[0].ran), (how, seconds)][-LARGEST_WAYS:]
        of.row = (), 0
        if how.ran:
            of.waiting.clear()
        if how.ran or was_due:
            of.eager = 0.0
        while len(self._ways) > LARGEST_WAYS:
            del self._ways[next(iter(self._ways))]

    def waits(self, way: Hashable, size: Hashable) -> float:
        """A call of this size waits for the compiler; the seconds that it would take."""
        of = self._ways[way]
        of.waiting[size] = None
        if len(of.waiting) > LARGEST_WAITING:
            del of.waiting[next(iter(of.waiting))]
        return median(of.took())

    def price(self, way: Hashable, size: Hashable, ones: Ones) -> float | None:
        """The seconds that the compiler would take for a size that waits for it; None for one that does not."""
        of = self._ways.get(way, _Way())
        return median(of.took()) if size in of.waiting and not self.allowed(way, ones) else None

    def ran_eager(self, way: Hashable, ones: Ones, seconds: float) -> None:
        """A call ran eager for so long."""
        if (of := self._ways.get(way)) is not None and of.waiting:
            of.eager += seconds
            of.row = ones, 1 + (of.row[1] if of.row[0] == ones else 0)
