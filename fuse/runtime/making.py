"""Make a variant that serves a call: capture, passes, kernels; or give the reason why such calls run eager.

call -> capture -> passes -> program            calls that cannot be captured or built run eager, with a reason
        capture_joint -> passes -> training     where the call needs gradients
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fuse.errors import CaptureError, CompileFailed, CompilerMissing, FaultWarning, FuseError, reason_of_fault
from fuse.gradients.differentiating import by_loops
from fuse.graph.backward.joint import capture_joint
from fuse.graph.capture import capture, capture_short
from fuse.graph.freezing import freeze
from fuse.graph.functional.short_graphs import StepsNeeded, whole_graph
from fuse.graph.locks import ForkedLock
from fuse.graph.numbers.learned import truths_read
from fuse.graph.patches.requires_grad import RequiresGradOfArguments
from fuse.graph.recording.recording_plan import Assigns
from fuse.graph.signature import Attribute, Signature
from fuse.passes.roll_whole_loops import roll_whole_loops
from fuse.rewrite import registry
from fuse.rewrite.ledger import Failed
from fuse.rewrite.pipeline import run_passes
from fuse.runtime.autograd.losses import Losses
from fuse.runtime.autograd.training import Begin, Finish, Training
from fuse.runtime.building.compiling import NotYet
from fuse.runtime.building.interrupts import stopped_on_interrupt
from fuse.runtime.generalising.captured_calls import CapturedCall
from fuse.runtime.guards.call_guards import CallGuard, call_guard, modes, sources_of
from fuse.runtime.guards.call_keys import Key, key_of_call, kind_of_sizes
from fuse.runtime.programs.input_effects import effects_on_inputs
from fuse.runtime.programs.program import Program, begun, program_of
from fuse.runtime.programs.reference import Reference
from fuse.runtime.programs.refusals import without_kernels, without_kernels_for
from fuse.runtime.programs.result_reconstruction import reconstruction
from fuse.runtime.programs.steps import Fallback
from fuse.runtime.resizing.sized_programs import SizedProgram
from fuse.runtime.size_uses.watched_loops import loops_watched
from fuse.runtime.variants.compiled import Compiled
from fuse.runtime.variants.drawing import drawing_of
from fuse.runtime.variants.ending import Ending, ending_of
from fuse.runtime.variants.mutated_attributes import carried, tensors_of
from fuse.runtime.variants.specialised import Confirmation, Family
from fuse.runtime.variants.states import LARGEST_VARIANTS

LARGEST_FILLS = 4
"""The kinds of calls that run eager once, as each fills a cache, before a warning says so: a cache that is filled again
and again, such as one that grows, keeps every call from being captured."""


@dataclass(frozen=True)
class ModelCall:
    """A call of a model: its arguments, and their leaves and structure."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: Sequence[Any]
    spec: Any

    @cached_property
    def key(self) -> Key:
        """Equal for calls that differ in the contents of tensors only."""
        return key_of_call(self.leaves, self.spec)

    @cached_property
    def kind(self) -> Key:
        """Equal for calls that differ in sizes and contents of tensors, and in plain values, only."""
        return kind_of_sizes(self.leaves, self.spec)


