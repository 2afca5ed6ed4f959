"""Calls of sizes that are new to a model: whether one gets a program now, and whether the compiler may run for it.

    x [99, 7, 8]    captured and compiled                          the first sizes of a kind of call
    x [37, 4, 8]    gets the graph and the kernels of others       no capture, no compiler
    x [500, 2, 8]   eager, until eager calls took as long          a capture or the compiler may not be worth it yet

:mod:`fuse.runtime.patience` counts the seconds of captures, of the compiler and of eager calls.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from fuse.kernel.sized import lowering_for, sizes_are_symbolic
from fuse.runtime import patience, tuning
from fuse.runtime.call_keys import differ_in_numbers, key_of_value
from fuse.runtime.compiling import Compiling
from fuse.runtime.guards import integers_of, modes
from fuse.runtime.kinds_of_calls import Between
from fuse.runtime.making import Maker, ModelCall
from fuse.runtime.patience import Compilations, Ones, Patience
from fuse.runtime.rehearsing import kind, rehearse
from fuse.runtime.state_guard import StateGuard
from fuse.runtime.varying import SizesSeen


class NewSizes:
    """The sizes that calls of one model had, and what programs for them took.

    ``declared``: the dimensions that may vary, "auto", or None for none. ``state`` is the state of the model in which
    a call is made, where it has variants.
    """

    def __init__(self, maker: Maker, declared: Any) -> None:
        self._maker = maker
        self._declared = declared
        self._automatic = declared == "auto"
        self._seen = SizesSeen()
        self._patience = Patience()
        self._compilations = Compilations()
        self._integers: dict[Hashable, dict[tuple[int, ...], None]] = {}

    def lowering(self, call: ModelCall) -> AbstractContextManager[None]:
        """A context in which regions are lowered for a call: sizes that vary are arguments of its kernels."""
        if self._declared is None:
            return lowering_for(None, self._seen.remarks)
        if not self._automatic:
            rehearse(self._maker, call, self._declared, self._seen)
        return lowering_for(self._seen.varying(call.kind, call.leaves), self._seen.remarks)

    def compiling(self, call: ModelCall, state: StateGuard | None) -> Compiling:
        """Whether kernels may be compiled for the call that is lowered."""
        ones = self._ones(call)
        if not self._automatic or self._maker.frozen or tuning.enabled() or not (sizes_are_symbolic() or ones):
            return Compiling()
        return Compiling(self._compilations.allowed(self._key(call, state), ones))

    def too_early(self, call: ModelCall, state: StateGuard | None, between: Between | None) -> float | None:
        """The seconds of a program that is not worth them yet, as sizes keep changing; None if the call gets one now.

        Where sizes are declared, or declared constant, each call gets one.
        """
        if not self._automatic:
            return None
        within, beyond = between is not None and between.within, between is not None and between.beyond
        size, key = call.key, self._key(call, state)
        is_size = between is not None and between.common.checked  # integers that differ count as sizes
        if (seconds := self._compilations.price(key, size, self._ones(call))) is not None:
            return seconds
        if self._compilations.is_due(key):
            return None
        alike = (lambda _: False) if is_size else partial(differ_in_numbers, size)
        if between is not None and between.is_bounded():
            seconds = self._patience.expected(self._kind(call, True), size, True, False, alike)
            if seconds is not None or between.programs is not None:
                return seconds
        together = beyond or _learns(between)
        at = self._settled_at(call, between)
        return self._patience.expected(self._kind(call, False), size, within, together, alike, at)

    def _settled_at(self, call: ModelCall, between: Between | None) -> int:
        """How many sizes of this kind of call are captured at once, if this one is among the first."""
        if self._seen.grows(call.kind, call.leaves):
            return patience.SETTLED_GROWING
        if between is None or between.within or not between.common.checked:
            return patience.SETTLED
        alone = not between.beyond or bool(self._ones(call)) or between.kind.reaches <= 0
        return patience.SETTLED_UNLIKE if alone else patience.SETTLED

    def waits(self, call: ModelCall, state: StateGuard | None) -> float:
        """Note that a call waits for the compiler; the seconds that this would take."""
        return self._compilations.waits(self._key(call, state), call.key)

    def captured(self, call: ModelCall, seconds: float, resized: bool, cheap: bool = False) -> None:
        """Note that a call was captured, or got the graph of others (``resized``), or their program (``cheap``)."""
        self._patience.captured(self._kind(call, cheap), call.key, seconds, resized)

    def spent(self, call: ModelCall) -> float:
        """The seconds that captures of this kind of call took."""
        return self._patience.spent(self._kind(call, False))

    def compiled(self, call: ModelCall, state: StateGuard | None, how: Compiling, seconds: float) -> None:
        """Note that a program for sizes that vary was made."""
        self._compilations.made(self._key(call, state), how, seconds)

    def ran_eager(self, call: ModelCall, state: StateGuard | None, between: Between | None, seconds: float) -> None:
        """Note that a call ran eager, which waits for a capture or for the compiler."""
        beyond, learns = between is not None and between.beyond, _learns(between)
        cheap = between is not None and between.is_bounded()
        self._patience.ran_eager(self._kind(call, cheap), call.key, seconds, beyond or learns, learns)
        self._compilations.ran_eager(self._key(call, state), self._ones(call), seconds)

    def _kind(self, call: ModelCall, cheap: bool) -> Hashable:
        """Equal for calls that differ in sizes only, and whose programs have about one price."""
        return kind(self._maker, call), cheap

    def _ones(self, call: ModelCall) -> Ones:
        return self._seen.ones(call.kind, call.leaves)

    def _key(self, call: ModelCall, state: StateGuard | None) -> Hashable:
        """A key that is equal for calls that differ in sizes only, the model being in one state.

        The first values of integer arguments may stand for ways through the model; further ones count as sizes.
        """
        of, integers = kind(self._maker, call), integers_of(call.leaves)
        known = self._integers.setdefault(of, {})
        if len(known) < patience.SETTLED_NUMBERS:
            known[integers] = None
        while len(self._integers) > patience.LARGEST_CAPTURED:
            del self._integers[next(iter(self._integers))]
        apart = integers in known
        values = (key_of_value(leaf) if apart or type(leaf) is not int else int for leaf in call.leaves)
        return of, modes(), tuple(values), state


def _learns(between: Between | None) -> bool:
    """Whether a program for this size helps to make those for later sizes, so that their eager calls count, too."""
    return between is not None and between.learns()
