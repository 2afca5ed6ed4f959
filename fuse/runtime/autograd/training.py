"""Training: a forward and a backward program as one autograd node.

    call      -> forward program  -> results and saved tensors
    backward  -> backward program -> gradients of inputs and parameters    compiled in the background, awaited at first
    use

To autograd, the model is one function of its inputs and parameters, so that accumulation, hooks on leaves, clipping,
loss scaling and optimizers work as usual. Autograd holds the saved tensors, and detects writes to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import ref

from torch import Tensor
from torch.fx import GraphModule

from fuse.gradients.absent import without
from fuse.gradients.saved import settle
from fuse.graph.backward.backward_graph import BackwardInput
from fuse.graph.backward.joint_graphs import Joint
from fuse.graph.locks import ForkedLock
from fuse.graph.signature import Signature
from fuse.kernel.sizes.sized import call_at_hand, lowering_of
from fuse.runtime.autograd.autograd_node import CompiledCall, RaisedByHook, Ran, apply, transforms
from fuse.runtime.autograd.differentiable import (
    TWICE,
    InputsOfCall,
    WithStatistics,
    dependent,
    refusal,
    same_values,
    versions,
)
from fuse.runtime.autograd.hooked_results import HOOKED, Hooks, Results, is_read, retaining
from fuse.runtime.autograd.losses import Losses
from fuse.runtime.autograd.tangents import Tangent, is_batched, memory_like
from fuse.runtime.guards.call_guards import picker
from fuse.runtime.programs.input_effects import effects_on_inputs
from fuse.runtime.programs.layout import same_layout
from fuse.runtime.programs.predicted import KernelFailed, Mispredicted
from fuse.runtime.programs.program import Program
from fuse.runtime.programs.reference import Reference
from fuse.runtime.programs.result_reconstruction import Reconstruction, reconstruct_leaves
from fuse.runtime.programs.steps import Fallback, Launches
from fuse.runtime.resizing.sized_programs import SizedProgram

Finish = Callable[[], Program | Reference]
"""A function that waits until a program's kernels are compiled, and returns the program."""

Begin = Callable[[GraphModule], Finish]

CHANGED = "an input of the call was changed since"


@dataclass
class _Backward:
    """The backward program for one set of tangents.

    ``pick`` selects its inputs from ``(*saved tensors, *tangents)``; ``tangents`` are those among its inputs.
    ``select`` selects None and the gradients of the forward placeholders from ``(*values, None)``. ``constants`` are
    further inputs. ``written``: positions and layouts of the inputs that the call wrote. ``graph_later`` gives the
    graph, which is made when it is needed if no graph was needed so far.
    """

    finish: Finish
    graph_later: Callable[[], GraphModule]
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    tangents: tuple[Tangent, ...]
    select: Callable[[Sequence[Any]], tuple[Any, ...]]
    constants: tuple[Tensor, ...]
    written: tuple[tuple[int, Tensor], ...]

    @cached_property
    def program(self) -> Program | Reference:
        return self.finish()

    @property
    def graph(self) -> GraphModule:
        return self.graph_later()


@dataclass(frozen=True)
class RewrittenGraphs:
    """The rewritten backward graph of a call, for a loss of all results but those in ``missing``.

    ``given`` are its inputs, with the tangents of missing results. ``gradients``: for each forward placeholder, the
    position of its gradient among the outputs.
    """

    given: tuple[BackwardInput, ...]
    backward: GraphModule
    gradients: tuple[int | None, ...]
    missing: frozenset[int]


@dataclass(frozen=True)
class SizedTraining:
    """The forward and the backward program of a call at other sizes, and its :meth:`Training.graphs`, which are made
    when they are needed. The tensors of the backward program have the layouts of the tangents of all results."""

    forward: SizedProgram
    backward: SizedProgram
    graphs: Callable[[], Sequence[GraphModule]]


