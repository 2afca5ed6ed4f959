"""Calls of sizes that are new to a model: whether one gets a program now, and whether the compiler may run for it.

    x [99, 7, 8]    captured and compiled                          the first sizes of a kind of call
    x [37, 4, 8]    gets the graph and the kernels of others       no capture, no compiler
    x [500, 2, 8]   eager, until eager calls took as long          a capture or the compiler may not be worth it yet

:mod:`fuse.runtime.sizes.patience` counts the seconds of captures, of the compiler and of eager calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

from fuse.kernel.sizes.sized import keep_what_varies, lowering_for, sizes_are_symbolic
from fuse.runtime.autograd.training import Training
from fuse.runtime.building import tuning
from fuse.runtime.building.compiling import Compiling
from fuse.runtime.generalising.kinds_of_calls import Between
from fuse.runtime.guards.call_guards import integers_of, modes
from fuse.runtime.guards.call_keys import Key, differ_in_numbers, key_of_value, shapes_of
from fuse.runtime.guards.state_guard import StateGuard
from fuse.runtime.making import Maker, ModelCall
from fuse.runtime.sizes import patience
from fuse.runtime.sizes.patience import Compilations, Ones, Patience
from fuse.runtime.sizes.rehearsing import Kind, kind, rehearse
from fuse.runtime.sizes.varying import SizesSeen, VaryingSize

STEP = 2.0
"""Eager forward passes that a training step takes at least. A call's backward pass runs after it, unwatched."""


@dataclass(frozen=True)
class Way:
    """A way of calling a model: what more than sizes tells apart.

    ``of_sizes`` is the call's own kind. ``kind`` is equal for calls that differ in sizes only. ``key`` is equal for
    such calls in one state of the model. The first values of integer arguments may stand for ways through the model, so
    that they are in ``key``; further ones count as sizes.
    """

    of_sizes: Key
    kind: Kind
    key: Hashable

    def counted(self, seconds: float) -> float:
        """The seconds of an eager call, as they compare with those of making a program, and a backward program where
        autograd records the call."""
        _, recorded, _ = self.kind
        return seconds * STEP if recorded else seconds


