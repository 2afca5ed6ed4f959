"""Layouts of views, computed by torch on tensors without data."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily


def without_data(val: Tensor, stride: Sequence[int] | None = None) -> Tensor:
    """A meta tensor with the sizes, dtype and strides (or the given ``stride``) of ``val``, and offset 0.

    >>> without_data(torch.zeros(4, 6)[:, 2:]).stride()
    (6, 1)
    """
    with unset_fake_temporarily():
        return torch.empty_strided(
            val.size(), val.stride() if stride is None else stride, dtype=val.dtype, device="meta"
        )


def view(
    target: OpOverload, val: Tensor, arguments: Sequence[Any] = (), options: Mapping[str, Any] | None = None
) -> Any:
    """``target(val, *arguments)`` for a view operator and a meta tensor; None if there is no such view.

    Unrolled loops ask for the same view in every step, so that results are stored. They must not be changed.

    >>> view(torch.ops.aten.view.default, without_data(torch.zeros(4, 6).t()), ([24],)) is None
    True
    """
    key = _key((target, torch.get_default_dtype(), val, *arguments, options or {}))
    try:
        if key in _ANSWERS:
            return _ANSWERS[key]
    except TypeError:  # an argument that cannot be hashed
        return _asked(target, val, arguments, options)
    if len(_ANSWERS) >= MOST_ANSWERS:
        _ANSWERS.clear()
    found = _ANSWERS[key] = _asked(target, val, arguments, options)
    return found


def _asked(target: OpOverload, val: Tensor, arguments: Sequence[Any], options: Mapping[str, Any] | None) -> Any:
    try:
        with unset_fake_temporarily(), torch.no_grad():
            return target(val, *arguments, **(options or {}))
    except (RuntimeError, IndexError, ValueError):
        return None


def _key(value: Any) -> Hashable:
    """Everything in an argument that a layout may depend on."""
    if isinstance(value, Tensor):
        held = value.untyped_storage().nbytes()
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, held
    if isinstance(value, (list, tuple)):
        return type(value), *map(_key, value)
    if isinstance(value, Mapping):
        return tuple((name, _key(one)) for name, one in value.items())
    return type(value), value


MOST_ANSWERS = 4096
"""Answers kept before all are dropped: sizes that keep changing must not fill the memory."""
_ANSWERS: dict[Hashable, Any] = {}
