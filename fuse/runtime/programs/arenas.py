"""Workspaces of programs that differ in sizes: those whose values have about the same sizes share one.

    sizes of values      rounded up           workspace
    9,700 and 4,096      10,240 and 4,096     offsets 0 and 10,240
    9,800 and 4,096      10,240 and 4,096     the same
    10,300 and 4,096     12,288 and 4,096     offsets 0 and 12,288

Each new size would otherwise have its memory planned, and would touch new pages in its first run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fuse.runtime.programs.live_ranges import MadeBuffers
from fuse.runtime.programs.plan import Arena, rounded
from fuse.runtime.programs.steps import Place

MOST_KEPT = 16
"""Most workspaces of one wiring that are kept for further sizes."""
MOST_PLACES = 1024
"""Most tuples of places whose addresses are remembered for one workspace."""


class Addresses:
    """Numbers that follow from a tuple of places, by the identity of the tuple: programs that differ in sizes share
    the tuples without a place that moves.

    >>> known, places = Addresses(), (Place(0, 64), Place(1, 0))
    >>> known.put(places, [2, 64, 3, 0])
    [2, 64, 3, 0]
    >>> known.get(places), known.get((Place(0, 64), Place(1, 0)))
    ([2, 64, 3, 0], None)
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[Place, ...], list[int]]] = {}

    def get(self, places: tuple[Place, ...]) -> list[int] | None:
        """The numbers of these places, if they are known."""
        found = self._known.get(id(places))
        return None if found is None else found[1]

    def put(self, places: tuple[Place, ...], numbers: list[int]) -> list[int]:
        """Remember and return the numbers of these places; those of the first programs are remembered."""
        if len(self._known) < MOST_PLACES:
            self._known[id(places)] = places, numbers  # the tuple is kept, so that no other has its identity
        return numbers


class Shared(NamedTuple):
    """Offsets of values, the ``pool`` of workspaces that have them, and the ``addresses`` of places."""

    arena: Arena
    pool: list[Any]
    addresses: Addresses


class Arenas:
    """The workspaces of programs with one wiring, by the rounded sizes of values.

    >>> arenas, made = Arenas(), MadeBuffers({0: 0, 1: 1}, [(0, 1), (1, 2)], [(), ()])
    >>> first = arenas.at(made, (9_700, 4_096), 0)
    >>> first.arena
    Arena(offsets=(0, 10240), size=14336)
    >>> arenas.at(made, (9_800, 4_096), 0) is first, arenas.at(made, (10_300, 4_096), 0) is first
    (True, False)
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Shared] = {}

    def at(self, made: MadeBuffers, sizes: Sequence[int], scratch: int) -> Shared:
        """The workspace for values of these sizes."""
        larger = (*map(rounded, sizes), scratch)
        if (found := self._known.get(larger)) is None:
            found = Shared(made.arena(larger[:-1], scratch), [], Addresses())
            known = dict(list(self._known.items())[1 - MOST_KEPT :])  # replaced, as another thread may look
            self._known = {**known, larger: found}
        return found
