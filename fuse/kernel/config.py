"""Explicit choices for the blocks of a product or convolution, in place of those by cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

Way = TypeVar("Way")

Threads = Literal["one", "if worth it", "asked in the call"]
"""Whether an outer loop is split over threads: where its work, known now or in the call, is worth waking them."""

NEAR = 1.25
"""Times the least cost that another way may still be the fastest with."""


@dataclass(frozen=True)
class Config:
    """One of the ways to run through the same work; the default is the one that the cost model takes.

    ``panels``: how many a block of a product has. ``share``: the place, in the order of their cost, of what a thread
    takes of a convolution at once.
    """

    panels: int | None = None
    share: int = 0


DEFAULT = Config()


def by_cost(ways: Iterable[Way], cost: Callable[[Way], float], place: int = 0) -> Way:
    """The way that costs least, or the one in another place among those that cost hardly more.

    >>> by_cost([30, 12, 10], float), by_cost([30, 12, 10], float, place=1), by_cost([30, 12, 10], float, place=2)
    (10, 12, 12)
    """
    ordered = sorted((cost(way), number, way) for number, way in enumerate(ways))
    near = [way for of, _, way in ordered if of <= NEAR * ordered[0][0]]
    return near[min(place, len(near) - 1)]
