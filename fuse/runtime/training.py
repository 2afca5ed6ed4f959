"""Training: forward and backward as two programs behind one node of autograd.

    call      -> forward program  -> results, and what is saved
    backward  -> backward program -> gradients of inputs and parameters    begun at once, awaited at first use

Autograd outside of the model sees one function of all its inputs and parameters, so that accumulation, hooks on
leaves, clipping, loss scaling and optimizers work as always. What is saved is handed to autograd, which notices when
somebody writes to it in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fuse.gradients.absent import without
from fuse.gradients.saved import settle
from fuse.graph.halves import Given
from fuse.graph.joint import Joint
from fuse.graph.locks import ForkedLock
from fuse.graph.signature import Signature
from fuse.kernel.sized import call_at_hand, lowering_of
from fuse.runtime.call_code import empty
from fuse.runtime.predicted import Mispredicted, PositionOutOfRange
from fuse.runtime.program import Program
from fuse.runtime.reference import Reference
from fuse.runtime.result_reconstruction import Playback, play_leaves
from fuse.runtime.saved_memory import SavedMemory, can_be_used_again
from fuse.runtime.steps import Fallback, Launches

TWICE = (
    b"gradients of gradients are not supported by fuse.compile: run the model itself, not the compiled one, for them"
)

Finish = Callable[[], Program | Reference]
"""Waits until the kernels of a program are compiled."""

Begin = Callable[[GraphModule], Finish]


@dataclass
class Ran:
    """What one call launched in its backward pass; None until it ran."""

    backward: Launches | None = None
    regions: int = 0
    fallbacks: tuple[Fallback, ...] = ()


@dataclass
class _Backward:
    """The backward half for one choice of tangents. ``gradients``: of each forward placeholder, the position."""

    finish: Finish
    graph: GraphModule
    gradients: tuple[int | None, ...]
    constants: tuple[Tensor, ...]

    @cached_property
    def program(self) -> Program | Reference:
        return self.finish()


@dataclass(frozen=True)
class RewrittenHalves:
    """What the passes made of a call with gradients: ``backward`` is for a loss of all results. ``gradients`` are those
    of :class:`_Backward`."""

    given: tuple[Given, ...]
    backward: GraphModule
    gradients: tuple[int | None, ...]


@dataclass(eq=False)
class Training:
    """One call's forward and backward half, built.

    ``rewrite`` runs the passes on a graph, ``begin`` begins to make a program of it; both are called once more for each
    choice of results that a loss is made of. While the forward kernels are compiled, the backward half for a loss of
    all results is rewritten and its kernels begun. With ``rewritten``, the forward graph and that half are ready.
    """

    joint: Joint
    rewrite: Callable[[GraphModule], None]
    begin: Begin
    lock: ForkedLock
    rewritten: RewrittenHalves | None = None
    program: Program | Reference = field(init=False)
    signature: Signature = field(init=False)
    rebuild: Playback = field(init=False)

    def __post_init__(self) -> None:
        joint, forward = self.joint, self.joint.forward
        self._call = call_at_hand()
        assert joint.backward is not None
        if self.rewritten is None:
            self.rewrite(forward)
        self.signature = forward.meta["signature"]
        ready = self.rewritten
        self.given = ready.given if ready else settle(forward, joint.backward, joint.given)
        finish = self.begin(forward)
        self.rebuild = play_leaves(self.signature, joint.detached)
        self._halves: dict[frozenset[int], _Backward] = {}
        # Behind what it is given, a graph that was rewritten takes constants of passes.
        self._layouts = {
            what.index: node.meta["val"]
            for what, node in zip(self.given, joint.backward.graph.find_nodes(op="placeholder"), strict=ready is None)
            if what.kind == "tangent"
        }
        self._copies = {i: _new_like(layout) for i, layout in self._layouts.items()}
        self._leaves = tuple(i for i, spec in enumerate(self.signature.outputs) if spec.kind == "graph")
        # Inputs that get no gradient: autograd must not look for what they were made of.
        self._unlinked = tuple(i for i, gradient in enumerate(joint.gradients) if gradient is None)
        self._constant = tuple(number for number, i in enumerate(self._leaves) if i not in joint.trained)
        bases = [self.signature.outputs[i].index for i in self._leaves]
        saved = {what.index for what in self.given if what.kind == "saved"}
        self._shared = frozenset(b for b in bases if bases.count(b) > 1 or b in saved)
        half = self._begun(ready.backward, ready.gradients) if ready else self._make_half(frozenset())
        self._halves[frozenset()] = half
        self.rewritten = RewrittenHalves(self.given, half.graph, half.gradients)
        self.program = finish()
        if isinstance(self.program, Program):
            written = (mutation.value_index for mutation in self.signature.mutations)
            self.program.save_in_blocks(saved.difference(bases, written))

    def run(self, tensors: Sequence[Tensor]) -> tuple[Any, Launches | int, Ran]:
        """As ``Program.run``, but that it returns the model's result."""
        ran = Ran()
        call = _Call(self, ran)
        linked = list(tensors)
        for i in self._unlinked:
            linked[i] = tensors[i].detach()
        try:
            leaves = _Step.apply(call, *linked)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        except Exception as error:
            if call.saves:
                raise RaisedByHook(error) from error
            raise
        for mutation in self.signature.mutations:
            torch.autograd.graph.increment_version(tensors[mutation.input_index])
        return self.rebuild(leaves, tensors), call.launches, ran

    def forward(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor | None], tuple[Tensor, ...], Launches | int]:
        """The values of the forward graph, the leaves of the result that are new, and what was launched."""
        values, launches = self.program.run(tensors)
        return values, tuple(self._leaf(i, values) for i in self._leaves), launches

    def _leaf(self, position: int, values: Sequence[Tensor | None]) -> Tensor:
        spec = self.signature.outputs[position]
        whole, view = values[spec.index], spec.view
        assert whole is not None
        if position not in self.joint.trained and spec.index in self._shared:
            whole = whole.detach()  # the one that it shares memory with may need gradients
        if view is None:
            return whole
        offset = whole.storage_offset() + view.offset
        if spec.index in self._shared:  # autograd must know who shares the memory
            return whole.as_strided(view.size, view.stride, offset)
        return whole.new_empty(0).set_(whole.untyped_storage(), offset, view.size, view.stride)

    def backward(self, saved: Sequence[Tensor], tangents: Sequence[Tensor | None], ran: Ran) -> list[Tensor | None]:
        """The gradients of the placeholders. ``saved`` are the tensors given but for tangents, in order."""
        missing = frozenset(i for i in self._layouts if tangents[self._leaves.index(i)] is None)
        if len(missing) == len(self._layouts):
            return [None] * len(self.signature.inputs)
        half = self._half(missing)
        kept = iter(saved)
        given = [w for w in self.given if w.kind != "tangent" or w.index not in missing]
        inputs: list[Any] = [
            tangents[self._leaves.index(w.index)] if w.kind == "tangent" else next(kept) for w in given
        ]
        if any(map(_is_batched, inputs)):  # many gradients at once
            values = half.graph(*inputs, *half.constants)
            return [None if i is None else values[i] for i in half.gradients]
        copies = 0
        for number, what in enumerate(given):
            if what.kind == "tangent" and not _lies_as(inputs[number], self._layouts[what.index]):
                inputs[number] = self._copies[what.index]().copy_(inputs[number])
                copies += 1
        inputs += half.constants
        try:
            values, launches = half.program.run(inputs)
            fallbacks = half.program.fallbacks
        except (Mispredicted, PositionOutOfRange) as error:
            reference = Reference(half.graph, Fallback("backward", "", f"{type(error).__name__}: {error}"))
            values, launches = reference.run(inputs)
            fallbacks = reference.fallbacks
        native = Launches.unpack(launches)
        ran.regions, ran.fallbacks = half.program.regions, fallbacks
        ran.backward = Launches(native.kernels, native.libraries, native.aten + copies)
        return [None if i is None else values[i] for i in half.gradients]

    def _half(self, missing: frozenset[int]) -> _Backward:
        with self.lock:
            if missing not in self._halves:
                with lowering_of(self._call):  # autograd's threads know of no call
                    self._halves[missing] = self._make_half(missing)
            return self._halves[missing]

    def _make_half(self, missing: frozenset[int]) -> _Backward:
        """The backward half where the loss is not made of the leaves ``missing``."""
        raw = self.joint.backward
        assert raw is not None
        absent = [i for i, what in enumerate(self.given) if what.kind == "tangent" and what.index in missing]
        graph, kept = without(raw, absent, copied=len(self._layouts) > 1)
        self.rewrite(graph)
        inputs = self.signature.inputs
        gradients = tuple(None if i is None else kept[i] for i in self.joint.gradients)
        added = (None,) * (len(inputs) - len(gradients))  # constants of passes
        return self._begun(graph, gradients + added)

    def _begun(self, graph: GraphModule, gradients: tuple[int | None, ...]) -> _Backward:
        constants = tuple(spec.value for spec in graph.meta["signature"].inputs if spec.value is not None)
        return _Backward(self.begin(graph), graph, gradients, constants)

    # ---- other sizes -----------------------------------------------------------------------------------------------

    def graphs(self) -> tuple[GraphModule, ...]:
        """The graphs that differ between sizes: the forward half, the backward half for a loss of all results, and what
        that was made of, where others may be made of it."""
        assert self.rewritten is not None
        assert self.joint.backward is not None
        own = () if self.joint.backward is self.rewritten.backward else (self.joint.backward,)
        return self.joint.forward, self.rewritten.backward, *own

    def beside(self) -> str:
        """What else has to be the same for calls of other sizes."""
        assert self.rewritten is not None
        joint, ready = self.joint, self.rewritten
        return repr((joint.gradients, sorted(joint.trained), sorted(joint.detached), ready.given, ready.gradients))

    def with_graphs(self, graphs: Sequence[GraphModule]) -> Training:
        """The same call at other sizes, of which these are the :meth:`graphs`."""
        assert self.rewritten is not None
        forward, backward, *own = graphs
        joint = replace(self.joint, forward=forward, backward=own[0] if own else backward)
        return Training(joint, self.rewrite, self.begin, self.lock, replace(self.rewritten, backward=backward))


