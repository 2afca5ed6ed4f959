"""One model's compiled variants: find the one that serves a call, or make it, or run the call as eager would.

    call -> state guard -> call guard -> program -> playback
               |  no match
               v
            capture -> passes -> program        what cannot be captured or built runs eager, with one warning

A program that was specialised on values confirms them before anything of it is seen; several are kept
(:mod:`fuse.runtime.specialised`).

Calls may come from several threads. One thread at a time makes a variant, and capture's fake tensors are seen by that
thread only; compiled and eager calls need no lock.
"""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fuse.errors import CaptureError, FaultWarning, FuseError, reason_of_fault
from fuse.gradients.differentiating import by_loops
from fuse.graph.capture import capture
from fuse.graph.collecting import without_collecting
from fuse.graph.cuts import Spoilt, Unforeseen, Unsuitable, journal, journaled
from fuse.graph.cutting import Cuts, changer, rerun
from fuse.graph.fakes import unlogged
from fuse.graph.freezing import freeze
from fuse.graph.joint import capture_joint
from fuse.graph.learned import Learned, Learning, truths_read
from fuse.graph.locks import ForkedLock
from fuse.graph.mutated_attributes import Assigns
from fuse.graph.signature import Attribute, Signature
from fuse.kernel.sized import lowering_for
from fuse.rewrite.ledger import Failed
from fuse.rewrite.pipeline import run_passes
from fuse.runtime import tuning
from fuse.runtime.choosing import chooser_of
from fuse.runtime.compiler import CompileFailed, CompilerMissing
from fuse.runtime.declared import check_declaration, elsewhere
from fuse.runtime.ending import Ending, ending_of
from fuse.runtime.guards import CallGuard, StateGuard, call_guard, flatten, modes, overlaps, sources_of
from fuse.runtime.interrupts import stopped_on_interrupt
from fuse.runtime.mutated_attributes import carried, kind_of_call, tensors_of
from fuse.runtime.patience import Patience
from fuse.runtime.pieces import Pieces
from fuse.runtime.predicted import Mispredicted, PositionOutOfRange
from fuse.runtime.program import Program, begun, plan_of, program_of
from fuse.runtime.reference import Reference
from fuse.runtime.refusals import refused_call, refused_model, without_kernels
from fuse.runtime.result_reconstruction import playback
from fuse.runtime.specialised import LARGEST_UNUSED, Confirmation, Family, Missed
from fuse.runtime.steps import Fallback, Launches
from fuse.runtime.training import Begin, Finish, Ran, Training
from fuse.runtime.variants import Compiled, LastRun, counted
from fuse.runtime.varying import SizesSeen, kind_of_sizes

LARGEST_STATES = 8
LARGEST_CARRIED = 4
LARGEST_CONTEXTS = 8
LARGEST_VARIANTS = 64
_NUMBER = re.compile(r"-?\b\d+(\.\d+)?\b")


@dataclass
class _State:
    """The variants made while the model was in one state; replaced, never changed in place."""

    guard: StateGuard
    variants: tuple[Compiled, ...] = ()


