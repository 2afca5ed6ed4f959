"""One model's compiled variants: find the one that serves a call, or make it, or run the call as eager would.

    call -> state guard -> call guard -> program -> reconstruction
               |  no match
               v
            capture -> passes -> program        what cannot be captured or built runs eager, with one warning

A call whose sizes lie between captured ones needs no capture (:mod:`fuse.runtime.generalised`).
:mod:`fuse.runtime.making` makes variants, :mod:`fuse.runtime.states` keeps them. A program that was specialised on
values confirms them before anything of it is seen; several are kept (:mod:`fuse.runtime.specialised`).

Calls may come from several threads. One thread at a time makes a variant, and capture's fake tensors are seen by that
thread only; compiled and eager calls need no lock.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fuse.graph.drawn_numbers import put_back
from fuse.graph.fakes import unlogged
from fuse.graph.garbage_collection import without_garbage_collection
from fuse.graph.learned import Learned, Learning
from fuse.graph.locks import ForkedLock
from fuse.kernel.sized import sizes_are_symbolic
from fuse.runtime.autograd_node import RaisedByHook, Ran
from fuse.runtime.call_keys import key_of_call, key_without_sizes
from fuse.runtime.compiling import NotYet, compiling
from fuse.runtime.declared import check_declaration
from fuse.runtime.differentiable import TWICE
from fuse.runtime.drawing import LARGEST_APART, fewest_apart
from fuse.runtime.guards import CallGuard, flatten, function_modes, modes, overlaps
from fuse.runtime.in_vain import InVain, without_numbers
from fuse.runtime.kinds_of_calls import Between, KindOfCalls, KindsOfCalls, numbers_of
from fuse.runtime.making import Maker, ModelCall, make, of_size
from fuse.runtime.methods import Method, Methods
from fuse.runtime.new_sizes import NewSizes, Way
from fuse.runtime.other_sides import compile_other_sides
from fuse.runtime.parts import LazyRun, Parts
from fuse.runtime.predicted import KernelFailed, Mispredicted
from fuse.runtime.reaching import learn, reached
from fuse.runtime.refusals import (
    ANOMALIES,
    active_modes,
    anomalies_sought,
    dispatch_modes,
    refused_call,
    refused_model,
)
from fuse.runtime.specialised import Missed
from fuse.runtime.state_guard import StateGuard
from fuse.runtime.states import (
    LARGEST_VARIANTS,
    ModelState,
    States,
    current,
    exchanged,
    is_full,
    matching,
    with_variant,
    without,
)
from fuse.runtime.steps import Fallback, Launches
from fuse.runtime.usual import Usual, usual
from fuse.runtime.variants import Compiled, LastRun, counted, together
from fuse.runtime.waiting import Size, Waiting, waiting

LARGEST_CARRIED = 4
"""Variants for calls of one size that found attributes of earlier calls changed; further such calls run eager, since
a capture takes as long as many eager calls."""
LARGEST_CONTEXTS = 8
"""Variants of one call for other values of context variables, such as settings that a server has for each request;
further such calls run eager, for the same reason."""

Observed = tuple[Launches | int, Compiled, Ran | None] | LastRun | tuple[Fallback, tuple[LazyRun, ...]]
"""The run of a call: a program, an unobserved call, or the parts of a call that ran eager."""

Found = tuple[Compiled, tuple[Any, ...]]
"""A variant, and the tensors of a call that it is given."""


class Engine:
    """The variants of one model, and what the last call did."""

    def __init__(
        self,
        model: nn.Module,
        freeze: bool,
        passes: Sequence[str] | None,
        fuel: int | None = None,
        dynamic_shapes: Any = "auto",
        quiet: bool = False,
    ) -> None:
        check_declaration(model, dynamic_shapes)
        self.model = model
        self.freeze = freeze
        self.passes = passes
        self.fuel = fuel
        self.dynamic_shapes = dynamic_shapes
        self._states: States = ()
        self._in_vain = InVain()
        self._lock = ForkedLock()
        self._maker = Maker(model, freeze, passes, fuel, self._lock, quiet=quiet)
        self._parts = Parts(model, self._of_part, self._lock)
        self._methods = Methods(model, self.call, None if freeze else self._parts, self._observe_method, self._lock)
        self._new_sizes = NewSizes(self._maker, dynamic_shapes)
        self._kinds = KindsOfCalls()
        self._observed: Observed | None = None
        self._found: Compiled | None = None
        self._usual: Usual | None = None
        self._waiting: Waiting | None = None

    # ---- serving ---------------------------------------------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of ``model(*args, **kwargs)``."""
        active = function_modes() or dispatch_modes()
        if active and (reason := active_modes()) is not None:
            return self.eager(args, kwargs, reason)
        likely = self._usual
        if likely is not None and likely.states is self._states:
            tensors = likely.tensors(args, kwargs)
            if tensors is not None:
                return self._served(likely.compiled, tensors, args, kwargs)
        waits = self._waiting
        if waits is not None and waits.left > 0 and waits.states is self._states and not active:
            size = waits.size(args, kwargs)
            if size is not None:
                started = time.perf_counter()
                result = self.model(*args, **kwargs)
                waits.ran(size, time.perf_counter() - started)
                self._observed = waits.run
                return result
        leaves, spec = flatten(args, kwargs)
        searched = self._states
        found = next(matching(searched, leaves, spec, modes()), None)
        if found is not None and found[0].family is None:
            self._note(found[0])
            return self._served(*found, args, kwargs)
        call = ModelCall(args, kwargs, leaves, spec)
        if found is None:
            if any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack()):
                return self.model(*args, **kwargs)  # part of what is being captured
            held = self._guards()
            if reason := refused_call(leaves) or self._refused_model(held) or self._never_settles(call):
                return self.eager(args, kwargs, reason)
            if (declined := self._in_vain.instead(self._kind(call), self._of_sizes(call))) is not None:
                return self._served(declined, (), args, kwargs)
            kind, way = self._kind_of(call, held), self._new_sizes.way(call, next(iter(held), None))
            between, apart = self._between(call, kind), self._settled()
            started = time.perf_counter()
            seconds = self._new_sizes.too_early(call, way, between)
            if seconds is None and between is not None and not between.within:
                with self._lock:
                    between = reached(self._maker, self._new_sizes, call, between)
                seconds = self._new_sizes.too_early(call, way, between)
            if seconds is not None:
                result = self._not_yet(call, way, between, seconds)
                if held and not (kind is not None and kind.compares()):
                    self._wait(call, way, held[0], apart, seconds)
                return result
            try:
                found, is_new = self._make(call, between, searched)
            except NotYet:
                way = self._new_sizes.way(call, self._held())
                return self._not_yet(call, way, between, self._new_sizes.waits(call, way))
            if found[0].family is None:
                result = self._served(*found, args, kwargs)
                if is_new and found[0].is_sized():  # compared with an eager call, and so with the run
                    with self._lock:
                        self._new_sizes.captured(call, time.perf_counter() - started, True, cheap=True)
                return result
            try:
                if is_new:
                    return self._new(found[0], call)
            except Missed as miss:
                return self.eager(args, kwargs, found[0].family.in_vain(self._maker.name, miss.learned))
        return self._specialised(found, call)

    def _note(self, compiled: Compiled) -> None:
        """Note which variant was found for a call: found twice, it is asked first."""
        self._usual = usual(self._states, compiled) if compiled is self._found else None
        self._found = compiled

    def _served(
        self, compiled: Compiled, tensors: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a call for which ``compiled`` was found.

        Raises:
            Missed: it is a specialisation that does not serve this call.
        """
        if compiled.program is None or compiled.rebuild is None:
            if compiled.needing:
                leaves, _ = flatten(args, kwargs)
                for position in compiled.needing:
                    leaves[position].requires_grad_()
                return self.call(args, kwargs)
            if compiled.in_parts:
                return self._in_parts(args, kwargs, compiled.reason, compiled)
            return self.eager(args, kwargs, compiled.reason, warn=not compiled.once)
        if compiled.inference and not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self._served(compiled, tensors, args, kwargs)
        if compiled.written and overlaps(tensors, compiled.written):
            reason = Fallback("", "", "an input that is written shares memory with another input")
            return self.eager(args, kwargs, reason)
        containers = compiled.carried.given(args, kwargs) if compiled.carried else ()
        if containers is None:
            twice = "forward changes an argument that occurs twice in the call, or that the model holds, too"
            return self.eager(args, kwargs, Fallback(self._maker.name, "", twice))
        if compiled.training is not None:
            if compiled.training.twice:
                return self.eager(args, kwargs, self._give_up(compiled, Fallback(self._maker.name, "", TWICE)))
            if anomalies_sought():
                return self.eager(args, kwargs, ANOMALIES)
        generator = torch.get_rng_state() if compiled.program.draws else None
        drawn: list[tuple[Any, Any]] = []
        try:
            if compiled.drawing is not None:
                tensors, drawn = compiled.drawing.begin(tensors)
            if compiled.training is not None:
                result, launches, ran = compiled.training.run(tensors, containers)
            else:
                values, launches = compiled.program.run(tensors)
                if compiled.effects is not None:
                    compiled.effects(tensors)
                if compiled.confirmation is not None:
                    launches = compiled.confirmation.launched(values, launches)
                result, ran = compiled.rebuild(values, (*tensors, *containers)), None
        except RaisedByHook as raised_by_hook:  # the user's: eager would call it, too
            raise raised_by_hook.error from raised_by_hook.error.__cause__
        except Exception as error:  # nothing was written: writes to inputs are a program's last steps
            if generator is not None:
                torch.set_rng_state(generator)
            put_back(drawn)
            if isinstance(error, Mispredicted) and (miss := _another_size(error, compiled.learning)):
                raise miss from error
            if isinstance(error, Missed):
                raise
            if compiled.family is not None and not isinstance(error, Mispredicted):
                raise Missed(None) from error  # it may have been raised because the values are others
            raised = error
        else:
            self._observed = (launches, compiled, ran)
            if compiled.learning is not None:
                _, result = result
            return compiled.carried.assign(result, containers, tensors) if compiled.carried else result
        return self.eager(
            args, kwargs, self._instead(compiled, raised)
        )  # which raises eager's own error, or catches it

    def _instead(self, compiled: Compiled, error: Exception) -> Fallback:
        """Why a call runs eager in which a program raised ``error``, if eager does not raise."""
        if isinstance(error, Mispredicted):
            return self._give_up(compiled, Fallback(error.op, error.source, str(error)))
        if isinstance(error, KernelFailed):
            return Fallback(self._maker.name, "", str(error))
        message = without_numbers(str(error).partition("\n")[0])  # which matrix it was is no reason to warn again
        return Fallback(self._maker.name, "", f"an operator raised {type(error).__name__}: {message}")

    def method(self, value: Any) -> Any:
        """An attribute of the model; if it is a method, one in which the modules that it calls run fused."""
        return Method(value, self._call_method) if self._methods.serves(value) else value

    def _call_method(self, method: MethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = flatten(args, kwargs)
        return self._methods.call(method, args, kwargs, (key_of_call(leaves, spec), modes(), self.model.training))

    def _observe_method(self, name: str, runs: tuple[LazyRun, ...]) -> None:
        reason = f"{name} is a method: the modules that it calls run fused, the code between them eager"
        self._observed = Fallback(self._maker.name, "", reason), runs

    def last_run(self) -> LastRun | None:
        """The run of the last finished call, or None before the first."""
        return None if self._observed is None else _last_run(self._observed)

    def observed(self) -> LazyRun:
        """The run of the last call, read later."""
        return partial(_last_run, LastRun() if self._observed is None else self._observed)

    @property
    def fills(self) -> bool:
        """Whether the last call ran eager because it changed something that the next such call may leave alone."""
        return isinstance(self._observed, LastRun) and self._observed.fallbacks == self._maker.filling

    def latest(self) -> Compiled | None:
        """The variant that served the last call."""
        observed = self._observed
        return observed[1] if isinstance(observed, tuple) and isinstance(observed[1], Compiled) else None

    def forget(self) -> None:
        """Make every variant anew when it is next needed."""
        self._states, self._found, self._usual, self._waiting = (), None, None, None
        self._in_vain.clear()

    # ---- choosing among specialisations ----------------------------------------------------------------------------

    def _specialised(self, first: Found, call: ModelCall) -> Any:
        """The result of a call, for which ``first`` was found, from the specialisation that its values confirm; a new
        one if need be."""
        family = first[0].family
        assert family is not None
        if family.reason is not None:
            if not self.freeze:
                return self._in_parts(call.args, call.kwargs, family.reason, family)
            return self.eager(call.args, call.kwargs, family.reason)
        missed: Learned | None = None
        values: dict[int, object] = {}
        tried: set[Compiled] = set()
        for compiled, tensors in self._members(first, call):
            tried.add(compiled)
            if values and compiled.excludes(values):
                continue
            try:
                result = self._served(compiled, tensors, call.args, call.kwargs)
            except Missed as miss:
                missed = missed or miss.learned
                values.update(miss.values)
                continue
            family.served(compiled)
            return result
        with self._lock:
            alike = self._alike(first, call)
        if not tried.issuperset(compiled for compiled, _ in alike):  # another thread has made one meanwhile
            return self._specialised(first, call)
        if fewest_apart([compiled.drawing for compiled, _ in alike], values) > LARGEST_APART:
            return self.eager(call.args, call.kwargs, family.in_vain(self._maker.name, missed, ends=True))
        numbers = [len(c.confirmation.served) for c, _ in alike if c.confirmation]
        self._maker.converts |= missed is not None and missed.guard == "number"
        if max(numbers, default=0) < LARGEST_VARIANTS and family.grows():
            with self._lock, without_garbage_collection(), self._new_sizes.lowering(call):
                known = [pair[0] for pair in self._alike(first, call)]
                made = make(self._maker, call, family, known)
                if made in known:
                    family.joined()
                elif made.program is not None:
                    self._replace(made, known)
            if made.program is None:
                return self.eager(call.args, call.kwargs, made.reason)
            try:
                return self._new(made, call)
            except Missed as miss:  # fused and eager operators differ in what they round
                missed = missed or miss.learned
        return self.eager(call.args, call.kwargs, family.in_vain(self._maker.name, missed))

    def _members(self, first: Found, call: ModelCall) -> Iterator[Found]:
        """The specialisations that may serve a call for which ``first`` was found, the likely one first."""
        family = first[0].family
        assert family is not None
        begins = family.likely() in (None, first[0]) and not family.wavers()
        if begins:
            yield first
        alike = self._alike(first, call)
        tells = bool(alike) and alike[0][0].ending is not None  # its loop says how many steps the call takes
        for pair in alike if tells and family.wavers() else family.ordered(alike, lambda pair: pair[0]):
            if not begins or pair[0] is not first[0]:
                yield pair

    def _alike(self, first: Found, call: ModelCall) -> list[Found]:
        """The specialisations for a call, the most recent first; before others those whose loops may end earlier."""
        matches = matching(self._states, call.leaves, call.spec, modes())
        found = [pair for pair in matches if pair[0].family is first[0].family]
        return sorted(found, key=lambda pair: pair[0].ending is None)

    def _new(self, compiled: Compiled, call: ModelCall) -> Any:
        """The result of the call that a specialisation was made for."""
        result = self._served(compiled, _given(compiled, call), call.args, call.kwargs)
        if compiled.family is not None:
            compiled.family.served(compiled, again=False)
        return result

    def _replace(self, compiled: Compiled, alike: Sequence[Compiled]) -> None:
        """Remember ``compiled`` instead of those whose calls it serves: its loop takes more steps."""
        assert compiled.family is not None
        shorter = [c for c in alike if c.ending and compiled.ending and compiled.ending.includes(c.ending)]
        for one in shorter:
            assert one.confirmation is not None
            assert compiled.confirmation is not None
            compiled.confirmation.serve(one.confirmation.served)
        if shorter:
            self._states = without(self._states, shorter)
            compiled.family.joined(len(shorter))
        self._remember(compiled)

    # ---- making ----------------------------------------------------------------------------------------------------

    def _kind_of(self, call: ModelCall, held: Sequence[StateGuard]) -> KindOfCalls | None:
        """The captured calls that differ from a call in sizes only; None if there are none."""
        if self.dynamic_shapes is None or self.freeze:
            return None
        return self._kinds.find(held, call.leaves, call.spec, modes())

    def _between(self, call: ModelCall, kind: KindOfCalls | None) -> Between | None:
        """The generalised graph for a call's sizes; None if there is none."""
        if kind is None:
            return None
        with self._lock:
            return kind.between(numbers_of(call.leaves), lambda one: one.told(self.model, call.args, call.kwargs))

    def _make(self, call: ModelCall, between: Between | None, searched: States) -> tuple[Found, bool]:
        """A variant for a call, for which there was none when the states were ``searched``; whether it is new, and not
        of another thread."""
        with self._lock:
            changed = self._states is not searched
            found = next(matching(self._states, call.leaves, call.spec, modes()), None) if changed else None
            is_new = found is None
            if found is None:
                if between is not None and not (between.within and between.follow(self.model, call.args, call.kwargs)):
                    between = None
                started = time.perf_counter()
                with without_garbage_collection(), unlogged(), self._new_sizes.lowering(call):
                    how = self._new_sizes.compiling(call, self._held())
                    sized = self._of_size(call, between) if between else None
                    varying = self._new_sizes.varying(call, self._held()) if sized is None else []
                    try:
                        with compiling(how):
                            resized = between.captured() if between and sized is None else None
                            compiled = sized or make(self._maker, call, resized=resized)
                            if not how.allowed and compiled.training is not None:
                                compiled.training.wait()
                    except NotYet:
                        self._new_sizes.captured(call, time.perf_counter() - started, between is not None)
                        raise
                    of_many = sizes_are_symbolic()
                seconds = time.perf_counter() - started
                if varying:
                    with without_garbage_collection(), unlogged():
                        compile_other_sides(self._maker, self._new_sizes, call, varying)
                if between is not None and sized is None:
                    learn(self._new_sizes, call, between, compiled)
                if compiled.program is not None and sized is None:
                    self._new_sizes.captured(call, seconds, compiled.resized)
                self._in_vain.made(self._of_sizes(call), compiled)
                if not (
                    compiled.once or (compiled.program is None and self._in_vain.failed(self._kind(call), compiled))
                ):
                    state = self._remember(compiled)
                    if of_many:
                        self._new_sizes.compiled(call, self._held(), how, seconds)
                    if not self.freeze and sized is None:
                        self._kinds.add(state.guard, compiled, call.leaves, self.model, self._maker.ids())
                found = compiled, _given(compiled, call)
            return found, is_new

    def _of_size(self, call: ModelCall, between: Between) -> Compiled | None:
        """The variant of a program without a graph; None if there is no such program."""
        try:
            if (sized := between.program()) is None:
                return None
            origins = between.common.origins(sized.signature.inputs, self.model, len(call.leaves))
            return of_size(self._maker, call, sized, origins, between.kind.tensors)
        except Exception:  # a fault in fuse must not reach the user
            between.common.programs.give_up()
            return None

    def _guards(self) -> list[StateGuard]:
        """The guards that hold in the model's state, which have variants."""
        return [state.guard for state in self._states if state.guard.holds()]

    def _held(self) -> StateGuard | None:
        """The first of these guards, if there is one."""
        return next(iter(self._guards()), None)

    def _remember(self, compiled: Compiled) -> ModelState:
        state = current(self._states, compiled)
        if state is None:
            state = ModelState(StateGuard(self.model, not self.freeze, compiled.unwatched))
        captured = compiled.graph is not None and not compiled.resized
        if is_full(state) and (captured or compiled.program is None):
            self._maker.warn(
                f"{self._maker.name} was called with more than {len(state.variants)} different input signatures; "
                "the oldest are forgotten and compiled again when they return: pad or bucket the inputs"
            )
        self._states = with_variant(self._states, state, compiled)
        return state

    def _give_up(self, compiled: Compiled, reason: Fallback) -> Fallback:
        """Let the calls that ``compiled`` served run eager from now on, for ``reason``."""
        with self._lock:
            self._states = exchanged(self._states, compiled, Compiled(compiled.guard, None, reason=reason))
        return reason

    # ---- running eager ---------------------------------------------------------------------------------------------

    def _not_yet(self, call: ModelCall, way: Way, between: Between | None, seconds: float) -> Any:
        """The result of a call that is captured once its size has come often enough."""
        why = (
            f"sizes keep changing: this one runs eager until it has taken as long as a program for it ({seconds:.3f} s)"
        )
        started = time.perf_counter()
        result = self.eager(call.args, call.kwargs, Fallback(self._maker.name, "", why), warn=False)
        with self._lock:
            self._new_sizes.ran_eager(call, way, between, time.perf_counter() - started)
        return result

    def _settled(self) -> set[Size]:
        """Count the seconds of calls on the fast path of those that wait, which ends; the sizes that wait no longer."""
        waits, self._waiting = self._waiting, None
        if waits is None:
            return set()
        with self._lock:
            return waits.settle(self._new_sizes)

    def _wait(self, call: ModelCall, way: Way, state: StateGuard, apart: set[Size], seconds: float) -> None:
        """Let calls like this one, which ran eager, take the fast path of calls that wait."""
        captured = [key.parts[0] for key in self._new_sizes.settled(way)]
        if captured and isinstance(self._observed, LastRun):
            apart.update(captured)
            self._waiting = waiting(self._states, state, way, call, apart, self._observed, seconds)

    def _kind(self, call: ModelCall) -> Hashable:
        """Equal for calls that differ in the contents of tensors only."""
        return call.key, modes(), self.model.training

    def _of_sizes(self, call: ModelCall) -> Hashable:
        """Equal for calls that differ in sizes, numbers and the contents of tensors only."""
        return key_without_sizes(call.leaves, call.spec), modes(), self.model.training

    def _refused_model(self, held: Sequence[StateGuard]) -> Fallback | None:
        """Why all calls of the model run eager; None if it has been captured in the state that it is in."""
        return None if held else refused_model(self.model, self._maker.tensors())

    def _never_settles(self, call: ModelCall) -> Fallback | None:
        """Why a call is not compiled once more: what earlier ones left behind or found was different each time."""
        others: list[CallGuard] = []
        if any(compiled.guard.context for state in self._states for compiled in state.variants):
            matches = matching(self._states, call.leaves, call.spec, modes(), in_context=False)
            others = [c.guard for c, _ in matches if c.guard.context]
        if len(others) >= LARGEST_CONTEXTS:
            names = ", ".join(variable.name for variable, _ in others[0].context)
            reason = f"forward reads context variables whose values differ from call to call ({names})"
            return Fallback(self._maker.name, "", reason)
        kept = self._maker.kept
        if not kept:
            return None
        alike = [
            c for s in self._states if s.guard.holds() for c in s.variants if c.carried and c.carried.call == call.key
        ]
        if len(alike) < LARGEST_CARRIED:
            return None
        reason = f"forward reads attributes that it assigns to another value in each call ({', '.join(map(str, kept))})"
        return Fallback(self._maker.name, "", reason)

    def eager(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reason: Fallback | None,
        warn: bool = True,
    ) -> Any:
        """The result of a call that runs eager, with a warning if there is a reason."""
        result = self.model(*args, **kwargs)
        if reason is not None:
            if warn:
                self._maker.warn(f"{self._maker.name} runs eager: {reason.reason}")
            self._observed = LastRun(fallbacks=(reason,))
        return result

    def _in_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: Fallback | None, kind: object) -> Any:
        """As :meth:`eager`, but that submodules run fused where they can."""
        assert reason is not None
        self._maker.warn(f"{self._maker.name} runs eager: {reason.reason}")
        result, runs = self._parts.run(self.model, args, kwargs, kind)
        self._observed = reason, runs
        return result

    def _of_part(self, module: nn.Module) -> Engine:
        """The engine for a part of the model."""
        sizes = None if self.dynamic_shapes is None else "auto"
        return Engine(module, False, self.passes, self.fuel, sizes, quiet=True)


def _last_run(observed: Observed) -> LastRun:
    if isinstance(observed, LastRun):
        return observed
    if len(observed) == 2:
        reason, runs = observed
        return together(reason, [read() for read in runs])
    launches, compiled, ran = Launches.unpack(observed[0]), observed[1], observed[2]
    assert compiled.program is not None
    backward = counted(ran.backward, ran.regions, ran.fallbacks) if ran and ran.backward else None
    forward = counted(launches, compiled.program.regions, compiled.program.fallbacks)
    return replace(forward, backward=backward, reads=compiled.learning.lines if compiled.learning else ())


def _given(compiled: Compiled, call: ModelCall) -> tuple[Any, ...]:
    """The tensors that a variant is given in the call that it was made for."""
    given = compiled.carried.extend(call.leaves, call.spec)[0] if compiled.carried else call.leaves
    return compiled.guard.pick((*given, *compiled.guard.state))


def _another_size(error: Mispredicted, learning: Learning | None) -> Missed | None:
    """An operator whose size was learned gives another one: the call is for another specialisation."""
    learned = learning.another_size(error.source, error.shape) if learning is not None else None
    return Missed(learned, {learned.key: error.shape}) if learned is not None else None
