"""C++ types of torch dtypes, in memory and in registers, and C++ literals."""

from __future__ import annotations

import math
import struct

import torch

from fuse.kernel.arithmetic import dtypes
from fuse.kernel.arithmetic.extents import Extent, Real

_STORAGE = {
    torch.float64: "double",
    torch.float32: "float",
    torch.bfloat16: "fuse_bf16",
    torch.float16: "fuse_f16",
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
}


def storage(dtype: torch.dtype) -> str:
    """The C++ type of an element in memory.

    >>> storage(torch.bfloat16), storage(torch.float32)
    ('fuse_bf16', 'float')
    """
    return _STORAGE[dtype]


def register(dtype: torch.dtype) -> str:
    """The C++ type that a kernel computes in: float for bfloat16 and float16, the element's own type otherwise.

    >>> register(torch.bfloat16), register(torch.bool)
    ('float', 'bool')
    """
    return _STORAGE[dtypes.register(dtype)]


def loaded(dtype: torch.dtype, text: str) -> str:
    """The C++ expression that converts an element ``text`` of memory to the type that kernels compute in.

    >>> loaded(torch.float32, "x[i]"), loaded(torch.bool, "mask[i]")
    ('x[i]', 'fuse_truth(mask[i])')
    """
    if dtype is torch.bool:
        return f"fuse_truth({text})"
    return f"fuse_to_float({text})" if dtype in dtypes.HALVES else text


def stored(dtype: torch.dtype, text: str) -> str:
    """The C++ expression that converts a computed ``text`` to an element of memory.

    >>> stored(torch.bfloat16, "x")
    'fuse_to_bf16(x)'
    """
    return f"{_STORAGE[dtype].replace('fuse', 'fuse_to')}({text})" if dtype in dtypes.HALVES else text


def literal(number: bool | int | float, dtype: torch.dtype) -> str:
    """``number`` as an exact C++ literal of the type that kernels compute ``dtype`` in.

    >>> literal(0.1, torch.float32), literal(float("-inf"), torch.float64)
    ('0.10000000149011612f', '-__builtin_inf()')
    >>> literal(3, torch.int64), literal(True, torch.bool)
    ('int64_t(3)', 'true')
    """
    ctype = register(dtype)
    if isinstance(number, Real) and ctype in ("float", "double"):
        return f"{ctype}({number.name})"
    if isinstance(number, Extent) and ctype != "bool":
        return f"{ctype}({number})"
    if ctype == "bool":
        return "true" if number else "false"
    if ctype in ("float", "double"):
        value = float(number)
        suffix = "f" if ctype == "float" else ""
        if math.isnan(value):
            return f'__builtin_nan{suffix}("")'
        if math.isinf(value):
            return f"{'-' if value < 0 else ''}__builtin_inf{suffix}()"
        if suffix:
            value = _as_float32(value)
            if math.isinf(value):
                return f"{'-' if value < 0 else ''}__builtin_inff()"
        return f"{value!r}{suffix}" if value >= 0 and math.copysign(1, value) > 0 else f"({value!r}{suffix})"
    whole = int(number)
    if whole == -(2**63):
        return "INT64_MIN"
    return f"{ctype}({whole})"


def _as_float32(value: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)