class Engine:
    """The variants of one model, and what the last call did."""

    def __init__(
        self,
        model: nn.Module,
        freeze: bool,
        passes: Sequence[str] | None,
        fuel: int | None = None,
        dynamic_shapes: Any = "auto",
    ) -> None:
        check_declaration(model, dynamic_shapes)
        self.model = model
        self.freeze = freeze
        self.passes = passes
        self.fuel = fuel
        self.dynamic_shapes = dynamic_shapes
        self._rehearsed: set[Hashable] = set()  # kinds of calls that were captured at other sizes
        self._states: tuple[_State, ...] = ()
        self._kept: tuple[Attribute, ...] = ()  # attributes that calls assigned so far
        self._in_vain: Counter[Hashable] = Counter()  # captures of calls that may be captured another time
        self._lock = ForkedLock()
        self._warned: set[str] = set()
        self._changing: tuple[CallGuard, ...] = ()  # of calls that were seen to change something, once
        self._filling: tuple[Fallback, ...] | None = None  # what the last such call is reported with
        self._sizes = SizesSeen()
        self._patience = Patience()
        self._pieces = Pieces(model)
        self._observed: tuple[Launches | int, Compiled, Ran | None] | LastRun | None = None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of ``model(*args, **kwargs)``."""
        if not self._pieces.are_cut:
            return self._call(args, kwargs)
        with journaled():
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = flatten(args, kwargs)
        found = self._find(leaves, spec, modes())
        if found is None:
            if any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack()):
                return self.model(*args, **kwargs)  # part of what is being captured
            if (
                reason := refused_call(leaves)
                or refused_model(self.model, self._tensors())
                or self._never_settles(leaves, spec)
            ):
                return self._eager(args, kwargs, reason)
            if (seconds := self._better_later(leaves, spec)) is not None:
                return self._not_yet(args, kwargs, kind_of_call(leaves, spec), seconds)
            found = self._make(args, kwargs, leaves, spec)
            if found[0].family is not None:
                try:
                    return self._new(found[0], args, kwargs, leaves, spec)
                except Missed as miss:
                    return self._eager(args, kwargs, found[0].family.in_vain(self._name(), miss.learned))
        if found[0].family is not None:
            return self._specialised(found, args, kwargs, leaves, spec)
        return self._served(*found, args, kwargs)

    def _served(
        self, compiled: Compiled, tensors: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a call for which ``compiled`` was found.

        Raises:
            Missed: it is a specialisation that does not serve this call.
        """
        if compiled.program is None or compiled.rebuild is None:
            return self._eager(args, kwargs, compiled.reason, warn=not compiled.once, watches=compiled.watches)
        if compiled.written and overlaps(tensors, compiled.written):
            reason = Fallback("", "", "an input that is written shares memory with another input")
            return self._eager(args, kwargs, reason)
        here = journal() if compiled.cuts else None
        if here is not None:
            here.begin(tensors, compiled.written)
        generator = torch.get_rng_state() if compiled.program.draws or here is not None else None
        try:
            if compiled.training is not None:
                result, launches, ran = compiled.training.run(tensors)
            else:
                values, launches = compiled.program.run(tensors)
                if compiled.confirmation is not None:
                    launches = compiled.confirmation.launched(values, launches)
                result, ran = compiled.rebuild(values, tensors), None
        except Exception as error:  # nothing was written: writes to inputs are a program's last steps
            if generator is not None:
                torch.set_rng_state(generator)
            if isinstance(error, Mispredicted) and (miss := _another_size(error, compiled.learning)):
                raise miss from error
            if isinstance(error, Missed):
                raise
            if isinstance(error, Spoilt):
                self._give_up(compiled, Fallback(self._name(), "", str(error)))
                raise
            whatever = isinstance(error, (Mispredicted, Unforeseen)) or (here is not None and here.raised(error))
            if compiled.family is not None and not whatever:
                raise Missed(None) from error  # it may have been raised because the values are others
            raised = error
        else:
            self._observed = (launches, compiled, ran)
            if compiled.learning is not None:
                _, result = result
            return compiled.carried.assign(result) if compiled.carried else result
        return self._eager(
            args, kwargs, self._instead(compiled, raised)
        )  # which raises eager's own error, or catches it

    def _instead(self, compiled: Compiled, error: Exception) -> Fallback | None:
        """Why a call runs eager in which a program raised ``error``; None where eager raises, too."""
        if isinstance(error, (Mispredicted, Unforeseen)):
            return self._give_up(compiled, Fallback(error.op, error.source, str(error)))
        if isinstance(error, PositionOutOfRange):
            return None
        message = _NUMBER.sub("N", str(error).partition("\n")[0])  # which matrix it was is no reason to warn again
        return Fallback(self._name(), "", f"an operator raised {type(error).__name__}: {message}")

    def _specialised(
        self,
        first: tuple[Compiled, tuple[Any, ...]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
        spec: Any,
    ) -> Any:
        """The result of a call, for which ``first`` was found, from the specialisation that its values confirm; a new
        one if need be."""
        family = first[0].family
        assert family is not None
        if family.reason is not None:
            return self._eager(args, kwargs, family.reason, watches=self._around_reader(family, leaves, spec))
        missed: Learned | None = None
        told: dict[int, object] = {}
        if first[0].chooser is not None and family.wavers():
            with self._lock:  # which makes its program
                told = first[0].chooser.told(first[1])
        for compiled, tensors in self._members(first, leaves, spec):
            if told and compiled.confirmation is not None and not compiled.confirmation.fits(told):
                continue
            try:
                result = self._served(compiled, tensors, args, kwargs)
            except Missed as miss:
                missed = missed or miss.learned
                told.update(miss.told)
                continue
            family.served(compiled)
            return result
        numbers = [len(c.confirmation.served) for c, _ in self._alike(family, leaves, spec) if c.confirmation]
        if max(numbers, default=0) < LARGEST_VARIANTS and family.grows():
            with self._lock, without_collecting(), lowering_for(self._varying(args, kwargs, leaves, spec)):
                alike = [pair[0] for pair in self._alike(family, leaves, spec)]
                made = self._compile(args, kwargs, leaves, spec, family)
                if made in alike:
                    family.joined()
                elif made.program is not None:
                    self._replace(made, alike)
            if made.program is None:
                return self._eager(args, kwargs, made.reason)
            try:
                return self._new(made, args, kwargs, leaves, spec)
            except Missed as miss:  # fused and eager operators differ in what they round
                missed = missed or miss.learned
        return self._eager(args, kwargs, family.in_vain(self._name(), missed))

    def _members(
        self, first: tuple[Compiled, tuple[Any, ...]], leaves: Sequence[Any], spec: Any
    ) -> Iterator[tuple[Compiled, tuple[Any, ...]]]:
        """The specialisations that may serve a call for which ``first`` was found, the likely one first."""
        family = first[0].family
        assert family is not None
        begins = family.likely() in (None, first[0]) and not family.wavers()
        if begins:
            yield first
        alike = self._alike(family, leaves, spec)
        tells = bool(alike) and alike[0][0].ending is not None  # its loop says how many steps the call takes
        for pair in alike if tells and family.wavers() else family.ordered(alike, lambda pair: pair[0]):
            if not begins or pair[0] is not first[0]:
                yield pair

    def _new(
        self, compiled: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any], spec: Any
    ) -> Any:
        """The result of the call that a specialisation was made for."""
        given = compiled.carried.extend(leaves, spec)[0] if compiled.carried else leaves
        result = self._served(compiled, compiled.guard.pick((*given, *compiled.guard.state)), args, kwargs)
        if compiled.family is not None:
            compiled.family.served(compiled, again=False)
        return result

    def last_run(self) -> LastRun | None:
        """What the last call to finish did, or None before the first."""
        observed = self._observed
        if observed is None or isinstance(observed, LastRun):
            return observed
        launches, compiled, ran = Launches.unpack(observed[0]), observed[1], observed[2]
        assert compiled.program is not None
        backward = counted(ran.backward, ran.regions, ran.fallbacks) if ran and ran.backward else None
        forward = counted(launches, compiled.program.regions, compiled.program.fallbacks)
        return replace(forward, backward=backward, reads=compiled.learning.lines if compiled.learning else ())

    @property
    def fills(self) -> bool:
        """Whether the last call ran eager because it changed something that the next such call may leave alone."""
        return isinstance(self._observed, LastRun) and self._observed.fallbacks == self._filling

    def latest(self) -> Compiled | None:
        """The variant that served the last call."""
        observed = self._observed
        return observed[1] if isinstance(observed, tuple) else None

    def forget(self) -> None:
        """Make every variant anew when it is next needed."""
        self._states = ()

    # ---- finding ---------------------------------------------------------------------------------------------------

    def _find(
        self, leaves: Sequence[Any], spec: Any, current_modes: tuple[Any, ...]
    ) -> tuple[Compiled, tuple[Any, ...]] | None:
        return next(self._matching(leaves, spec, current_modes), None)

    def _matching(
        self, leaves: Sequence[Any], spec: Any, current_modes: tuple[Any, ...], in_context: bool = True
    ) -> Iterator[tuple[Compiled, tuple[Any, ...]]]:
        """The variants that serve a call as far as can be told before it, the most recent first; without
        ``in_context`` those, too, that were made where context variables had other values."""
        for state in self._states:
            if state.guard.holds():
                for compiled in state.variants:
                    given = compiled.carried.extend(leaves, spec) if compiled.carried else (leaves, spec)
                    tensors = compiled.guard.match(*given, current_modes)
                    if tensors is not None and (not in_context or compiled.guard.in_context()):
                        yield compiled, tensors

    def _make(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any], spec: Any
    ) -> tuple[Compiled, tuple[Any, ...]]:
        with self._lock:
            found = self._find(leaves, spec, modes())  # another thread may have made it
            if found is None:
                started = time.perf_counter()
                with without_collecting(), unlogged(), lowering_for(self._varying(args, kwargs, leaves, spec)):
                    compiled = self._compile(args, kwargs, leaves, spec)
                if compiled.program is not None:
                    size, seconds = kind_of_call(leaves, spec), time.perf_counter() - started
                    self._patience.captured(self._kind(leaves, spec), size, seconds)
                if not (compiled.once or self._is_passing(compiled, leaves, spec)):
                    self._remember(compiled)
                given = compiled.carried.extend(leaves, spec)[0] if compiled.carried else leaves
                found = compiled, compiled.guard.pick((*given, *compiled.guard.state))
            return found

    def _kind(self, leaves: Sequence[Any], spec: Any) -> Hashable:
        """Equal for calls that differ in sizes only, and that run one program but for these."""
        return kind_of_sizes(leaves, spec), self._needs_gradients(leaves), self.model.training

    def _better_later(self, leaves: Sequence[Any], spec: Any) -> float | None:
        """The seconds of a capture that is not worth it yet, as sizes keep changing; None where the call is captured.

        Who declares sizes, or that there are none, has captures.
        """
        if self.dynamic_shapes != "auto":
            return None
        return self._patience.expected(self._kind(leaves, spec), kind_of_call(leaves, spec))

    def _not_yet(self, args: tuple[Any, ...], kwargs: dict[str, Any], size: Hashable, seconds: float) -> Any:
        """The result of a call that is captured once its size has come often enough."""
        why = f"sizes keep changing: one runs eager until that has taken as long as a capture ({seconds:.3f} s)"
        started = time.perf_counter()
        result = self._eager(args, kwargs, Fallback(self._name(), "", why), warn=False)
        with self._lock:
            self._patience.ran_eager(size, time.perf_counter() - started)
        return result

    def _is_passing(self, compiled: Compiled, leaves: Sequence[Any], spec: Any) -> bool:
        """Whether a call that is not captured may be the next time, because it has other values then."""
        if not compiled.passing:
            return False
        call = kind_of_call(leaves, spec)
        self._in_vain[call] += 1
        return self._in_vain[call] < LARGEST_UNUSED

    def _remember(self, compiled: Compiled) -> None:
        unwatched = compiled.unwatched
        watched = unwatched, compiled.cuts
        alike = (s for s in self._states if (s.guard.unwatched, s.guard.cuts) == watched and s.guard.holds())
        current = next(alike, None)
        if current is None:
            current = _State(StateGuard(self.model, not self.freeze, *watched))
        variants = (compiled, *current.variants)
        if len(variants) > LARGEST_VARIANTS and (compiled.graph is not None or compiled.program is None):
            self._warn(
                f"{self._name()} was called with more than {LARGEST_VARIANTS} different input signatures; "
                "the oldest are forgotten and compiled again when they return: pad or bucket the inputs"
            )
        others = tuple(s for s in self._states if s is not current)
        self._states = (_State(current.guard, variants[:LARGEST_VARIANTS]), *others)[:LARGEST_STATES]

    def _replace(self, compiled: Compiled, alike: Sequence[Compiled]) -> None:
        """Remember ``compiled`` instead of those whose calls it serves: its loop takes more steps."""
        assert compiled.family is not None
        shorter = [c for c in alike if c.ending and compiled.ending and compiled.ending.includes(c.ending)]
        for one in shorter:
            assert one.confirmation is not None
            assert compiled.confirmation is not None
            compiled.confirmation.serve(one.confirmation.served)
        self._states = tuple(_State(s.guard, tuple(c for c in s.variants if c not in shorter)) for s in self._states)
        compiled.family.joined(len(shorter))
        self._remember(compiled)

    def _give_up(self, compiled: Compiled, reason: Fallback) -> Fallback:
        """Let the calls that ``compiled`` served run eager from now on, for ``reason``."""
        eager = Compiled(compiled.guard, None, reason=reason)
        with self._lock:
            self._states = tuple(
                _State(s.guard, tuple(eager if variant is compiled else variant for variant in s.variants))
                for s in self._states
            )
        return reason

    # ---- making ----------------------------------------------------------------------------------------------------

    @stopped_on_interrupt()
    def _compile(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
        spec: Any,
        family: Family[Compiled] | None = None,
    ) -> Compiled:
        graph: GraphModule | None = None
        training: Training | None = None
        ending: Ending | None = None
        cuts: Cuts | None = None
        kind = self._kind_of_cut(leaves, spec)
        try:
            program: Program | Reference
            signature: Signature
            if self._needs_gradients(leaves):
                graph, training = self._joint(args, kwargs)
                program = training.program if training else self._build(graph)
                signature = training.signature if training else graph.meta["signature"]
            else:
                cuts = self._pieces.cuts(kind)
                graph = self._graph(args, kwargs, cuts)
                signature = graph.meta["signature"]
                ending = ending_of(graph)
                if ending and (longer := self._longer(ending, self._alike(family, leaves, spec))):
                    return longer
                program = self._build(graph)
        except Unsuitable as error:  # the cut: without it there is another one, or none
            self._pieces.refuse(error, kind)
            return self._compile(args, kwargs, leaves, spec, family)
        except FuseError as error:  # CaptureError among them
            assigned = error.assigned if isinstance(error, CaptureError) else ()
            unwatched = frozenset(Attribute(*pair) for pair in assigned)
            declined = self._declined(leaves, spec, Fallback(self._name(), "", str(error)), unwatched)
            if isinstance(error, Assigns) or assigned:
                declined = self._tried_again(declined, leaves, spec)
            if isinstance(error, CaptureError) and not (declined.once or self.freeze):
                declined = self._in_pieces(declined, error, kind, leaves, (args, kwargs))
            return replace(declined, passing=isinstance(error, CaptureError) and error.depends)
        except FaultWarning:  # warnings are errors here, which is the user's wish
            raise
        except Exception as error:  # a fault of ours must not become the user's
            return self._declined(leaves, spec, Fallback(self._name(), "", reason_of_fault(error)))
        for fallback in program.fallbacks:
            how = "eager in each call" if cuts and fallback.op in cuts.reasons else "op by op"
            self._warn(f"{fallback.op} at {fallback.source or '?'} runs {how}: {fallback.reason}")
        if graph is not None:
            program.fallbacks += tuple(_left_out(failed) for failed in graph.meta["failed"])
        carry = carried(self.model, signature.kept, leaves, spec)
        given = carry.extend(leaves, spec) if carry else (leaves, spec)
        if new := [one.attribute for one in signature.kept if one.attribute not in self._kept]:
            self._kept += tuple(new)
            if training is None and self._needs_gradients(given[0]):  # only the attributes need them
                return self._compile(args, kwargs, leaves, spec, family)
        sources = sources_of(signature.inputs, self.model, len(leaves))
        guard = call_guard(*given, sources, self._tensors(), signature.context)
        confirmation = None
        if (learning := signature.learning) is not None and learning.learned:
            program.confirm = confirmation = Confirmation(learning, ending)
            family = family or Family(made=1)
            if truths_read(learning.learned):
                family.loops()
        return Compiled(
            guard,
            program,
            graph,
            confirmation.play if confirmation and ending else playback(signature),
            frozenset(mutation.input_index for mutation in signature.mutations),
            training=training,
            carried=carry,
            unwatched=frozenset(self._kept),
            learning=learning,
            confirmation=confirmation,
            chooser=graph.meta.get("chooser") if graph is not None else None,
            family=family,
            ending=ending,
            cuts=tuple(cuts.reasons) if cuts else (),
        )

    def _in_pieces(
        self,
        declined: Compiled,
        error: CaptureError,
        kind: Hashable,
        leaves: Sequence[Any],
        call: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> Compiled:
        """Let a call that is declined be watched, where the next such call may be cut around what it is because of."""
        if self._needs_gradients(leaves):
            return declined
        assert declined.reason is not None
        if isinstance(error, Assigns) and not error.module and self._is_outside(error.attributes):
            error.module = changer(self.model, call, lambda: capture(self.model, *call, self._kept))
        path, why = self._pieces.further(error, kind)
        hope = f"; the next such call is cut around {path}" if path else why and f"; {why}"
        reason = replace(declined.reason, reason=f"{declined.reason.reason}{hope}")
        return replace(declined, reason=reason, once=bool(path), watches=kind if path else None)

    def _alike(
        self, family: Family[Compiled] | None, leaves: Sequence[Any], spec: Any
    ) -> list[tuple[Compiled, tuple[Any, ...]]]:
        """The specialisations for a call, the most recent first; before others those whose loops may end earlier."""
        found = [pair for pair in self._matching(leaves, spec, modes()) if family and pair[0].family is family]
        return sorted(found, key=lambda pair: pair[0].ending is None)

    def _longer(self, ending: Ending, alike: Sequence[tuple[Compiled, tuple[Any, ...]]]) -> Compiled | None:
        """The specialisation, if any, whose loop takes more steps, and that serves a call that ended so, too."""
        for compiled, _ in alike:
            if compiled.ending and compiled.confirmation and compiled.ending.includes(ending):
                compiled.confirmation.serve({ending.count: ending})
                return compiled
        return None

    def _joint(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], begin: Begin | None = None
    ) -> tuple[GraphModule, Training | None]:
        """The call captured with its gradients; its forward half only, where nothing needs gradients."""
        if self.freeze:
            raise FuseError("the call needs gradients, and the weights are frozen")
        joint = capture_joint(self.model, args, kwargs, self._kept, by_loops(self.passes, self.fuel))
        joint.forward.meta["chooser"] = chooser_of(joint.forward)
        if joint.backward is None:
            self._rewrite(joint.forward)
            return joint.forward, None
        return joint.forward, Training(joint, self._rewrite, begin or self._begin, self._lock)

    def _is_outside(self, changed: Sequence[Attribute]) -> bool:
        """Whether what a call changes may be outside of modules, and a submodule may be what changes it."""
        held = {*self.model.__dict__, *self.model._parameters, *self.model._buffers}
        own = (attribute.owner or attribute.name in held for attribute in changed)
        return not any(own) and any(True for _ in self.model.children())

    def _around_reader(self, family: Family[Compiled], leaves: Sequence[Any], spec: Any) -> Hashable:
        """Let calls whose values differ each time be cut around the submodule that reads them: the kind of call to be
        watched, if there is one."""
        reader, family.reader = family.reader, None
        if not reader or family.reason is None or self.freeze or self._needs_gradients(leaves):
            return None
        error, kind = CaptureError(family.reason.reason), self._kind_of_cut(leaves, spec)
        error.module = reader
        with self._lock:
            path, _ = self._pieces.further(error, kind)
            if not path:
                return None
            self._states = tuple(
                _State(s.guard, tuple(c for c in s.variants if c.family is not family)) for s in self._states
            )
        return kind

    def _kind_of_cut(self, leaves: Sequence[Any], spec: Any) -> Hashable:
        """Equal for calls that may be cut alike."""
        return kind_of_call(leaves, spec), modes(), self.model.training

    def _graph(self, args: tuple[Any, ...], kwargs: dict[str, Any], cuts: Cuts | None = None) -> GraphModule:
        """The call, captured and rewritten."""
        graph = capture(self.model, args, kwargs, self._kept, cuts)
        if self.freeze:
            freeze(graph, self.model)
        else:
            graph.meta["chooser"] = chooser_of(graph)
        self._rewrite(graph)
        return graph

    def _rewrite(self, graph: GraphModule) -> None:
        graph.meta["failed"] = run_passes(graph, self.passes, self.fuel).failed

    def _varying(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any], spec: Any
    ) -> frozenset[int] | None:
        """The sizes of a call that kernels are told: those that were declared to vary, and that did."""
        if self.dynamic_shapes is None:
            return None
        if self.dynamic_shapes != "auto":
            self._rehearse(args, kwargs, leaves, spec)
        return self._sizes.varying(leaves, spec)

    def _rehearse(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any], spec: Any) -> None:
        """Plan a call at other sizes, where some are declared to vary and no call of this kind came before: what
        differs is what follows from sizes."""
        kind = self._kind(leaves, spec)
        if kind in self._rehearsed or tuning.enabled():
            return
        try:
            others = elsewhere(self.model, self.dynamic_shapes, args, kwargs, leaves)
            if others is None:
                return
            if len(self._rehearsed) < LARGEST_VARIANTS:
                self._rehearsed.add(kind)
            other_args, other_kwargs = pytree.tree_unflatten(others, pytree.tree_structure((args, kwargs)))
            with lowering_for(None):
                if self._needs_gradients(leaves):
                    self._joint(other_args, other_kwargs, _planned)
                else:
                    _planned(self._graph(other_args, other_kwargs))
            self._sizes.varying(others, spec)
        except FuseError as why:  # the call itself may be captured nevertheless
            self._warn(f"what dynamic_shapes declares of {self._name()} is of no use: {why}")
        except FaultWarning:  # warnings are errors here, which is the user's wish
            raise
        except Exception as error:  # a fault of ours must not become the user's
            self._warn(f"what dynamic_shapes declares of {self._name()} is of no use: {reason_of_fault(error)}")

    def _build(self, graph: GraphModule) -> Program | Reference:
        if reason := without_kernels(graph):
            return Reference(graph, Fallback(self._name(), "", reason))
        return self._finished(graph, lambda: program_of(graph))

    def _begin(self, graph: GraphModule) -> Finish:
        """As ``_build``, while the caller goes on."""
        if without_kernels(graph):
            return lambda: self._build(graph)
        program = begun(graph)
        return lambda: self._finished(graph, program)

    def _finished(self, graph: GraphModule, program: Callable[[], Program]) -> Program | Reference:
        try:
            return program()
        except (CompilerMissing, CompileFailed) as error:
            return Reference(graph, Fallback(self._name(), "", str(error)))

    def _declined(
        self, leaves: Sequence[Any], spec: Any, reason: Fallback, unwatched: frozenset[Attribute] = frozenset()
    ) -> Compiled:
        first = {id(leaf): i for i, leaf in reversed(list(enumerate(leaves))) if isinstance(leaf, Tensor)}
        state = [tensor for tensor in self._tensors() if id(tensor) not in first]
        guard = call_guard(leaves, spec, [*sorted(first.values()), *state], self._tensors())
        return Compiled(guard, None, reason=reason, unwatched=unwatched | set(self._kept))

    def _tried_again(self, declined: Compiled, leaves: Sequence[Any], spec: Any) -> Compiled:
        """Let the first call that changes something run eager without more ado: a cache that it fills is there for the
        next, which then changes nothing and is captured."""
        if any(guard.match(leaves, spec, modes()) is not None for guard in self._changing):
            return declined
        self._changing = (declined.guard, *self._changing)[:LARGEST_VARIANTS]
        assert declined.reason is not None
        hope = f"{declined.reason.reason}; the next such call is captured if it changes nothing"
        reason = replace(declined.reason, reason=hope)
        self._filling = (reason,)
        return replace(declined, reason=reason, once=True)

    def _never_settles(self, leaves: Sequence[Any], spec: Any) -> Fallback | None:
        """Why a call is not compiled once more: what earlier ones left behind or found was different each time."""
        others = [c.guard for c, _ in self._matching(leaves, spec, modes(), in_context=False) if c.guard.context]
        if len(others) >= LARGEST_CONTEXTS:
            names = ", ".join(variable.name for variable, _ in others[0].context)
            return Fallback(self._name(), "", f"forward reads context variables ({names}), and finds others each time")
        if not self._kept:
            return None
        call = kind_of_call(leaves, spec)
        alike = [c for s in self._states if s.guard.holds() for c in s.variants if c.carried and c.carried.call == call]
        if len(alike) < LARGEST_CARRIED:
            return None
        named = ", ".join(map(str, self._kept))
        return Fallback(self._name(), "", f"forward reads what it assigned before ({named}), and finds it changed")

    def _needs_gradients(self, leaves: Sequence[Any]) -> bool:
        if not torch.is_grad_enabled():
            return False
        held: Sequence[Any] = () if self.freeze else [*self._tensors(), *tensors_of(self.model, self._kept)]
        return any(isinstance(t, Tensor) and t.requires_grad for t in (*leaves, *held))

    def _tensors(self) -> list[Tensor]:
        """Parameters and buffers, but for buffers that calls assign."""
        kept = set(map(str, self._kept))
        return [*self.model.parameters(), *(b for name, b in self.model.named_buffers() if name not in kept)]

    # ---- eager -----------------------------------------------------------------------------------------------------

    def _eager(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reason: Fallback | None,
        warn: bool = True,
        watches: Hashable = None,
    ) -> Any:
        here = journal() if self._pieces.are_cut else None
        if here is not None and here.noted:
            result = rerun(here, self.model, args, kwargs)
        elif watches is not None:
            result = self._pieces.watched(watches, args, kwargs)
        else:
            result = self.model(*args, **kwargs)
        if reason is not None:
            if warn:
                self._warn(f"{self._name()} runs eager: {reason.reason}")
            self._observed = LastRun(fallbacks=(reason,))
        return result

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=_outside())

    def _name(self) -> str:
        return str(self.model._get_name())


def _planned(graph: GraphModule) -> Finish:
    """The kernels of a graph that nobody runs are lowered, and not compiled."""
    if not without_kernels(graph):
        plan_of(graph)
    return lambda: Reference(graph, Fallback("", "", "it is not run"))


def _another_size(error: Mispredicted, learning: Learning | None) -> Missed | None:
    """An operator whose size was learned gives another one: the call is for another specialisation."""
    learned = learning.another_size(error.source, error.shape) if learning is not None else None
    return Missed(learned, {learned.key: error.shape}) if learned is not None else None


def _left_out(failed: Failed) -> Fallback:
    return Fallback(f"pass {failed.pass_name}", failed.source, f"failed and was left out: {failed.reason}")


def _outside() -> int:
    """The stack level of the first caller that is neither here nor in ``nn.Module``."""
    frame, level = sys._getframe(1), 1
    inside = ("fuse.runtime", "torch.nn", "contextlib")
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(inside):
        frame, level = frame.f_back, level + 1
    return level