@dataclass(frozen=True)
class _Trained:
    """A call of a new size in training, and the seconds that it took without backward programs that are made later."""

    training: ref[Training]
    kind: Hashable
    size: Key
    seconds: float
    resized: bool


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
        self._trained: deque[_Trained] = deque(maxlen=patience.SETTLED)
        self._backward: dict[Hashable, float] = {}

    def lowering(self, call: ModelCall) -> AbstractContextManager[None]:
        """A context in which regions are lowered for a call: sizes that vary are arguments of its kernels."""
        if self._declared is None:
            return lowering_for(None, self._seen.remarks)
        if not self._automatic:
            rehearse(self._maker, call, self._declared, self._seen)
        return lowering_for(self._seen.varying(call.kind, call.leaves), self._seen.remarks)

    def keep_what_varies(self) -> None:
        """Let passes keep operators that do nothing at some sizes."""
        keep_what_varies(self._seen.remarks)

    def planning(self) -> AbstractContextManager[None]:
        """A context in which a made-up call is planned: sizes vary, and no kernel is made for it."""
        return lowering_for(frozenset(), self._seen.remarks)

    def compiling(self, call: ModelCall, state: StateGuard | None) -> Compiling:
        """Whether kernels may be compiled for the call that is lowered."""
        ones = self._ones(call)
        if not self._automatic or self._maker.frozen or tuning.enabled() or not (sizes_are_symbolic() or ones):
            return Compiling()
        return Compiling(self._compilations.allowed(self.way(call, state).key, ones))

    def varying(self, call: ModelCall, state: StateGuard | None) -> list[VaryingSize]:
        """The sizes that vary of the call that is lowered, if its program is the first for all sizes; else none."""
        first = self._automatic and sizes_are_symbolic() and not self._compilations.made_any(self.way(call, state).key)
        return self._seen.sizes(call.kind, call.leaves) if first else []

    def too_early(self, call: ModelCall, way: Way, between: Between | None) -> float | None:
        """The seconds of a program that is not worth them yet, as sizes keep changing; None if the call gets one now.

        Where sizes are declared, or declared constant, each call gets one.
        """
        if not self._automatic:
            return None
        within, beyond = between is not None and between.within, between is not None and between.beyond
        is_size = between is not None and between.common.checked  # integers that differ count as sizes
        if self._compilations.waited_for(way.key):
            if (seconds := self._compilations.price(way.key, call.key, self._ones(call))) is not None:
                return seconds
            if self._compilations.is_due(way.key):
                return None
        alike = (lambda _: False) if is_size else partial(differ_in_numbers, call.key)
        if between is not None and between.is_bounded():
            seconds = self._patience.expected((way.kind, True), call.key, True, False, alike)
            if seconds is not None or between.programs is not None:
                return seconds
        together = beyond or _learns(between)
        settled_at = partial(self._settled_at, call, way, between)
        return self._patience.expected((way.kind, False), call.key, within, together, alike, settled_at)

    def _settled_at(self, call: ModelCall, way: Way, between: Between | None) -> int:
        """How many sizes of this kind of call are captured at once, if this one is among the first: beyond the captured
        ones, where eager calls of all sizes count together, none once as many got the program of others."""
        if self._seen.grows(call.kind, call.leaves):
            return patience.SETTLED_GROWING
        if between is None or between.within or not between.common.checked:
            return patience.SETTLED
        alone = not between.beyond or bool(self._ones(call)) or between.kind.reaches <= 0
        if alone:
            return patience.SETTLED_UNLIKE
        return 0 if self._patience.resized((way.kind, True)) >= patience.SETTLED else patience.SETTLED

    def waits(self, call: ModelCall, way: Way) -> float:
        """Note that a call waits for the compiler; the seconds that this would take."""
        return self._compilations.waits(way.key, call.key)

    def captured(
        self, call: ModelCall, seconds: float, resized: bool, cheap: bool = False, training: Training | None = None
    ) -> None:
        """Note that a call was captured, or got the graph of others (``resized``), or their program (``cheap``).

        For a loss that was not expected, ``training`` makes its backward program later, whose seconds count as well.
        """
        kind = self._kind(call, cheap)
        self._count_backward()
        self._patience.captured(kind, call.key, seconds + self._backward.get(kind, 0.0), resized)
        if training is not None:
            self._trained.append(_Trained(ref(training), kind, call.key, seconds, resized))

    def made_up(self, call: ModelCall, seconds: float) -> None:
        """Note that a made-up call was captured, which extends the range of its kind."""
        self._patience.made_up(self._kind(call, False), seconds)

    def _count_backward(self) -> None:
        """Add the seconds of backward programs that were made after their calls to the price of these."""
        for one in tuple(self._trained):
            training = one.training()
            if training is not None and not training.making:
                continue
            self._trained.remove(one)
            if training is not None:
                self._backward[one.kind] = training.making
                self._patience.captured(one.kind, one.size, one.seconds + training.making, one.resized)

    def spent(self, call: ModelCall) -> float:
        """The seconds that captures of this kind of call took."""
        return self._patience.spent(self._kind(call, False))

    def compiled(self, call: ModelCall, state: StateGuard | None, how: Compiling, seconds: float) -> None:
        """Note that a program for sizes that vary was made."""
        self._compilations.made(self.way(call, state).key, how, seconds)

    def ran_eager(self, call: ModelCall, way: Way, between: Between | None, seconds: float) -> None:
        """Note that a call ran eager, which waits for a capture or for the compiler."""
        seconds = way.counted(seconds)
        beyond, learns = between is not None and between.beyond, _learns(between)
        cheap = between is not None and between.is_bounded()
        self._patience.ran_eager((way.kind, cheap), call.key, seconds, beyond or learns, learns)
        if self._compilations.waited_for(way.key):
            self._compilations.ran_eager(way.key, self._ones(call), seconds)

    def ran_unlike(self, way: Way, size: Key, seconds: float) -> bool:
        """Note that calls of this size, which has no graph of others, ran eager for so long; whether a further one
        waits as well."""
        seconds = way.counted(seconds)
        kind_of = way.kind, False
        self._patience.ran_eager(kind_of, size, seconds)
        waits = self._patience.expected(kind_of, size) is not None
        if self._compilations.waited_for(way.key):
            ones = self._seen.ones(way.of_sizes, shapes_of(size))
            self._compilations.ran_eager(way.key, ones, seconds)
            waits = waits or self._compilations.price(way.key, size, ones) is not None
            waits = waits and not self._compilations.is_due(way.key)
        return waits

    def settled(self, way: Way) -> Iterable[Key]:
        """The sizes of captured calls, if no further size is captured at once; else none."""
        return self._patience.sizes((way.kind, False))

    def _kind(self, call: ModelCall, cheap: bool) -> Hashable:
        """Equal for calls that differ in sizes only, and whose programs have about one price."""
        return kind(self._maker, call), cheap

    def _ones(self, call: ModelCall) -> Ones:
        return self._seen.ones(call.kind, shapes_of(call.key))

    def way(self, call: ModelCall, state: StateGuard | None) -> Way:
        """The way of calling the model that a call takes, in this state of the model."""
        of, integers = kind(self._maker, call), integers_of(call.leaves)
        known = self._integers.setdefault(of, {})
        if len(known) < patience.SETTLED_NUMBERS:
            known[integers] = None
        while len(self._integers) > patience.LARGEST_CAPTURED:
            del self._integers[next(iter(self._integers))]
        apart = integers in known
        values = (key_of_value(leaf) if apart or type(leaf) is not int else int for leaf in call.leaves)
        return Way(call.kind, of, Key(of, modes(), tuple(values), state))


def _learns(between: Between | None) -> bool:
    """Whether a program for this size helps to make those for later sizes, so that their eager calls count, too."""
    return between is not None and between.learns()
