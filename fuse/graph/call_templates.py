"""The form of an operator that was recorded: what its arguments were like, and what it makes of such arguments.

    mul(f32[4, 8], f32[4, 8])     ->   a new f32[4, 8]                  fits each call on tensors laid out so
    slice(f32[4, 32], ...)        ->   a view of it that depends on the numbers

A call is compared with a form argument by argument. No key is made of it, which would take longer than to record it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fuse.graph.aliases import View
from fuse.graph.fakes import Recipe, TensorMetadata, is_recording

Looks = Mapping[int, TensorMetadata | None]
"""Of the tensors that the graph knows, by their ``id``."""

get_default_dtype, is_grad_enabled = torch.get_default_dtype, torch.is_grad_enabled


@dataclass(slots=True, eq=False)
class CallForm:
    """How an operator is recorded. ``args`` and ``kwargs`` have the look of a tensor in its place (of one that is
    computed with: without where it begins). ``recipes`` make the results, ``views`` are what these are of the first
    argument, where they are views; ``container`` is the type of what holds several results.

    Of an operator that reads a ``part`` of its first argument, ``args`` is the look of this one alone, and ``parts``
    are recipe and view by the arguments behind it.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[Any, ...] = ()
    container: type = Tensor
    recipes: tuple[Recipe, ...] = ()
    views: tuple[View, ...] = ()
    parts: dict[tuple[Any, ...], tuple[Recipe, View]] | None = None
    tensors: tuple[int, ...] = field(init=False)
    """Positions of arguments that are tensors."""
    lists: tuple[int, ...] = field(init=False)
    """Positions of arguments that may hold tensors."""
    dtype: torch.dtype = field(init=False)
    """Torch's default, on which results may depend."""

    def __post_init__(self) -> None:
        self.tensors = tuple(i for i, a in enumerate(self.args) if type(a) is TensorMetadata)
        self.lists = tuple(i for i, a in enumerate(self.args) if type(a) in (tuple, list))
        self.dtype = torch.get_default_dtype()


def fits(form: CallForm, args: tuple[Any, ...], kwargs: Mapping[str, Any], looks: Looks) -> bool:
    """Whether a call of the form's operator is recorded as the form says."""
    if kwargs or form.kwargs:
        given = tuple(kwargs.items())
        if form.parts is not None or len(given) != len(form.kwargs) or not _alike(form.kwargs, given, looks):
            return False
    if form.parts is not None:
        args = args[:1]
    if len(args) != len(form.args) or get_default_dtype() is not form.dtype or (is_grad_enabled() and is_recording()):
        return False
    return _alike(form.args, args, looks)


def _alike(expected: Sequence[Any], given: Sequence[Any], looks: Looks) -> bool:
    """Whether looks and constants are those of what is given."""
    for one, value in zip(expected, given, strict=True):
        if one.__class__ is TensorMetadata:
            look = looks.get(id(value))
            if look is not one and (look is None or look.place is not one):
                return False
        elif one is not value:
            kind = type(one)
            if kind is not type(value):
                return False
            if kind is not tuple and kind is not list:
                if one != value:
                    return False
            elif len(one) != len(value) or not _alike(one, value, looks):
                return False
    return True


def described(values: Any, looks: Looks, anywhere: bool) -> Any:
    """Arguments with looks in the place of tensors; ``anywhere``: without where in its memory a tensor begins."""
    if isinstance(values, Tensor):
        look = looks[id(values)]
        return look if look is None or not anywhere else look.place
    if type(values) in (tuple, list):
        return type(values)([described(value, looks, anywhere) for value in values])
    return values