@dataclass
class _Call:
    """One call on its way through autograd."""

    training: Training
    ran: Ran
    launches: Launches | int = 0
    saves: bool = False  # whether the program has run, and autograd saves tensors


class RaisedByHook(Exception):
    """A hook of saved tensors raised ``error``, as ``torch.utils.checkpoint`` does where it has what it wants."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _Step(torch.autograd.Function):
    """The node of autograd that a compiled call is."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        training = call.training
        values, leaves, call.launches = training.forward(tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(leaves[i] for i in training._constant))
        given = (what for what in training.given if what.kind != "tangent")
        ctx.save_for_backward(*(tensors[g.index] if g.kind == "input" else values[g.index] for g in given))
        ctx.training, ctx.ran = training, call.ran
        call.saves = True
        return leaves

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        if not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):  # 4 us less than to enter both
            return None, *ctx.training.backward(ctx.saved_tensors, tangents, ctx.ran)
        saved = ctx.saved_tensors
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            gradients = ctx.training.backward(saved, tangents, ctx.ran)
        if not torch.is_grad_enabled():
            return None, *gradients
        leaves = [node.variable for node, _ in ctx.next_functions if hasattr(node, "variable")]
        made_of = [one for one in (*saved, *tangents, *leaves) if one is not None and one.requires_grad]
        return None, *_once(gradients, made_of)


def _is_batched(tensor: Tensor) -> bool:
    functorch: Any = torch._C._functorch
    return bool(functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def _new_like(layout: Tensor) -> Callable[[], Tensor]:
    """Makes tensors that lie like ``layout``."""
    if can_be_used_again([layout]):
        memory = SavedMemory([layout])
        return lambda: memory.take()[0]
    return partial(empty, tuple(layout.shape), layout.stride(), layout.dtype)


def _lies_as(tangent: Tensor, layout: Tensor) -> bool:
    return tangent.stride() == layout.stride() and not tangent.is_neg() and not tangent.is_conj()


def _once(gradients: Sequence[Tensor | None], made_of: Sequence[Tensor]) -> list[Tensor | None]:
    """The same gradients, but that their own gradients raise, by whichever of ``made_of`` they are taken."""
    made = [gradient for gradient in gradients if gradient is not None]
    guard = torch._C._functions.DelayedError(TWICE, len(made) + len(made_of))
    guarded = iter(guard(*(gradient.detach().requires_grad_() for gradient in made), *made_of))
    return [None if gradient is None else next(guarded) for gradient in gradients]
