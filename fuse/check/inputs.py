"""Identical copies of a model and its arguments, and float64 copies.

A call may change its inputs and buffers, so that every run of a comparison gets its own copy. Tensors that share memory
share it in the copy too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.utils import _pytree as pytree

from fuse.errors import FuseError
from fuse.graph.signature import Attribute
from fuse.graph.state.attributes import INTERNAL, ObjectSnapshot, snapshots_of
from fuse.graph.state.object_contents import contents
from fuse.graph.structure.arguments import containers_of, entries_of, named_leaves, with_tensors
from fuse.graph.structure.result_structure import named_parts


@dataclass(frozen=True)
class CheckCall:
    """A model and the arguments of one call of it."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, function: Callable[..., Any] | None = None) -> Any:
        """The result of the call, or of ``function`` with the same arguments."""
        return (function or self.model)(*self.args, **self.kwargs)

    def tensors(self) -> dict[str, Tensor]:
        """Every strided tensor of the call, by a name for reports: arguments, parameters, buffers, other attributes.

        >>> list(CheckCall(nn.Linear(2, 2), (torch.ones(1, 2),), {}).tensors())
        ['argument [0]', 'parameter weight', 'parameter bias']
        """
        leaves, _ = named_leaves(self.args, self.kwargs)
        found = {f"argument {pytree.keystr(path[1:])}": leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
        found.update({f"parameter {name}": parameter for name, parameter in self.model.named_parameters()})
        found.update({f"buffer {name}": buffer for name, buffer in self.model.named_buffers()})
        known = {id(tensor) for tensor in found.values()}
        held = {name: part for name, part in self.attributes().items() if isinstance(part, Tensor)}
        found.update({f"attribute {name}": part for name, part in held.items() if id(part) not in known})
        return {name: tensor for name, tensor in found.items() if tensor.layout is torch.strided}

    def snapshots(self) -> list[ObjectSnapshot]:
        """Snapshots of what the model holds, and of the containers among the arguments."""
        given = (entries_of(one) for one in containers_of(self.args, self.kwargs))
        held = [ObjectSnapshot("argument", one, contents(one), Attribute("", "")) for one in given]
        return [*snapshots_of(self.model), *held]

    def attributes(self) -> dict[str, Any]:
        """The values of all plain attributes of the model and its submodules, by the path that a user would write.

        >>> CheckCall(nn.Linear(2, 3), (), {}).attributes()
        {'training': True, 'in_features': 2, 'out_features': 3}
        """
        return {
            f"{path}.{name}".strip(".") + suffix: part
            for path, module in self.model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)  # a script module keeps its attributes elsewhere
            for name, value in module.__dict__.items()
            if name not in INTERNAL and not (isinstance(module, GraphModule) and name in _names_of_graphs())
            for suffix, part in named_parts(value, "").items()
        }


@cache
def _names_of_graphs() -> frozenset[str]:
    """Attributes in which a module of torch.fx keeps its graph and code, which differ in a copy."""
    return frozenset(GraphModule(nn.Module(), Graph()).__dict__)


def copied(call: CheckCall) -> CheckCall:
    """An independent copy of the whole call.

    Raises:
        FuseError: something in it cannot be copied.
    """
    try:
        return copy.deepcopy(call)
    except Exception as error:  # copying the user's objects may raise anything
        text = (str(error).splitlines() or [""])[0]
        raise FuseError(f"{type(call.model).__name__} cannot be copied for comparison: {text}") from error


def in_float64(call: CheckCall) -> CheckCall:
    """A copy in which every floating-point tensor is float64. One tensor in two places stays one tensor.

    >>> call = in_float64(CheckCall(nn.Linear(2, 2), (torch.ones(1, 2), torch.arange(3)), {}))
    >>> call.model.weight.dtype, [argument.dtype for argument in call.args]
    (torch.float64, [torch.float64, torch.int64])
    """
    twin = copied(call)
    modules = list(twin.model.modules())
    tables: list[dict[str, Any]] = [held for one in modules for held in (one._parameters, one._buffers)]
    places = [(held, name) for held in tables for name in held]
    narrow = [held[name] for held, name in places]
    twin.model.double()
    twins: dict[int, tuple[Tensor, Tensor]] = {}  # each tensor stays here, so that no other gets its address

    def made(tensor: Tensor) -> Tensor:
        """The float64 copy of ``tensor``, made once."""
        if id(tensor) not in twins:
            twins[id(tensor)] = tensor, widened(tensor)
        return twins[id(tensor)][1]

    for (held, name), tensor in zip(places, narrow, strict=True):
        if tensor is not None and (wide := held[name]) is not None:
            held[name] = twins.setdefault(id(tensor), (tensor, wide))[1]
    args, kwargs = with_tensors(twin.args, twin.kwargs, made)
    for module in modules:
        for name, value in module.__dict__.items():
            if name not in INTERNAL:
                module.__dict__[name] = pytree.tree_map_only(Tensor, made, value)
    return CheckCall(twin.model, args, kwargs)


def widened(tensor: Tensor) -> Tensor:
    """A floating-point ``tensor`` in float64, with its strides; any other tensor itself."""
    if not tensor.is_floating_point():
        return tensor
    wide = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.float64, device=tensor.device)
    return wide.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)
