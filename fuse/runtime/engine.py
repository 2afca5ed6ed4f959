"""One compiled model: serve a call by the variant for it, or make this variant, or run the call as eager would.

    call -> state guard -> call guard -> program -> reconstruction
               |  no match
               v
            capture -> passes -> program        what cannot be captured or built runs eager, with one warning

A call whose sizes lie between captured ones needs no capture (:mod:`fuse.runtime.generalising.generalised`).
:mod:`fuse.runtime.known_variants` finds and makes variants. A program that was specialised on values confirms them
before anything of it is seen; several are kept (:mod:`fuse.runtime.variants.specialised`).

Calls may come from several threads. One thread at a time makes a variant, and capture's fake tensors are seen by that
thread only; compiled and eager calls need no lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fuse.graph.locks import ForkedLock
from fuse.graph.numbers.drawn_numbers import put_back
from fuse.graph.numbers.learned import Learned, Learning
from fuse.runtime.autograd.autograd_node import RaisedByHook
from fuse.runtime.building.compiling import NotYet
from fuse.runtime.generalising.kinds_of_calls import Between
from fuse.runtime.guards.call_guards import any_nested, flatten, function_modes, modes, overlaps
from fuse.runtime.guards.call_keys import key_of_call
from fuse.runtime.guards.state_guard import StateGuard
from fuse.runtime.known_variants import Found, KnownVariants, given
from fuse.runtime.making import Maker, ModelCall
from fuse.runtime.methods import Method, Methods
from fuse.runtime.parts import Parts
from fuse.runtime.programs.predicted import KernelFailed, Mispredicted
from fuse.runtime.programs.refusals import (
    ANOMALIES,
    active_modes,
    anomalies_sought,
    dispatch_modes,
    refused_call,
    refused_model,
)
from fuse.runtime.programs.steps import Fallback
from fuse.runtime.sizes.declared import check_declaration
from fuse.runtime.sizes.new_sizes import Way
from fuse.runtime.sizes.reaching import reached
from fuse.runtime.sizes.waiting import Size, Waiting, waiting
from fuse.runtime.variants.compiled import Compiled
from fuse.runtime.variants.drawing import LARGEST_APART, fewest_apart
from fuse.runtime.variants.in_vain import without_numbers
from fuse.runtime.variants.last_run import LastRun, LazyRun, Observed, run_of
from fuse.runtime.variants.specialised import Missed
from fuse.runtime.variants.states import LARGEST_VARIANTS
from fuse.runtime.variants.usual import Usual, usual


class Engine:
    """One model, compiled: its calls, and what the last of them did."""

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
        self._lock = ForkedLock()
        self._maker = Maker(model, freeze, passes, fuel, self._lock, quiet=quiet)
        self._known = KnownVariants(self._maker, dynamic_shapes)
        self._parts = Parts(model, self._of_part, self._lock)
        self._methods = Methods(model, self.call, None if freeze else self._parts, self._observe_method, self._lock)
        self._observed: Observed | None = None
        self._first: Observed | None = None  # of the call for which a variant was made last
        self._found: Compiled | None = None
        self._usual: Usual | None = None
        self._waiting: Waiting | None = None

    # ---- serving ---------------------------------------------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of ``model(*args, **kwargs)``."""
        active = function_modes() or dispatch_modes()
        if active and (reason := active_modes()) is not None:
            return self.eager(args, kwargs, reason)
        likely, known = self._usual, self._known
        if likely is not None and likely.states is known.states:
            tensors = likely.tensors(args, kwargs)
            if tensors is not None:
                return self._served(likely.compiled, tensors, args, kwargs)
        waits = self._waiting
        if waits is not None and waits.left > 0 and waits.states is known.states and not active:
            size = waits.size(args, kwargs)
            if size is not None:
                started = time.perf_counter()
                result = self.model(*args, **kwargs)
                waits.ran(size, time.perf_counter() - started)
                self._observed = waits.run
                return result
        leaves, spec = flatten(args, kwargs)
        if any_nested(leaves):
            return self.eager(args, kwargs, Fallback("", "", "an input is a nested tensor"))
        searched = known.states
        found = known.find(leaves, spec)
        if found is not None and found[0].family is None:
            self._note(found[0])
            return self._served(*found, args, kwargs)
        call = ModelCall(args, kwargs, leaves, spec)
        if found is None:
            if any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack()):
                return self.model(*args, **kwargs)  # part of what is being captured
            held = known.guards()
            refused = refused_call(leaves) or self._refused_model(held) or self._maker.given_up(call)
            if reason := refused or known.never_settles(call):
                return self.eager(args, kwargs, reason)
            if (declined := known.in_vain.instead(known.kind(call), known.of_sizes(call))) is not None:
                return self._served(declined, (), args, kwargs)
            kind, way = known.kind_of(call, held), known.new_sizes.way(call, next(iter(held), None))
            between, apart = known.between(call, kind), self._settled()
            started = time.perf_counter()
            seconds = known.new_sizes.too_early(call, way, between)
            if seconds is None and between is not None and not between.within:
                with self._lock:
                    between = reached(self._maker, known.new_sizes, call, between)
                seconds = known.new_sizes.too_early(call, way, between)
            if seconds is not None:
                result = self._not_yet(call, way, between, seconds)
                if held and not (kind is not None and kind.compares()):
                    self._wait(call, way, held[0], apart, seconds)
                return result
            try:
                found, is_new = known.make(call, between, searched)
            except NotYet:
                way = known.new_sizes.way(call, known.held())
                return self._not_yet(call, way, between, known.new_sizes.waits(call, way))
            if found[0].family is None or found[0].resized:
                making, is_alone = time.perf_counter() - started, found[0].family is None
                result = self._served(*found, args, kwargs) if is_alone else self._specialised(found, call)
                self._first = self._observed if is_new else self._first
                if is_new and found[0].is_sized():
                    # The first run prepares the program, in about the time that making took. The rest is the call's.
                    with self._lock:
                        price = making + min(time.perf_counter() - started - making, making)
                        known.new_sizes.captured(call, price, True, True, found[0].training)
                return result
            try:
                if is_new:
                    return self._new(found[0], call)
            except Missed as miss:
                return self.eager(args, kwargs, found[0].family.in_vain(self._maker.name, miss.learned))
        return self._specialised(found, call)

    def _note(self, compiled: Compiled) -> None:
        """Note which variant was found for a call: found twice, it is asked first."""
        self._usual = usual(self._known.states, compiled) if compiled is self._found else None
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
        if compiled.ungraded and any(tensors[i].grad is not None for i in compiled.ungraded):
            return self.eager(
                args, kwargs, Fallback(self._maker.name, "", "forward reads a .grad that was None before")
            )
        containers = compiled.carried.given(args, kwargs) if compiled.carried else ()
        if containers is None:
            twice = "forward changes an argument that occurs twice in the call, or that the model holds, too"
            return self.eager(args, kwargs, Fallback(self._maker.name, "", twice))
        if compiled.training is not None:
            if cause := compiled.training.gives_up:
                return self.eager(args, kwargs, self._known.give_up(compiled, Fallback(self._maker.name, "", cause)))
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
            return self._known.give_up(compiled, Fallback(error.op, error.source, str(error)))
        if isinstance(error, KernelFailed):
            return Fallback(self._maker.name, "", str(error))
        message = without_numbers(str(error).partition("\n")[0])  # which matrix it was is no reason to warn again
        return Fallback(self._maker.name, "", f"an operator raised {type(error).__name__}: {message}")

    def method(self, value: Any) -> Any:
        """An attribute of the model; if it is a method, one in which the modules that it calls run fused."""
        return Method(value, self._call_method) if self._methods.serves(value) else value

    def _call_method(self, method: MethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = flatten(args, kwargs)
        if any_nested(leaves):
            return method(*args, **kwargs)
        return self._methods.call(method, args, kwargs, (key_of_call(leaves, spec), modes(), self.model.training))

    def _observe_method(self, name: str, runs: tuple[LazyRun, ...]) -> None:
        reason = f"{name} is a method: the modules that it calls run fused, the code between them eager"
        self._observed = Fallback(self._maker.name, "", reason), runs

    def last_run(self) -> LastRun | None:
        """The run of the last finished call, or None before the first."""
        observed = self._observed
        return None if observed is None else run_of(observed, observed is self._first)

    def observed(self) -> LazyRun:
        """The run of the last call, read later."""
        return partial(run_of, LastRun() if self._observed is None else self._observed)

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
        self._found, self._usual, self._waiting = None, None, None
        self._known.forget()

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
            alike = self._known.alike(first, call)
        if not tried.issuperset(compiled for compiled, _ in alike):  # another thread has made one meanwhile
            return self._specialised(first, call)
        if fewest_apart([compiled.drawing for compiled, _ in alike], values) > LARGEST_APART:
            return self.eager(call.args, call.kwargs, family.in_vain(self._maker.name, missed, ends=True))
        way = self._known.new_sizes.way(call, self._known.held())
        between = self._known.unlike(first, call)
        try:
            if self._known.resize(first, call, between):
                return self._specialised(first, call)
            seconds = self._known.new_sizes.too_early(call, way, between)
            if seconds is None and between is not None:
                between = self._known.unlike(first, call, further=True)
                if self._known.resize(first, call, between):
                    return self._specialised(first, call)
        except NotYet:
            seconds = self._known.new_sizes.waits(call, way)
        if seconds is not None:
            return self._not_yet(call, way, between, seconds, family.in_vain(self._maker.name, missed))
        numbers = [len(c.confirmation.served) for c, _ in alike if c.confirmation]
        self._maker.converts |= missed is not None and missed.guard == "number"
        if max(numbers, default=0) < LARGEST_VARIANTS and family.grows():
            made = self._known.specialise(first, call, missed)
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
        alike = self._known.alike(first, call)
        tells = bool(alike) and alike[0][0].ending is not None  # its loop says how many steps the call takes
        for pair in alike if tells and family.wavers() else family.ordered(alike, lambda pair: pair[0]):
            if not begins or pair[0] is not first[0]:
                yield pair

    def _new(self, compiled: Compiled, call: ModelCall) -> Any:
        """The result of the call that a specialisation was made for."""
        result = self._served(compiled, given(compiled, call), call.args, call.kwargs)
        self._first = self._observed
        if compiled.family is not None:
            compiled.family.served(compiled, again=False)
        return result

    # ---- running eager ---------------------------------------------------------------------------------------------

    def _not_yet(
        self, call: ModelCall, way: Way, between: Between | None, seconds: float, missed: Fallback | None = None
    ) -> Any:
        """The result of a call that is captured once its size has come often enough. ``missed``: why programs of other
        sizes do not serve it."""
        why = (
            f"sizes keep changing: this one runs eager until it has taken as long as a program for it ({seconds:.3f} s)"
        )
        started = time.perf_counter()
        result = self.eager(call.args, call.kwargs, missed or Fallback(self._maker.name, "", why), warn=False)
        with self._lock:
            self._known.new_sizes.ran_eager(call, way, between, time.perf_counter() - started)
        return result

    def _settled(self) -> set[Size]:
        """Count the seconds of calls on the fast path of those that wait, which ends; the sizes that wait no longer."""
        waits, self._waiting = self._waiting, None
        if waits is None:
            return set()
        with self._lock:
            return waits.settle(self._known.new_sizes)

    def _wait(self, call: ModelCall, way: Way, state: StateGuard, apart: set[Size], seconds: float) -> None:
        """Let calls like this one, which ran eager, take the fast path of calls that wait."""
        captured = [key.parts[0] for key in self._known.new_sizes.settled(way)]
        if captured and isinstance(self._observed, LastRun):
            apart.update(captured)
            self._waiting = waiting(self._known.states, state, way, call, apart, self._observed, seconds)

    def _refused_model(self, held: Sequence[StateGuard]) -> Fallback | None:
        """Why all calls of the model run eager; None if it has been captured in the state that it is in."""
        return None if held else refused_model(self.model, self._maker.tensors())

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
        result, runs = self._parts.run(self.model, args, kwargs, kind)
        self._maker.warn(f"{self._maker.name} runs eager: {reason.reason}")
        self._observed = reason, runs
        return result

    def _of_part(self, module: nn.Module) -> Engine:
        """The engine for a part of the model."""
        sizes = None if self.dynamic_shapes is None else "auto"
        return Engine(module, False, self.passes, self.fuel, sizes, quiet=True)


def _another_size(error: Mispredicted, learning: Learning | None) -> Missed | None:
    """An operator whose size was learned gives another one: the call is for another specialisation."""
    learned = learning.another_size(error.source, error.shape) if learning is not None else None
    return Missed(learned, {learned.key: error.shape}) if learned is not None else None
