"""The losses of a kind of calls: the one that is expected of calls at further sizes.

y, h = fused(x)      y.sum().backward()     later calls at any sizes get a backward graph without the tangent of h
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Losses:
    """The losses of calls that differ in sizes only: for each, the results that it does not use.

    ``gives_up``: why later calls run eager; at further sizes, they would be refused in the same way.
    """

    seen: set[frozenset[int]] = field(default_factory=set)
    gives_up: str | None = None

    def expected(self) -> frozenset[int]:
        """The results that later losses do not use: with several losses, each is expected to use all."""
        return next(iter(self.seen)) if len(self.seen) == 1 else frozenset()
