"""Configs: alternatives to the blocks and threads of a kernel that the cost model chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

Candidate = TypeVar("Candidate")

Threads = Literal["one", "if worth it", "decided in each call"]
"""Threads of a kernel: one; several if the loop's work pays for waking them; or several, with the same test in each
call, where the work depends on sizes of the call."""

NEAR = 1.25
"""Largest predicted cost, relative to the least, of a candidate that is worth measuring."""


@dataclass(frozen=True)
class Config:
    """A choice of blocks and threads; the default is the cost model's.

    ``panels``: panels in a block of a product, None for the cost model's number. ``share``: rank, by predicted cost, of
    the part of a convolution that a thread takes at a time.

    >>> str(Config()), str(Config(panels=2, threads="one"))
    ('if worth it', 'one, panels 2')
    """

    panels: int | None = None
    share: int = 0
    threads: Threads = "if worth it"

    def __str__(self) -> str:
        blocks = {"panels": self.panels, "share": self.share}
        return ", ".join([self.threads, *(f"{name} {number}" for name, number in blocks.items() if number)])


DEFAULT = Config()


def by_cost(candidates: Iterable[Candidate], cost: Callable[[Candidate], float], rank: int = 0) -> Candidate:
    """The candidate with this rank by cost; the last one within ``NEAR`` of the least cost where ``rank`` is beyond it.

    >>> by_cost([30, 12, 10], float), by_cost([30, 12, 10], float, rank=1), by_cost([30, 12, 10], float, rank=2)
    (10, 12, 12)
    """
    ordered = sorted((cost(candidate), number, candidate) for number, candidate in enumerate(candidates))
    near = [candidate for of, _, candidate in ordered if of <= NEAR * ordered[0][0]]
    return near[min(rank, len(near) - 1)]
