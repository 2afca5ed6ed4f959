"""The template of a recorded operator call: the metadata of its arguments, and how its results are made.

    mul(f32[4, 8], f32[4, 8])     ->   a new f32[4, 8]                  fits every call on tensors of these layouts
    slice(f32[4, 32], ...)        ->   a view that depends on the numbers

A call is compared with a template argument by argument. Making a hash key of the call would take longer than recording
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fuse.graph.fakes.fake_operators import Recipe, TensorMetadata, is_recording
from fuse.graph.functional.aliases import View

KnownMetadata = Mapping[int, TensorMetadata | None]
"""``id`` of a tensor -> its metadata, for the tensors that the graph knows."""

get_default_dtype, is_grad_enabled = torch.get_default_dtype, torch.is_grad_enabled


@dataclass(slots=True, eq=False)
class CallTemplate:
    """How a call of ``op`` is recorded.

    ``args``, ``kwargs``: the arguments, with tensor metadata in place of tensors; without storage offsets if ``op``
    computes new tensors. ``recipes``: how the results are made. ``views``: for a view operator, the views of the first
    argument that the results are. ``container``: the type that holds several results.

    ``same``: whether the result is the first argument as another tensor object (``detach``). ``functional``: for an
    operator that writes its first argument and returns it, its functional form.

    For ``select`` and ``slice``, ``args`` has the metadata of the first argument only, without its storage offset, and
    ``parts`` maps its whole metadata and the other arguments to recipe and view.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[Any, ...] = ()
    container: type = Tensor
    recipes: tuple[Recipe, ...] = ()
    views: tuple[View, ...] = ()
    parts: dict[tuple[Any, ...], tuple[Recipe, View]] | None = None
    same: bool = False
    functional: OpOverload | None = None
    tensors: tuple[int, ...] = field(init=False)
    """Positions of tensor arguments."""
    lists: tuple[int, ...] = field(init=False)
    """Positions of arguments that may contain tensors."""
    dtype: torch.dtype = field(init=False)
    """Torch's default dtype, on which results may depend."""

    def __post_init__(self) -> None:
        self.tensors = tuple(i for i, a in enumerate(self.args) if type(a) is TensorMetadata)
        self.lists = tuple(i for i, a in enumerate(self.args) if type(a) in (tuple, list))
        self.dtype = torch.get_default_dtype()

    @property
    def is_view(self) -> bool:
        """Whether results have the memory of the first argument."""
        return bool(self.views) or self.parts is not None or self.same


def fits(template: CallTemplate, args: tuple[Any, ...], kwargs: Mapping[str, Any], known: KnownMetadata) -> bool:
    """Whether a call of the template's operator with these arguments is recorded like the template."""
    if kwargs or template.kwargs:
        given = tuple(kwargs.items())
        if (
            template.parts is not None
            or len(given) != len(template.kwargs)
            or not _alike(template.kwargs, given, known)
        ):
            return False
    if template.parts is not None:
        args = args[:1]
    if (
        len(args) != len(template.args)
        or get_default_dtype() is not template.dtype
        or (is_grad_enabled() and is_recording())
    ):
        return False
    return _alike(template.args, args, known)


def _alike(expected: Sequence[Any], given: Sequence[Any], known: KnownMetadata) -> bool:
    """Whether the given tensors have the expected metadata, and all other arguments are equal."""
    for one, value in zip(expected, given, strict=True):
        if one.__class__ is TensorMetadata:
            metadata = known.get(id(value))
            if metadata is not one and (metadata is None or metadata.without_offset is not one):
                return False
        elif one is not value:
            kind = type(one)
            if kind is not type(value):
                return False
            if kind is not tuple and kind is not list:
                if one != value or (kind in (float, complex) and repr(one) != repr(value)):  # 0.0 and -0.0
                    return False
            elif len(one) != len(value) or not _alike(one, value, known):
                return False
    return True


def described(values: Any, known: KnownMetadata, ignore_offset: bool) -> Any:
    """``values`` with tensor metadata in place of tensors, without storage offsets if ``ignore_offset``."""
    if isinstance(values, Tensor):
        metadata = known[id(values)]
        return metadata if metadata is None or not ignore_offset else metadata.without_offset
    if type(values) in (tuple, list):
        return type(values)([described(value, known, ignore_offset) for value in values])
    return values
