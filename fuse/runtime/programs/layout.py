"""Arithmetic on the layouts of (fake) tensors: offsets, equality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_guards: Any = torch._C._dynamo.guards
part: Callable[[Tensor, tuple[int, ...], tuple[int, ...], int], Tensor] = _guards._reinterpret_tensor
"""``part(tensor, size, stride, offset)``: a view of a tensor, offset in elements, made without the dispatcher."""


def origin_bytes(value: Tensor) -> int:
    return int(value.storage_offset()) * value.itemsize


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one dtype, size and stride; strides of dimensions of one element do not matter."""
    if a.dtype != b.dtype or a.shape != b.shape or is_lazy(a) != is_lazy(b):
        return False
    return all(n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True)) or a.numel() == 0


def is_lazy(value: Tensor) -> bool:
    """Whether a tensor is lazily conjugated or negated, so that its memory does not hold its values.

    >>> is_lazy(torch.ones(2, dtype=torch.complex64).conj()), is_lazy(torch.ones(2))
    (True, False)
    """
    return value.is_conj() or value.is_neg()
