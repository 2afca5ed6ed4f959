"""Failed captures of calls between which the model's state changes, so that no earlier variant serves them.

    the first captures                                            one at each call
    once the last three failed for one reason                     after 32 further calls, after 128, after 512, ...
    after eight                                                   none
    after four that values which Python reads made fail           none, while the state stays the same

A model that fills a cache or counts warm-up steps may become one that can be captured, most do not; a capture takes as
long as many eager calls.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from fuse.runtime.specialised import LARGEST_UNUSED
from fuse.runtime.states import LARGEST_VARIANTS
from fuse.runtime.variants import Compiled

LARGEST_IN_VAIN = 8
"""Captures in vain of one kind of call, after which it runs eager without another, whatever else has changed."""
LARGEST_ALIKE = 3
"""Captures in a row that failed for one reason, after which calls run eager before the next one."""
LEAST_WAIT = 32
"""Calls that run eager then; four times as many after each further capture."""


@dataclass
class _Declined:
    """The failed captures of one kind of call.

    ``last``: the variant of the last one. ``times``: their number. ``alike``: those at the end that failed for one
    reason. ``calls``: calls since the last one.
    """

    last: Compiled
    times: int = 0
    alike: int = 0
    calls: int = 0

    def waits(self) -> bool:
        if self.times >= LARGEST_IN_VAIN:
            return True
        if self.alike < LARGEST_ALIKE:
            return False
        self.calls += 1
        return self.calls <= LEAST_WAIT << 2 * (self.alike - LARGEST_ALIKE)


@dataclass
class InVain:
    """The captures in vain of one model, by kind of call; the least recent kinds are forgotten."""

    _kinds: dict[Hashable, _Declined] = field(default_factory=dict)

    def instead(self, kind: Hashable) -> Compiled | None:
        """The variant of an earlier call that serves this one without a capture; None where it is to be captured."""
        known = self._kinds.get(kind)
        return known.last if known is not None and known.waits() else None

    def failed(self, kind: Hashable, compiled: Compiled) -> bool:
        """Note a capture in vain; whether the next one in the same state may succeed, because values differ then."""
        known = self._kinds.pop(kind, None) or _Declined(compiled)
        self._kinds[kind] = known
        alike = known.alike + 1 if known.last.reason == compiled.reason else 1
        known.last, known.times, known.alike, known.calls = compiled, known.times + 1, alike, 0
        if len(self._kinds) > LARGEST_VARIANTS:
            del self._kinds[next(iter(self._kinds))]
        return compiled.passing and known.times < LARGEST_UNUSED

    def clear(self) -> None:
        """Forget all kinds."""
        self._kinds.clear()
