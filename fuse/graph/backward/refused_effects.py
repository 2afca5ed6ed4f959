"""Effects on autograd's state that graphs of a call and its gradients would not repeat: the call is not captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules import module as _module

from fuse.errors import CaptureError
from fuse.graph.functional.recorded_inputs import RecordedInputs
from fuse.graph.functional.tensor_values import Functionalizer
from fuse.graph.signature import Mutation
from fuse.graph.sources import user_line
from fuse.graph.state.saved_by_autograd import autograd_nodes


def refuse_hooks(model: nn.Module) -> None:
    """Raise ``CaptureError`` if a module has a backward hook."""
    if _module._global_backward_hooks or _module._global_backward_pre_hooks:
        raise CaptureError("a backward hook is registered for all modules")
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(f"module {name or type(module).__name__} has a backward hook")


def refuse_reshaped(functional: Functionalizer, inputs: RecordedInputs, op: OpOverload, tensor: Tensor) -> None:
    """Raise ``CaptureError`` for an in-place change of the shape of a tensor that is a view, or has views.

    Autograd then makes those views again by strides; those of fake tensors are made by their operators, on the new
    shape.
    """
    functional.whole()
    if id(tensor) in inputs.data:
        raise CaptureError(f"{op} at {user_line()} changes the shape of an input that needs gradients")
    own = functional.aliases.get(id(tensor))
    same = (alias.tensor for alias in functional.aliases.values() if own is None or alias.base is own.base)
    if tensor._is_view() or any(other._base is tensor for other in same):
        raise CaptureError(f"{op} at {user_line()} changes the shape of a tensor with views, and gradients are taken")


def refuse_writes(inputs: RecordedInputs, mutations: Sequence[Mutation]) -> bool:
    """Raise ``CaptureError`` if autograd would see a write to an input that needs gradients. Returns whether it does
    not see such a write."""
    written = [(one, inputs.placeholders[one.input_index]) for one in mutations]
    needing = [(one, fake) for one, fake in written if fake.requires_grad]
    for mutation, fake in needing:
        if not (fake.is_leaf and inputs.data[id(fake)].is_leaf):  # autograd sees no write to a leaf
            raise CaptureError(f"forward writes {inputs.specs[mutation.input_index].name}, which needs gradients")
    return bool(needing)


def refuse_effects(functional: Functionalizer, inputs: RecordedInputs, leaves: Sequence[Any]) -> None:
    """Raise ``CaptureError`` for new parameters and hooks that a call leaves behind, and for inputs that share
    memory. ``leaves`` are those of its result."""
    made = {id(leaf) for leaf in leaves if isinstance(leaf, nn.Parameter)} - set(map(id, inputs.placeholders))
    if made and any(id(getattr(node, "variable", None)) in made for node in autograd_nodes(leaves)):
        raise CaptureError("the result has a gradient with respect to a parameter that forward makes")
    if any(alias.tensor._backward_hooks or alias.tensor.retains_grad for alias in functional.aliases.values()):
        raise CaptureError("forward registers a hook on a tensor; a graph cannot hold that")
    needing: dict[int, bool] = {}
    for fake in inputs.placeholders:
        storage = functional.former.get(id(fake), fake).untyped_storage()._cdata
        if storage in needing and (fake.requires_grad or needing[storage]):
            raise CaptureError("two inputs share memory, and one needs gradients")
        needing[storage] = fake.requires_grad
