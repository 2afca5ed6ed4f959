"""Storages and tensors during a recording: a base for each storage, an alias for each tensor.

x                      base y = x[:, 1]            alias: the base of x, and the view (select, 1, 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

aten = torch.ops.aten


@dataclass(frozen=True)
class View:
    """One view in the chain of an alias: ``op(previous, *args, **kwargs)``."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(slots=True)
class Base:
    """One storage.

    ``root``: the first tensor seen on this storage. ``node``: the current value, in the layout of ``root``.
    ``version``: the number of writes so far. ``input_index``: the input that writes are copied back into.
    """

    root: Tensor
    node: Node
    version: int = 0
    input_index: int | None = None


@dataclass(slots=True)
class Alias:
    """One tensor object: its storage (``base``) and the ``chain`` of views that leads to it from the base.

    ``node`` held its value when the base had this ``version``. ``made``: the node whose metadata is the tensor object.
    """

    tensor: Tensor
    base: Base
    chain: tuple[View, ...]
    node: Node
    version: int
    made: Node


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's storage."""
    with torch._C.DisableTorchFunctionSubclass():  # it is not forward that asks
        return int(tensor.untyped_storage()._cdata)


def tensors_in(result: Any) -> list[Tensor]:
    """The tensors among the results of an operator."""
    return [t for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, Tensor)]


def written_arguments(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes to."""
    written = []
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(value, Tensor):
                written.append(value)
    return written


def part_as_view(
    op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, part: Tensor
) -> View | None:
    """The ``slice`` or ``select`` that equals result number ``position`` of ``split``, ``split_with_sizes`` or
    ``unbind``.

    None for other operators.
    """
    schema = op._schema.arguments
    bound: dict[str, Any] = (
        {a.name: a.default_value for a in schema}
        | dict(zip((a.name for a in schema), args, strict=False))
        | dict(kwargs)
    )
    dim = bound.get("dim", 0)
    if op is aten.unbind.int:
        return View(aten.select.int, (dim, position), {})
    if op in (aten.split.Tensor, aten.unsafe_split.Tensor):
        start = position * bound["split_size"]
    elif op in (aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default):
        start = sum(bound["split_sizes"][:position])
    else:
        return None
    return View(aten.slice.Tensor, (dim, start, start + part.shape[dim]), {})
