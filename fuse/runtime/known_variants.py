"""The variants of one model: which one serves a call, the making of further ones, and what is kept of each.

    call -> find -> a variant
             |  none
             v
            make: the generalised graph for its sizes, or capture, passes, kernels  ->  remember

Calls may come from several threads; one thread at a time makes a variant.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any

from fuse.graph.fakes.fake_operators import unlogged
from fuse.graph.garbage_collection import without_garbage_collection
from fuse.graph.numbers.learned import Learned, Learning
from fuse.kernel.sizes.sized import sizes_are_symbolic
from fuse.runtime.building.compiling import NotYet, compiling
from fuse.runtime.generalising.kinds_of_calls import Between, KindOfCalls, KindsOfCalls, numbers_of
from fuse.runtime.guards.call_guards import modes
from fuse.runtime.guards.call_keys import key_without_sizes
from fuse.runtime.guards.state_guard import StateGuard
from fuse.runtime.making import Maker, ModelCall, make, of_size
from fuse.runtime.programs.steps import Fallback
from fuse.runtime.sizes.new_sizes import NewSizes
from fuse.runtime.sizes.other_remainders import plan_other_remainders
from fuse.runtime.sizes.other_sides import compile_other_sides
from fuse.runtime.sizes.reaching import learn, reached
from fuse.runtime.variants.compiled import Compiled
from fuse.runtime.variants.in_vain import InVain
from fuse.runtime.variants.recaptured import SHAPE, why_recaptured
from fuse.runtime.variants.specialised import Family
from fuse.runtime.variants.states import (
    ModelState,
    States,
    count,
    current,
    exchanged,
    is_full,
    matching,
    with_variant,
    without,
)

_LOG = logging.getLogger("fuse")

LARGEST_CARRIED = 4
"""Variants for calls of one size that found attributes of earlier calls changed; further such calls run eager, since
a capture takes as long as many eager calls."""
LARGEST_CONTEXTS = 8
"""Variants of one call for other values of context variables, such as settings that a server has for each request;
further such calls run eager, for the same reason."""

Found = tuple[Compiled, tuple[Any, ...]]
"""A variant, and the tensors of a call that it is given."""


class KnownVariants:
    """The variants of one model; ``states`` has them by the state of the model that they were made for."""

    def __init__(self, maker: Maker, dynamic_shapes: Any) -> None:
        self.maker = maker
        self.states: States = ()
        self.in_vain = InVain()
        self.new_sizes = NewSizes(maker, dynamic_shapes)
        self._kinds = KindsOfCalls()
        self._variable = 0
        self._generalises = dynamic_shapes is not None and not maker.frozen

    # ---- finding -----------------------------------------------------------------------------------------------------

    def find(self, leaves: Sequence[Any], spec: Any) -> Found | None:
        """The variant for a call, or the first of several specialisations; None if there is none."""
        return next(matching(self.states, leaves, spec, modes()), None)

    def alike(self, first: Found, call: ModelCall) -> list[Found]:
        """The specialisations for a call, the most recent first; before others those whose loops may end earlier."""
        matches = matching(self.states, call.leaves, call.spec, modes())
        found = [pair for pair in matches if pair[0].family is first[0].family]
        return sorted(found, key=lambda pair: pair[0].ending is None)

    def guards(self) -> list[StateGuard]:
        """The guards that hold in the model's state, which have variants."""
        return [state.guard for state in self.states if state.guard.holds()]

    def held(self) -> StateGuard | None:
        """The first of these guards, if there is one."""
        return next(iter(self.guards()), None)

    def kind_of(self, call: ModelCall, held: Sequence[StateGuard]) -> KindOfCalls | None:
        """The captured calls that differ from a call in sizes only; None if there are none."""
        if not self._generalises:
            return None
        return self._kinds.find(held, call.leaves, call.spec, modes())

    def between(self, call: ModelCall, kind: KindOfCalls | None, refuted: Collection[Learning] = ()) -> Between | None:
        """The generalised graph for a call's sizes, which reads other values than ``refuted`` ones; None if there is
        none."""
        if kind is None:
            return None
        given = numbers_of(call.leaves)
        with self.maker.lock:
            return kind.between(given, lambda one: one.told(self.maker.model, call.args, call.kwargs), refuted)

    def kind(self, call: ModelCall) -> Hashable:
        """Equal for calls that differ in the contents of tensors only."""
        return call.key, modes(), self.maker.model.training

    def of_sizes(self, call: ModelCall) -> Hashable:
        """Equal for calls that differ in sizes, numbers and the contents of tensors only."""
        return key_without_sizes(call.leaves, call.spec), modes(), self.maker.model.training

    def never_settles(self, call: ModelCall) -> Fallback | None:
        """Why a call is not compiled once more: what earlier ones left behind or found was different each time."""
        matches = matching(self.states, call.leaves, call.spec, modes(), in_context=False)
        others = [compiled.guard for compiled, _ in matches if compiled.guard.context]
        if len(others) >= LARGEST_CONTEXTS:
            names = ", ".join(variable.name for variable, _ in others[0].context)
            reason = f"forward reads context variables whose values differ from call to call ({names})"
            return Fallback(self.maker.name, "", reason)
        kept = self.maker.kept
        if not kept:
            return None
        alike = [
            c for s in self.states if s.guard.holds() for c in s.variants if c.carried and c.carried.call == call.key
        ]
        if len(alike) < LARGEST_CARRIED:
            return None
        reason = f"forward reads attributes that it assigns to another value in each call ({', '.join(map(str, kept))})"
        return Fallback(self.maker.name, "", reason)

    # ---- making ------------------------------------------------------------------------------------------------------

    def make(self, call: ModelCall, between: Between | None, searched: States) -> tuple[Found, bool]:
        """A variant for a call, for which there was none when the states were ``searched``; whether it is new, and not
        of another thread."""
        with self.maker.lock, without_garbage_collection():
            if self.states is not searched and (found := self.find(call.leaves, call.spec)) is not None:
                return found, False
            if between and not self._follows(call, between):
                between = None
            compiled = self._made(call, between)
            return (compiled, given(compiled, call)), True

    def _follows(self, call: ModelCall, between: Between) -> bool:
        return between.within and between.follow(self.maker.model, call.args, call.kwargs)

    def unlike(self, first: Found, call: ModelCall, further: bool = False) -> Between | None:
        """The generalised graph of calls that read other values than those for which ``first`` was found; None if there
        is none. ``further``: after captures further out, if the sizes of the call are beyond those of such calls."""
        with self.maker.lock:
            known = self.alike(first, call)
            refuted = [compiled.learning for compiled, _ in known if compiled.learning is not None]
            between = self.between(call, self.kind_of(call, self.guards()), refuted)
            if further and between is not None and not between.within:
                between = reached(self.maker, self.new_sizes, call, between, refuted)
            return between

    def resize(self, first: Found, call: ModelCall, between: Between | None) -> bool:
        """Make a further specialisation of a call for which ``first`` was found, from graphs of other sizes that read
        other values than known ones; False if there are no such graphs.

        Raises:
            NotYet: kernels would have to be compiled, which is not worth it yet.
        """
        with self.maker.lock, without_garbage_collection():
            if between is None or not self._follows(call, between):
                return False
            known = self.alike(first, call)
            self._made(call, between, first[0].family)
            return len(self.alike(first, call)) > len(known)  # a program that reads nothing is none of them

    def _made(self, call: ModelCall, between: Between | None, family: Family[Compiled] | None = None) -> Compiled:
        """A new variant, remembered unless it serves this call only; ``family`` is that of other specialisations."""
        started = time.perf_counter()
        with unlogged(), self.new_sizes.lowering(call):
            how = self.new_sizes.compiling(call, self.held())
            sized = self._of_size(call, between, family) if between else None
            varying = self.new_sizes.varying(call, self.held()) if sized is None else []
            if varying:
                kind = self.kind_of(call, self.guards())
                plan_other_remainders(self.maker, self.new_sizes, call, kind, varying)
            try:
                with compiling(how):
                    resized = between.captured() if between and sized is None else None
                    why = self._why(call) if sized is None and resized is None else ""
                    compiled = sized or make(self.maker, call, family, resized=resized)
                    compiled = replace(compiled, recaptured=why) if why and compiled.program else compiled
                    if not how.allowed and compiled.training is not None:
                        compiled.training.wait()
            except NotYet:
                self.new_sizes.captured(call, time.perf_counter() - started, between is not None)
                raise
            of_many = sizes_are_symbolic()
        seconds = time.perf_counter() - started
        if varying:
            with unlogged():
                compile_other_sides(self.maker, self.new_sizes, call, varying)
        if between is not None and sized is None:
            learn(self.new_sizes, call, between, compiled)
        if compiled.program is not None and sized is None:
            self.new_sizes.captured(call, seconds, compiled.resized, training=compiled.training)
        self.in_vain.made(self.of_sizes(call), compiled)
        if not (compiled.once or (compiled.program is None and self.in_vain.failed(self.kind(call), compiled))):
            state = self._remember(compiled)
            if of_many:
                self.new_sizes.compiled(call, self.held(), how, seconds)
            if not self.maker.frozen and sized is None:
                self._kinds.add(state.guard, compiled, call.leaves, self.maker.model, self.maker.ids())
        return compiled

    def _of_size(self, call: ModelCall, between: Between, family: Family[Compiled] | None) -> Compiled | None:
        """The variant of a program without a graph; None if there is no such program."""
        try:
            if (sized := between.program()) is None:
                return None
            origins = between.common.origins(sized.signature.inputs, self.maker.model, len(call.leaves))
            return of_size(self.maker, call, sized, origins, between.kind.tensors, family)
        except Exception:  # a fault in fuse must not reach the user
            between.common.programs.give_up()
            return None

    def _why(self, call: ModelCall) -> str:
        """Why a call is captured, of which a message tells whoever asked for such; empty for a first call."""
        try:
            why = why_recaptured(self.states, self.maker.model, call.args, call.kwargs, call.leaves, call.spec)
        except Exception:  # the user's objects have no names, or a fault in fuse, which must not reach the user
            return ""
        kind = self.kind_of(call, self.guards()) if SHAPE in why else None
        if kind is not None and kind.unlike:
            why = f"{why}; graphs of other sizes do not serve it: {kind.unlike}"
        return self._told(why)

    def _told(self, why: str) -> str:
        if why:
            _LOG.info("%s is captured again: %s", self.maker.name, why)
        return why

    def specialise(self, first: Found, call: ModelCall, missed: Learned | None) -> Compiled:
        """A further specialisation, for the values of a call for which ``first`` was found; ``missed``: one of the
        values that differ from those of others."""
        family = first[0].family
        assert family is not None
        with self.maker.lock, without_garbage_collection(), self.new_sizes.lowering(call):
            known = [pair[0] for pair in self.alike(first, call)]
            started = time.perf_counter()
            made = make(self.maker, call, family, known)
            if made in known:
                family.joined()
            elif made.program is not None:
                where = f" at {missed.source}" if missed and missed.source else ""
                made = replace(made, recaptured=self._told(f"a value that forward reads{where} is another one"))
                state = self._replace(made, known)
                self.new_sizes.captured(call, time.perf_counter() - started, False, training=made.training)
                if not self.maker.frozen:
                    self._kinds.add(state.guard, made, call.leaves, self.maker.model, self.maker.ids())
        return made

    # ---- keeping -----------------------------------------------------------------------------------------------------

    def _remember(self, compiled: Compiled) -> ModelState:
        if len(self.maker.variable) > self._variable:  # earlier variants have them as constants
            self._variable = len(self.maker.variable)
            self.states = ()
        state = current(self.states, compiled)
        if state is None:
            state = ModelState(StateGuard(self.maker.model, not self.maker.frozen, compiled.unwatched))
        captured = compiled.graph is not None and not compiled.resized
        if is_full(state) and (captured or compiled.program is None):
            self.maker.warn(
                f"{self.maker.name} was called with more than {count(state)} different input signatures; "
                "the oldest are forgotten and compiled again when they return: pad or bucket the inputs"
            )
        self.states = with_variant(self.states, state, compiled)
        return state

    def _replace(self, compiled: Compiled, alike: Sequence[Compiled]) -> ModelState:
        """Remember ``compiled`` instead of those whose calls it serves: its loop takes more steps."""
        assert compiled.family is not None
        shorter = [c for c in alike if c.ending and compiled.ending and compiled.ending.includes(c.ending)]
        for one in shorter:
            assert one.confirmation is not None
            assert compiled.confirmation is not None
            compiled.confirmation.serve(one.confirmation.served)
        if shorter:
            self.states = without(self.states, shorter)
            compiled.family.joined(len(shorter))
        return self._remember(compiled)

    def give_up(self, compiled: Compiled, reason: Fallback) -> Fallback:
        """Let the calls that ``compiled`` served run eager from now on, for ``reason``."""
        with self.maker.lock:
            self.states = exchanged(self.states, compiled, Compiled(compiled.guard, None, reason=reason))
        return reason

    def forget(self) -> None:
        """Make every variant anew when it is next needed."""
        self.states = ()
        self.in_vain.clear()


def given(compiled: Compiled, call: ModelCall) -> tuple[Any, ...]:
    """The tensors that a variant is given in the call that it was made for."""
    leaves = compiled.carried.extend(call.leaves, call.spec)[0] if compiled.carried else call.leaves
    return compiled.guard.pick((*leaves, *compiled.guard.state))
