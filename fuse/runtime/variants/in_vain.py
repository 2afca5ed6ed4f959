"""Failed captures of calls that no earlier variant serves: the model's state, a size or a number differs.

    one kind of call, while the state changes
        the first captures                                        one at each call
        once the last three failed for one reason                 after 32 further calls, after 128, after 512, ...
        after eight                                               none
        after four that values which Python reads made fail       none, while the state stays the same
    calls that differ in sizes and numbers
        once the last eight failed for one reason                 after 32 further calls, after 128, after 512, ...

A capture takes as long as many eager calls. A model that fills a cache or counts warm-up steps may be captured later;
most others never are.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, field

from fuse.runtime.variants.compiled import Compiled
from fuse.runtime.variants.specialised import LARGEST_UNUSED
from fuse.runtime.variants.states import LARGEST_VARIANTS

LARGEST_IN_VAIN = 8
"""Captures in vain of one kind of call, after which it runs eager without another, whatever else has changed."""
LARGEST_ALIKE = 3
"""Captures of one kind in a row that failed for one reason, after which calls run eager before the next one."""
LARGEST_ALIKE_OF_SIZES = 8
"""The same for calls that differ in sizes and numbers, of which some may fill a cache that later ones read."""
LEAST_WAIT = 32
"""Calls that run eager then; four times as many after each further capture."""
_NUMBER = re.compile(r"-?\b\d+(\.\d+)?\b")


def without_numbers(message: str) -> str:
    """The message with N for each number, so that messages about other sizes are equal.

    >>> without_numbers("row 3 of 7.5 is wrong")
    'row N of N is wrong'
    """
    return _NUMBER.sub("N", message)


@dataclass
class _Declined:
    """The failed captures of similar calls.

    ``last``: the variant of the last one. ``times``: their number. ``alike``: those at the end that failed for one
    reason. ``calls``: calls since the last one.
    """

    last: Compiled
    times: int = 0
    alike: int = 0
    calls: int = 0

    def note(self, compiled: Compiled) -> None:
        """Note one more."""
        alike = self.alike + 1 if _reason(self.last) == _reason(compiled) else 1
        self.last, self.times, self.alike, self.calls = compiled, self.times + 1, alike, 0

    def waits(self, largest: int) -> bool:
        """Whether a call runs eager, after ``largest`` failures for one reason."""
        if self.alike < largest:
            return False
        self.calls += 1
        return self.calls <= LEAST_WAIT << 2 * (self.alike - largest)


def _reason(compiled: Compiled) -> str:
    return without_numbers(compiled.reason.reason) if compiled.reason else ""


@dataclass
class InVain:
    """The captures in vain of one model, by the kind of call, and by the kind without sizes and numbers; the least
    recent are forgotten."""

    _kinds: dict[Hashable, _Declined] = field(default_factory=dict)
    _of_sizes: dict[Hashable, _Declined] = field(default_factory=dict)

    def instead(self, kind: Hashable, of_sizes: Hashable) -> Compiled | None:
        """The variant of an earlier call that serves this one without a capture; None if it is to be captured."""
        known = self._kinds.get(kind)
        if known is not None and (known.times >= LARGEST_IN_VAIN or known.waits(LARGEST_ALIKE)):
            return known.last
        known = self._of_sizes.get(of_sizes)
        return known.last if known is not None and known.waits(LARGEST_ALIKE_OF_SIZES) else None

    def made(self, of_sizes: Hashable, compiled: Compiled) -> None:
        """Note the outcome of a capture."""
        if compiled.program is not None:
            self._of_sizes.pop(of_sizes, None)
        elif not compiled.needing:
            _noted(self._of_sizes, of_sizes, compiled)

    def failed(self, kind: Hashable, compiled: Compiled) -> bool:
        """Note a capture in vain; whether the next one in the same state may succeed, because values differ then."""
        known = _noted(self._kinds, kind, compiled)
        return compiled.passing and known.times < LARGEST_UNUSED

    def clear(self) -> None:
        """Forget all kinds."""
        self._kinds.clear()
        self._of_sizes.clear()


def _noted(known: dict[Hashable, _Declined], key: Hashable, compiled: Compiled) -> _Declined:
    found = known[key] = known.pop(key) if key in known else _Declined(compiled)
    found.note(compiled)
    if len(known) > LARGEST_VARIANTS:
        del known[next(iter(known))]
    return found
