"""Descriptions of values: dtype and shape, such as ``f32[4, 128]``."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch


def describe(value: Any) -> str:
    """Dtype and shape of a value, such as ``f32[4, 128]``; several results are separated by commas.

    >>> describe(torch.zeros(4, 128))
    'f32[4, 128]'
    """
    if isinstance(value, torch.Tensor):
        return _described(value.dtype, tuple(value.shape))
    if isinstance(value, (tuple, list)):
        return ", ".join(describe(part) for part in value if isinstance(part, torch.Tensor))
    return ""


@lru_cache(maxsize=4096)
def _described(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{_SHORT_DTYPE.get(dtype, dtype_name(dtype))}{[*shape]}"


def dtype_name(dtype: torch.dtype | None) -> str:
    """The name of a dtype, without ``torch``.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def dtype_and_shape(tensor: torch.Tensor) -> str:
    """Dtype and shape in full, as messages about patterns show them.

    >>> dtype_and_shape(torch.zeros(4, 128))
    'float32[4, 128]'
    """
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


_SHORT_DTYPE = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
}
