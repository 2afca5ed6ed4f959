"""A compiled call as one node of autograd.

apply(Ran(training), *tensors)   -> the forward program runs; autograd saves tensors
    backward                         -> the backward program runs; its graph, where gradients are differentiated again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from fuse.devices import without_autocast
from fuse.runtime.autograd.differentiable import TWICE, InputsOfCall, versions
from fuse.runtime.programs.steps import Fallback, Launches

if TYPE_CHECKING:
    from fuse.runtime.autograd.training import Training


@dataclass(eq=False)
class Ran:
    """The record of one call: its launches, and those of its backward pass once that has run.

    ``saves``: whether the forward program has run, and autograd saves tensors. ``launched``, ``copies`` (of tangents),
    ``regions`` and ``fallbacks`` belong to the backward pass. ``passed``: the results, by position, through which
    gradients of other results flow.
    """

    training: Training
    launches: Launches | int = field(default=0, init=False)
    saves: bool = field(default=False, init=False)
    launched: Launches | int | None = field(default=None, init=False)
    copies: int = field(default=0, init=False)
    regions: int = field(default=0, init=False)
    passed: tuple[tuple[int, ref[Tensor]], ...] = field(default=(), init=False)
    fallbacks: tuple[Fallback, ...] = field(default=(), init=False)

    @property
    def backward(self) -> Launches | None:
        if self.launched is None:
            return None
        native = Launches.unpack(self.launched)
        return Launches(native.kernels, native.libraries, native.aten + self.copies)


class RaisedByHook(Exception):
    """A hook of saved tensors raised ``error``, as ``torch.utils.checkpoint`` does to stop a recomputation early."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class CompiledCall(torch.autograd.Function):
    """The autograd node of a compiled call; its ``hooks``, by place of the result, outlive the tensors."""

    @staticmethod
    def forward(ctx: Any, ran: Ran, *tensors: Tensor) -> tuple[Tensor, ...]:
        training = ran.training
        values, ran.launches = training.program.run(tensors)
        leaves = training.leaves(values)
        ctx.set_materialize_grads(False)
        if training.constant:
            ctx.mark_non_differentiable(*(leaves[i] for i in training.constant))
        saved = training.saved((*tensors, *values))
        if training.outgoing:  # the memory and shape that these tensors have now
            saved = tuple(one.detach() if i in training.outgoing else one for i, one in enumerate(saved))
        if training.effects is not None:
            training.effects(tensors)
        ctx.save_for_backward(*saved)
        ctx.ran = ran
        ctx.given = tuple(map(ref, training.given_alone(tensors)))
        ctx.versions = versions(training.unchanged(tensors))
        ran.saves = True
        return leaves

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        ran: Ran = ctx.ran
        if ran.passed:
            ran.training.refuse_hooks(ran.passed, ctx.hooks, tangents)
        if not torch.is_grad_enabled() and not torch._C._is_any_autocast_enabled():  # 4 us faster than the contexts
            return ran.training.backward(saved, tangents, ran)
        if not torch.is_grad_enabled():
            with without_autocast():
                return ran.training.backward(saved, tangents, ran)
        return _with_history(ctx, saved, tangents)


def _with_history(ctx: Any, saved: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The result of ``CompiledCall.backward`` where its gradients may be differentiated."""
    ran: Ran = ctx.ran
    training = ran.training
    training.twice = True
    leaves = {i: node.variable for i, (node, _) in enumerate(ctx.next_functions) if node is not None and _is_leaf(node)}
    inputs = InputsOfCall(
        training.signature.inputs,
        leaves,
        {i: saved[number] for i, number in training.saved_inputs.items()},
        dict(zip(training.not_saved, ctx.given, strict=True)),
    )
    with without_autocast():
        found = training.differentiable(saved, tangents, inputs, ctx.versions)
        if not isinstance(found, str):
            ran.launched, ran.fallbacks = 0, (Fallback("backward", "", TWICE),)
            return found
        with torch.no_grad():
            gradients = training.backward(saved, tangents, ran)
    made_of = [one for one in (*saved, *tangents, *leaves.values()) if one is not None and one.requires_grad]
    return _once(gradients, made_of, found)


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "variable")


apply: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, CompiledCall).apply
"""``CompiledCall.apply`` without its Python code for ``torch.func``."""
transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
_node: Any = CompiledCall._backward_cls
_node.apply = CompiledCall.backward  # torch's own method looks this function up in each call
_node.hooks = ()
_register: Callable[[Any, Tensor], None] = _node._register_hook_dict


def _register_and_note(ctx: Any, result: Tensor) -> None:
    """Take the hooks of a result, as ``Tensor.register_hook`` asks for."""
    ctx.hooks += ((result.output_nr, result._backward_hooks),)
    _register(ctx, result)


_node._register_hook_dict = _register_and_note


def _once(gradients: Sequence[Tensor | None], made_of: Sequence[Tensor], reason: str) -> tuple[Tensor | None, ...]:
    """The gradients as differentiable tensors whose own gradients raise, with respect to any of ``made_of``."""
    made = [gradient for gradient in gradients if gradient is not None]
    message = (
        f"{TWICE}, and fuse cannot compute them for this call ({reason}): run the model itself, not the compiled one"
    )
    guard = torch._C._functions.DelayedError(message.encode(), len(made) + len(made_of))
    guarded = iter(guard(*(gradient.detach().requires_grad_() for gradient in made), *made_of))
    return tuple(None if gradient is None else next(guarded) for gradient in gradients)