@dataclass(eq=False)
class Training:
    """The forward program and the backward programs of one call.

    ``rewrite`` runs the passes on a graph, ``begin`` starts the compilation of its program; both are called again for
    each set of results that a loss uses. While the forward kernels are compiled, the backward graph for the loss that
    ``losses`` tell is rewritten and its kernels are started. With ``rewritten``, both graphs are rewritten already.
    With ``sized``, both have programs, and ``joint`` and ``rewritten`` are those of a call at other sizes.
    ``twice``: gradients of its gradients were taken. ``making``: the seconds that backward programs for other losses
    took to make.
    """

    joint: Joint
    rewrite: Callable[[GraphModule], None]
    begin: Begin
    lock: ForkedLock
    losses: Losses
    rewritten: RewrittenGraphs | None = None
    sized: SizedTraining | None = None
    twice: bool = False
    making: float = 0.0
    program: Program | Reference = field(init=False)
    signature: Signature = field(init=False)
    rebuild: Reconstruction = field(init=False)

    def __post_init__(self) -> None:
        joint, forward, sized = self.joint, self.joint.forward, self.sized
        assert joint.backward is not None
        if self.rewritten is None:
            self.rewrite(forward)
        self.signature = sized.forward.signature if sized else forward.meta["signature"]
        ready = self.rewritten
        self.given = ready.given if ready else settle(forward, joint.backward, joint.given)
        finish = (lambda: sized.forward.program) if sized else self.begin(forward)
        self.rebuild = reconstruct_leaves(self.signature)
        self._layouts = self.layouts_in(joint.backward)
        inputs_of_backward = zip(self.given, joint.backward.graph.find_nodes(op="placeholder"), strict=False)
        self._written = {what.index: one.meta["val"] for what, one in inputs_of_backward if what.kind == "written"}
        self._copies = {i: memory_like(layout) for i, layout in self._layouts.items()}
        self._leaves = tuple(i for i, spec in enumerate(self.signature.outputs) if spec.kind == "graph")
        self._tangents = {i: self._leaves.index(i) for i in self._layouts}
        # Inputs without a gradient are detached, so that autograd does not follow them. If no input has a gradient, the
        # results must require gradients all the same (``vector_norm(x, 0)``).
        # Objects that get other data are saved themselves.
        reassigned = frozenset(self.signature.reassigned)
        changed = reassigned.union(one.input_index for one in self.signature.reshaped)
        unlinked = tuple(i for i, gradient in enumerate(joint.gradients) if gradient is None and i not in reassigned)
        self._unlinked = unlinked if len(unlinked) < len(joint.gradients) else ()
        self.constant = tuple(number for number, i in enumerate(self._leaves) if i not in joint.requires_grad)
        bases = [self.signature.outputs[i].index for i in self._leaves]
        saved = {what.index for what in self.given if what.kind == "saved"}
        self._shared = frozenset(b for b in bases if bases.count(b) > 1 or b in saved)
        self.leaves = self._leaves_of(bases)
        inputs = len(self.signature.inputs)
        kept = [what for what in self.given if what.kind != "tangent"]
        self.saved = picker([what.index + (inputs if what.kind == "saved" else 0) for what in kept])
        self.outgoing = tuple(n for n, what in enumerate(kept) if what.kind == "input" and what.index in changed)
        self.saved_inputs = {what.index: number for number, what in enumerate(kept) if what.kind == "input"}
        self.effects = effects_on_inputs(self.signature)
        self.written = frozenset(mutation.input_index for mutation in self.signature.mutations)
        self.not_saved = tuple(i for i in range(inputs) if i not in self.saved_inputs)
        self.given_alone = picker(self.not_saved)
        self.unchanged = picker([i for i in self.not_saved if i not in self.written])
        call = call_at_hand()
        self._forward_call = call and call.so_far()
        if ready is None:
            expected = self.losses.expected()
            ready = self._rewritten_backward(expected if expected < self._layouts.keys() else frozenset())
        self.rewritten = ready
        self.by_loss = {ready.missing: ready}
        self.backwards = {ready.missing: self._begun(ready, sized)}
        self.program = finish()
        if isinstance(self.program, Program):
            written = (mutation.value_index for mutation in self.signature.mutations)
            self.program.save_in_blocks(saved.difference(bases, written))

    def layouts_in(self, backward: GraphModule) -> dict[int, Tensor]:
        """Fake tensors of the tangents' layouts in a backward graph for a loss of all results, by result."""
        results = [what.index for what in self.given if what.kind == "tangent"]
        if self.sized is not None:
            return dict(zip(results, self.sized.backward.tensors, strict=True))
        # A rewritten graph has constants of passes as further inputs at the end.
        inputs = zip(self.given, backward.graph.find_nodes(op="placeholder"), strict=self.rewritten is None)
        return {what.index: node.meta["val"] for what, node in inputs if what.kind == "tangent"}

    def run(self, tensors: Sequence[Tensor], containers: Sequence[Any] = ()) -> tuple[Any, Launches | int, Ran]:
        """Run the forward program as an autograd node: the model's result, the launches, and the record of the call."""
        ran = Ran(self)
        linked = tensors
        for i in self._unlinked:
            if linked[i].requires_grad:
                linked = [*linked[:i], linked[i].detach(), *linked[i + 1 :]]
        try:
            leaves = (CompiledCall.apply if transforms() else apply)(ran, *linked)
        except Exception as error:
            if ran.saves:
                raise RaisedByHook(error) from error
            raise
        if self.joint.later:
            ran.passed = tuple((i, ref(leaves[self._tangents[i]])) for i in self.joint.later if i in self._tangents)
        return self.rebuild(leaves, (*tensors, *containers)), ran.launches, ran

    def refuse_hooks(self, passed: Results, hooks: Hooks, tangents: Sequence[Tensor | None]) -> None:
        """Refuse hooks on results that eager would give the gradients of other results, too.

        ``hooks`` are those of results, by place among ``tangents``; of the results ``passed``, some keep gradients.

        Raises:
            RuntimeError: there is such a hook.
        """
        hooked = [self._leaves[place] for place, found in hooks if found]
        if is_read([*hooked, *retaining(passed)], self.joint.later, self._tangents, tangents):
            self.losses.gives_up = HOOKED
            raise RuntimeError(
                f"{HOOKED}, and a compiled call computes both at once: call again (fuse now runs such calls eager), or "
                "run the model itself"
            )

    @property
    def gives_up(self) -> str | None:
        """Why later calls run eager."""
        return TWICE if self.twice else self.losses.gives_up

    def wait(self) -> None:
        """Wait until the backward program for the expected loss is compiled.

        Raises:
            NotYet: kernels would have to be compiled, which the caller does not allow now.
        """
        for backward in self.backwards.values():
            _ = backward.program

    def _leaves_of(self, bases: Sequence[int]) -> Callable[[Sequence[Tensor | None]], tuple[Any, ...]]:
        """A function that selects the new tensors of the model's result from the values of the forward graph."""
        if self._shared or any(self.signature.outputs[i].view for i in self._leaves):
            return lambda values: tuple(self._leaf(i, values) for i in self._leaves)
        return picker(bases)

    def _leaf(self, position: int, values: Sequence[Tensor | None]) -> Tensor:
        spec = self.signature.outputs[position]
        whole, view = values[spec.index], spec.view
        assert whole is not None
        if position not in self.joint.requires_grad and spec.index in self._shared:
            whole = whole.detach()  # another result that shares its memory may require gradients
        if view is None:
            return whole
        offset = whole.storage_offset() + view.offset
        if spec.index in self._shared:  # autograd must know which results share memory
            return whole.as_strided(view.size, view.stride, offset)
        return whole.new_empty(0).set_(whole.untyped_storage(), offset, view.size, view.stride)

    def backward(self, saved: Sequence[Tensor], tangents: Sequence[Tensor | None], ran: Ran) -> tuple[Any, ...]:
        """Run the backward program: None, then the gradients of the placeholders, as autograd expects them."""
        chosen = self._backward_for(tangents)
        if chosen is None:
            return (None,) * (1 + len(self.signature.inputs))
        inputs = [*chosen.pick((*saved, *tangents)), *chosen.constants]
        copies = 0
        program = chosen.program
        try:
            for tangent in chosen.tangents:
                inputs[tangent.position], copied = tangent.laid_out(inputs[tangent.position], program)
                copies += copied
            for position, layout in chosen.written:
                if not same_layout(inputs[position], layout):
                    raise Mispredicted("another call", "", "an input another layout")
            values, launches = program.run(inputs)
            fallbacks = program.fallbacks
        except (Mispredicted, KernelFailed) as error:
            reference = Reference(chosen.graph, Fallback("backward", "", f"{type(error).__name__}: {error}"))
            values, launches = reference.run(inputs)
            fallbacks = reference.fallbacks
        except RuntimeError:  # batched gradients have no memory of their own
            inputs = [*chosen.pick((*saved, *tangents)), *chosen.constants]
            if not any(is_batched(inputs[tangent.position]) for tangent in chosen.tangents):
                raise
            return chosen.select((*chosen.graph(*inputs), None))
        ran.launched, ran.copies = launches, copies
        ran.regions, ran.fallbacks = program.regions, fallbacks
        return chosen.select((*values, None))

    def differentiable(
        self,
        saved: Sequence[Tensor],
        tangents: Sequence[Tensor | None],
        inputs: InputsOfCall,
        before: Sequence[int | None],
    ) -> tuple[Any, ...] | str:
        """As :meth:`backward`, but the gradients have a history; or the reason why they cannot have one.

        ``before``: the versions that the ``unchanged`` inputs had in the call.
        """
        chosen = self._backward_for(tangents)
        if chosen is None:
            return (None,) * (1 + len(self.signature.inputs))
        if self.signature.reshaped:
            return CHANGED
        forward = self.graphs()[0]
        if reason := self.joint.eagers or refusal((forward, chosen.graph)):
            return reason
        tensors = inputs.tensors()
        if isinstance(tensors, str):
            return tensors
        if versions(self.unchanged(tensors)) != before:
            return CHANGED
        with WithStatistics():
            computed = self.saved((*tensors, *forward(*tensors)))
        if self._reads_written(computed):
            return "the call writes to an input that it reads"
        if (again := same_values(computed, saved)) is None:
            return CHANGED
        given = [*chosen.pick((*again, *tangents)), *chosen.constants]
        for tangent in chosen.tangents:
            given[tangent.position] = tangent.with_history(given[tangent.position])
        with WithStatistics():
            return chosen.select((*chosen.graph(*given), None))

    def _reads_written(self, again: Sequence[Tensor]) -> bool:
        """Whether values with a history, computed ``again``, depend on inputs that the call has written meanwhile."""
        found = dependent(self.graphs()[0], self.written)
        kept = (what for what in self.given if what.kind != "tangent")
        return any(
            one.requires_grad and what.kind == "saved" and what.index in found
            for one, what in zip(again, kept, strict=True)
        )

    def _backward_for(self, tangents: Sequence[Tensor | None]) -> _Backward | None:
        """The backward program for a loss of the results that have gradients; None if no result has one."""
        missing = frozenset([i for i, number in self._tangents.items() if tangents[number] is None])
        if len(missing) == len(self._tangents):
            return None
        if (known := self.backwards.get(missing)) is not None:
            return known
        with self.lock:
            if missing not in self.backwards:
                started = time.perf_counter()
                call = self._forward_call  # autograd's threads have none; another loss has occurrences of its own
                with lowering_of(call and call.so_far()):
                    made = self._rewritten_backward(missing)
                    begun = self._begun(made)
                self.by_loss[missing], self.backwards[missing] = made, begun
                self.losses.seen.add(missing)
                self.making += time.perf_counter() - started
            return self.backwards[missing]

    def _rewritten_backward(self, missing: frozenset[int]) -> RewrittenGraphs:
        """The backward graph for a loss of all results but those in ``missing``."""
        raw = self.graphs()[-1] if self.sized else self.joint.backward
        assert raw is not None
        absent = [i for i, what in enumerate(self.given) if what.kind == "tangent" and what.index in missing]
        graph, kept = without(raw, absent, copied=len(self._layouts) > 1)
        self.rewrite(graph)
        inputs = self.signature.inputs
        gradients = tuple(None if i is None else kept[i] for i in self.joint.gradients)
        added = (None,) * (len(inputs) - len(gradients))  # constants of passes
        return RewrittenGraphs(self.given, graph, gradients + added, missing)

    def _begun(self, ready: RewrittenGraphs, sized: SizedTraining | None = None) -> _Backward:
        graph = ready.backward
        signature: Signature = sized.backward.signature if sized else graph.meta["signature"]
        constants = tuple(spec.value for spec in signature.inputs if spec.value is not None)
        saved = sum(what.kind != "tangent" for what in self.given)
        positions, tangents, number = [], [], 0
        written = tuple((i, self._written[what.index]) for i, what in enumerate(self.given) if what.kind == "written")
        for what in self.given:
            if what.kind != "tangent":
                positions.append(number)
                number += 1
            elif what.index not in ready.missing:
                tangents.append(Tangent(len(positions), self._layouts[what.index], self._copies[what.index]))
                positions.append(saved + self._tangents[what.index])
        select = picker([-1, *(-1 if i is None else i for i in ready.gradients)])
        finish = (lambda: sized.backward.program) if sized else self.begin(graph)
        graph_later = (lambda: self.graphs()[1]) if sized else (lambda: graph)
        return _Backward(finish, graph_later, picker(positions), tuple(tangents), select, constants, written)

    def graphs(self) -> tuple[GraphModule, ...]:
        """The forward graph, and the backward graph for the expected loss; the last one is the backward graph for a
        loss of all results before the passes, unless that has been rewritten."""
        if self.sized is not None:
            return self._graphs_at_sizes
        assert self.rewritten is not None
        assert self.joint.backward is not None
        return self.joint.forward, self.rewritten.backward, self.joint.backward

    @cached_property
    def _graphs_at_sizes(self) -> tuple[GraphModule, ...]:
        assert self.sized is not None
        return tuple(self.sized.graphs())
