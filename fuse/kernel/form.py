"""What a kernel is told of its loops where that is not left to its cost."""

from __future__ import annotations

from dataclasses import dataclass

LANES = 128
"""Neighbouring rows at most that a reduction over a strided dimension keeps results of."""


@dataclass(frozen=True)
class Form:
    """One of the ways to run through the same work; the default is the one that the cost model takes.

    ``panels``: how many a block of a product has. ``share``: the place, in the order of their cost, of what a thread
    takes of a convolution at once. ``order``: the place, in the same way, of the order of an elementwise nest's loops.
    ``lanes``: the rows at most of a block of them, whose blocks threads share out.
    """

    panels: int | None = None
    share: int = 0
    order: int = 0
    lanes: int = LANES


DEFAULT = Form()