@dataclass(eq=False)
class Maker:
    """Settings that all variants of one model share, and facts about the model that calls showed.

    Attributes:
        model: the model.
        frozen: whether weights are frozen.
        passes: names of the passes; None for the default.
        fuel: number of rewrites to apply; None for all.
        lock: held while the model is captured.
        variable: tensors of a frozen model that calls write, by their ``id``; they are no constants.
        kept: attributes that calls assigned so far.
        converts: whether integers that ``int`` made of tensors differed between calls.
        changing: guards of calls that changed something outside of their results, once.
        filling: the reason that the last such call is reported with.
        losses: the losses of training steps, by kind of call.
        trained: tensors with ``requires_grad`` in plain attributes or globals, which are no parameters.
        warned: warnings given so far.
        quiet: whether warnings are suppressed.
    """

    model: nn.Module
    frozen: bool
    passes: Sequence[str] | None
    fuel: int | None
    lock: ForkedLock
    variable: dict[int, Tensor] = field(default_factory=dict)
    kept: tuple[Attribute, ...] = ()
    converts: bool = False
    changing: tuple[CallGuard, ...] = ()
    filling: tuple[Fallback, ...] | None = None
    losses: dict[Key, Losses] = field(default_factory=dict)
    trained: tuple[Tensor, ...] = ()
    warned: set[str] = field(default_factory=set)
    quiet: bool = False

    @property
    def name(self) -> str:
        return str(self.model._get_name())

    def warn(self, message: str) -> None:
        """Give a warning once, attributed to the user's line."""
        if message not in self.warned and not self.quiet:
            self.warned.add(message)
            warnings.warn(message, stacklevel=_outside())

    def losses_of(self, call: ModelCall) -> Losses:
        """The losses of calls that differ from this one in sizes and values only."""
        losses = self.losses.setdefault(call.kind, Losses())
        while len(self.losses) > LARGEST_VARIANTS:
            del self.losses[next(iter(self.losses))]
        return losses

    def given_up(self, call: ModelCall) -> Fallback | None:
        """Why training steps of this kind run eager, at any sizes; None if they do not."""
        losses = self.losses.get(call.kind)
        if losses is None or losses.gives_up is None or not self.needs_gradients(call.leaves):
            return None
        return Fallback(self.name, "", losses.gives_up)

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers, without those that calls assign."""
        return list(self._held())

    def ids(self) -> frozenset[int]:
        """The ``id`` of each of these."""
        return frozenset(map(id, self.tensors()))

    def needs_gradients(self, leaves: Sequence[Any]) -> bool:
        """Whether a call with these leaves is recorded by autograd."""
        if not torch.is_grad_enabled():
            return False
        found: Iterable[Any] = leaves
        if not self.frozen:  # most models have parameters that need gradients: nothing else is looked at
            assigned = tensors_of(self.model, self.kept)
            found = chain(leaves, self._held(), self.trained, assigned)
        return any(isinstance(t, Tensor) and t.requires_grad for t in found)

    def _held(self) -> Iterator[Tensor]:
        kept = set(map(str, self.kept))
        model = self.model
        named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        return (tensor for name, tensor in named if name not in kept)


def _outside() -> int:
    """The stack level of the first caller outside of ``fuse.runtime`` and ``torch.nn``."""
    frame, level = sys._getframe(1), 1
    inside = ("fuse.runtime", "torch.nn", "contextlib")
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(inside):
        frame, level = frame.f_back, level + 1
    return level


@stopped_on_interrupt()
def make(
    maker: Maker,
    call: ModelCall,
    family: Family[Compiled] | None = None,
    alike: Sequence[Compiled] = (),
    resized: CapturedCall | None = None,
) -> Compiled:
    """A variant for calls like this one.

    Args:
        maker: settings of the model.
        call: the call.
        family: the record of specialisations of such calls, if there are some.
        alike: these specialisations; one is returned if it serves the call too.
        resized: the graphs of the call, if they are known without a capture.

    Raises:
        NotYet: kernels would have to be compiled, which the caller does not allow now.
    """
    graph: GraphModule | None = None
    training: Training | None = None
    ending: Ending | None = None
    try:
        program: Program | Reference
        signature: Signature
        _decline(without_kernels_for((*call.leaves, *maker.tensors())))
        if resized is not None:
            graph, signature = resized.graphs[0], resized.graphs[0].meta["signature"]
            training = resized.training.with_graphs(resized.graphs) if resized.training else None
            program = training.program if training else _build(maker, graph)
        elif maker.needs_gradients(call.leaves):
            graph, training = joint(maker, call)
            program = training.program if training else _build(maker, graph)
            signature = training.signature if training else graph.meta["signature"]
        else:
            graph = captured(maker, call)
            signature = graph.meta["signature"]
            if not maker.frozen and torch.is_grad_enabled() and (trained := _trained(signature)):
                maker.trained += trained
                return make(maker, call, family, alike)
            ending = ending_of(graph)
            if ending and (longer := _longer(ending, alike)):
                return longer
            program = _build(maker, graph)
    except FuseError as error:  # CaptureError among them
        assigned = error.assigned if isinstance(error, CaptureError) else ()
        unwatched = frozenset(Attribute(*pair) for pair in assigned)
        declined = _declined(maker, call, Fallback(maker.name, "", str(error)), unwatched)
        if isinstance(error, RequiresGradOfArguments):
            return replace(declined, needing=error.positions)
        if isinstance(error, Assigns) or assigned:
            declined = _tried_again(maker, declined, call)
        if not isinstance(error, CaptureError):
            return declined
        return replace(declined, in_parts=not (declined.once or maker.frozen), passing=error.depends)
    except (FaultWarning, NotYet):  # the user made warnings errors
        raise
    except Exception as error:  # a fault in fuse must not reach the user
        return _declined(maker, call, Fallback(maker.name, "", reason_of_fault(error)))
    for fallback in program.fallbacks:
        maker.warn(f"{fallback.op} at {fallback.source or '?'} runs op by op: {fallback.reason}")
    if graph is not None:
        program.fallbacks += tuple(_left_out(failed) for failed in graph.meta["failed"])
    carry = carried(maker.model, signature, call.leaves, call.spec)
    given = carry.extend(call.leaves, call.spec) if carry else (call.leaves, call.spec)
    if new := [one.attribute for one in signature.mutated if one.attribute not in maker.kept]:
        maker.kept += tuple(new)
        if training is None and maker.needs_gradients(given[0]):  # only the attributes need them
            return make(maker, call, family, alike)
    sources = sources_of(signature.inputs, maker.model, len(call.leaves))
    guard = call_guard(*given, sources, maker.ids(), signature.context)
    learning, confirmation = signature.learning, _confirmed(program, signature, ending)
    drawing = drawing_of(signature)
    if confirmation or (drawing and drawing.drawn.comparisons):
        family = family or Family()
        if learning is not None and truths_read(learning.learned):
            family.loops()
    return Compiled(
        guard,
        program,
        graph,
        confirmation.reconstruct if confirmation and ending else reconstruction(signature),
        frozenset(mutation.input_index for mutation in signature.mutations),
        None if training else effects_on_inputs(signature),
        training=training,
        carried=carry,
        unwatched=frozenset(maker.kept),
        ungraded=signature.ungraded,
        learning=learning,
        confirmation=confirmation,
        family=family,
        ending=ending,
        resized=resized is not None,
        inference=signature.inference and training is None,
        drawing=drawing,
    )


def of_size(
    maker: Maker,
    call: ModelCall,
    sized: SizedProgram | Training,
    sources: Sequence[int | Tensor],
    model_tensors: Set[int],
    family: Family[Compiled] | None,
) -> Compiled:
    """The variant of a program or training that was made without a graph; ``sources`` are those of the
    call's placeholders, and ``model_tensors`` has the ``id`` of each tensor of the model. ``family`` is that of other
    specialisations of the call."""
    signature = sized.signature
    guard = call_guard(call.leaves, call.spec, sources, model_tensors, signature.context)
    confirmation = _confirmed(sized.program, signature)
    return Compiled(
        guard,
        sized.program,
        None,
        reconstruction(signature),
        frozenset(mutation.input_index for mutation in signature.mutations),
        None if isinstance(sized, Training) else effects_on_inputs(signature),
        training=sized if isinstance(sized, Training) else None,
        carried=carried(maker.model, signature, call.leaves, call.spec),
        unwatched=frozenset(maker.kept),
        ungraded=signature.ungraded,
        learning=signature.learning,
        confirmation=confirmation,
        family=(family or Family()) if confirmation else None,
        resized=True,
        inference=signature.inference and isinstance(sized, SizedProgram),
    )


def _confirmed(program: Program | Reference, signature: Signature, ending: Ending | None = None) -> Confirmation | None:
    """The confirmation of the values that Python learned, which ``program`` calls from now on; None without such."""
    if signature.learning is None or not signature.learning.learned:
        return None
    confirmation = Confirmation(signature.learning, ending)
    program.confirm = confirmation
    return confirmation


def _trained(signature: Signature) -> tuple[Tensor, ...]:
    """Tensors with ``requires_grad`` that are neither of the model nor arguments."""
    return tuple(spec.value for spec in signature.inputs if isinstance(spec.value, Tensor) and spec.value.requires_grad)


def _longer(ending: Ending, alike: Sequence[Compiled]) -> Compiled | None:
    """A specialisation whose loop takes more steps, and that serves calls with this ending too; None if there is
    none."""
    for compiled in alike:
        if compiled.ending and compiled.confirmation and compiled.ending.includes(ending):
            compiled.confirmation.serve({ending.count: ending})
            return compiled
    return None


# ---- graphs ----------------------------------------------------------------------------------------------------------


def joint(maker: Maker, call: ModelCall, begin: Begin | None = None) -> tuple[GraphModule, Training | None]:
    """The call captured with its gradients: the forward graph, and its training; None if nothing needs gradients."""
    if maker.frozen:
        raise FuseError("the call needs gradients, but the weights are frozen")
    by_loop = by_loops(maker.passes, maker.fuel)
    model, args, kwargs, shorten = maker.model, call.args, call.kwargs, _may_shorten(maker)
    with loops_watched():
        found = capture_joint(model, args, kwargs, maker.kept, by_loop, converts=maker.converts, shorten=shorten)
    _decline(without_kernels(found.forward))

    def rewritten(graph: GraphModule) -> None:
        _rewrite(maker, graph)

    if found.backward is None:
        rewritten(found.forward)
        return found.forward, None
    begins = begin or (lambda graph: _begin(maker, graph))
    return found.forward, Training(found, rewritten, begins, maker.lock, maker.losses_of(call))


def captured(maker: Maker, call: ModelCall) -> GraphModule:
    """The call, captured and rewritten; most steps of long loops are captured only where they do not become a loop."""
    record = capture_short if _may_shorten(maker) else capture
    with loops_watched():
        graph = record(maker.model, call.args, call.kwargs, maker.kept, maker.converts)
    _decline(without_kernels(graph))
    short = graph
    try:
        return _prepared(maker, graph)
    except StepsNeeded:
        return _prepared(maker, whole_graph(short))


def _may_shorten(maker: Maker) -> bool:
    """Whether loops are rolled, and passes of others run behind that: they need not know of steps that are left out."""
    chosen = registry.select(maker.passes)
    before = list(takewhile(lambda info: info.name != roll_whole_loops.__name__, chosen))
    return maker.fuel is None and len(before) < len(chosen) and all(info.origin.startswith("fuse.") for info in before)


def _prepared(maker: Maker, graph: GraphModule) -> GraphModule:
    if maker.frozen:
        freeze(graph, maker.model, maker.variable)
    _rewrite(maker, graph)
    return graph


def _rewrite(maker: Maker, graph: GraphModule) -> None:
    graph.meta["failed"] = run_passes(graph, maker.passes, maker.fuel).failed


def _left_out(failed: Failed) -> Fallback:
    return Fallback(f"pass {failed.pass_name}", failed.source, f"failed and was left out: {failed.reason}")


# ---- programs --------------------------------------------------------------------------------------------------------


def _build(maker: Maker, graph: GraphModule) -> Program | Reference:
    return _finished(maker, graph, lambda: program_of(graph))


def _begin(maker: Maker, graph: GraphModule) -> Finish:
    """Like ``_build``, but kernels are compiled in the background; the returned function waits for them."""
    program = begun(graph)
    return lambda: _finished(maker, graph, program)


def _finished(maker: Maker, graph: GraphModule, program: Callable[[], Program]) -> Program | Reference:
    try:
        return program()
    except (CompilerMissing, CompileFailed) as error:
        return Reference(graph, Fallback(maker.name, "", str(error)))


# ---- what runs eager -------------------------------------------------------------------------------------------------


def _decline(reason: str | None) -> None:
    if reason is not None:
        raise FuseError(reason)


def _declined(
    maker: Maker, call: ModelCall, reason: Fallback, unwatched: frozenset[Attribute] = frozenset()
) -> Compiled:
    first = {id(leaf): i for i, leaf in reversed(list(enumerate(call.leaves))) if isinstance(leaf, Tensor)}
    held = maker.tensors()
    state = [tensor for tensor in held if id(tensor) not in first]
    guard = call_guard(call.leaves, call.spec, [*sorted(first.values()), *state], maker.ids())
    return Compiled(guard, None, reason=reason, unwatched=unwatched | set(maker.kept))


def _tried_again(maker: Maker, declined: Compiled, call: ModelCall) -> Compiled:
    """Let the first call that changes something run eager once.

    A cache that it fills exists in the next call, which then changes nothing and is captured.
    """
    if any(guard.match(call.leaves, call.spec, modes()) is not None for guard in maker.changing):
        return declined
    maker.changing = (declined.guard, *maker.changing)[:LARGEST_VARIANTS]
    assert declined.reason is not None
    hope = f"{declined.reason.reason}; the next such call is captured if it changes nothing"
    reason = replace(declined.reason, reason=hope)
    maker.filling = (reason,)
    if len(maker.changing) == LARGEST_FILLS:
        maker.warn(f"{maker.name} ran eager in {LARGEST_FILLS} kinds of calls: {reason.reason}")
    return replace(declined, reason=reason, once=True)
