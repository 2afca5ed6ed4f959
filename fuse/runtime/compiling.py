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
less."""
LARGEST_WAYS = 64
"""Ways of calling a model that are remembered."""
LARGEST_WAITING = 4096
"""Sizes of one way that are remembered."""


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
    """The programs of one way of calling a model with sizes that vary, with the seconds that each took to make; and the
    sizes that wait for the compiler, with their eager seconds."""

    programs: list[tuple[Compiling, float]] = field(default_factory=list)
    waiting: dict[Hashable, float] = field(default_factory=dict)


@dataclass
class Compilations:
    """When the compiler ran for the calls of a model, by ways of calling it: what more than sizes tells apart.

    >>> known = Compilations()
    >>> for seconds in (0.4, 0.6):
    ...     known.made("way", Compiling(ran=True), seconds)
    >>> known.allowed("way", False), known.allowed("another", False)
    (False, True)
    >>> known.waits("way", 7), known.price("way", 7, False)
    (0.5, 0.5)
    >>> known.ran_eager("way", 7, 0.6)
    >>> known.price("way", 7, False), known.allowed("way", False)
    (None, True)
    """

    _ways: dict[Hashable, _Way] = field(default_factory=dict)

    def allowed(self, way: Hashable, one: bool) -> bool:
        """Whether a program may be compiled now. ``one``: a size is one that is another in other calls."""
        of, took = self._ways.get(way, _Way()), self._took(way)
        return len(took) < AT_ONCE - one or sum(of.waiting.values()) >= median(took)

    def made(self, way: Hashable, how: Compiling, seconds: float) -> None:
        """A program for sizes that vary was made, and perhaps compiled: of a backward pass, the compiler may still
        run."""
        of = self._ways[way] = self._ways.pop(way, _Way())
        of.programs = [*(one for one in of.programs if one[0].ran), (how, seconds)][-LARGEST_WAYS:]
        if how.ran:
            of.waiting.clear()
        while len(self._ways) > LARGEST_WAYS:
            del self._ways[next(iter(self._ways))]

    def waits(self, way: Hashable, size: Hashable) -> float:
        """A call of this size waits for the compiler; the seconds that it would take."""
        waiting = self._ways[way].waiting
        waiting.setdefault(size, 0.0)
        if len(waiting) > LARGEST_WAITING:
            del waiting[next(iter(waiting))]
        return median(self._took(way))

    def price(self, way: Hashable, size: Hashable, one: bool) -> float | None:
        """The seconds that the compiler would take for a size that waits for it; None for one that does not."""
        of = self._ways.get(way)
        if of is None or size not in of.waiting or self.allowed(way, one):
            return None
        return median(self._took(way))

    def ran_eager(self, way: Hashable, size: Hashable, seconds: float) -> None:
        """A call of this size ran eager for so long."""
        of = self._ways.get(way)
        if of is not None and size in of.waiting:
            of.waiting[size] += seconds

    def _took(self, way: Hashable) -> list[float]:
        return [seconds for how, seconds in self._ways.get(way, _Way()).programs if how.ran]
