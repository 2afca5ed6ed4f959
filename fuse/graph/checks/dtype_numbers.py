"""Find numbers and dtypes that do not fit an operator; eager raises for most of them, fake tensors do not notice.

    torch.full((2,), 300, dtype=torch.int8)     value cannot be converted to type int8_t without overflow
    x_int8.mul_(1.5)                            result type Float can't be cast to the desired output type Char
    torch.rsub(mask, 1)                         subtraction with a bool tensor is not supported
    F.linear(x_float32, weight_float64)         mat1 and mat2 must have the same dtype

Such calls are not captured; they run eager, and eager raises its own error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fuse import ops

PythonNumber = bool | int | float | complex

_TAKE = frozenset({"number", "Tensor"})
"""Schema types of parameters that may receive a number."""

_NOT_OF_BOOLS = frozenset({"clamp", "clamp_min", "clamp_max", "remainder", "fmod"})

_OF_ONE_DTYPE = frozenset(
    {"addbmm", "addmm", "addmv", "baddbmm", "bmm", "convolution", "dot", "linear", "mm", "mv", "vdot"}
)
"""Products, which never promote dtypes."""

_KEEP_DTYPE = frozenset({"fill_", "fill_diagonal_", "index_fill_", "masked_fill_", "scatter_"})
"""Operators that write a number into a tensor of any dtype."""


def obstacle(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> str | None:
    """Why ``op`` must not be captured with these numbers and dtypes, or None.

    >>> x = torch.zeros(2, dtype=torch.int8)
    >>> obstacle(torch.ops.aten.add.Scalar, (x, 300), {}, x)
    'is given 300, which torch.int8 cannot hold'
    >>> obstacle(torch.ops.aten.add.Scalar, (x, 3), {}, x) is None
    True
    """
    if _subtracts(op) and any(_is_bool(argument) for argument in args[:2]):
        return "subtracts with a bool"
    if op._opname in _OF_ONE_DTYPE and len(dtypes := {a.dtype: None for a in args if isinstance(a, Tensor)}) > 1:
        return f"multiplies {' by '.join(map(str, dtypes))}"
    positions = _number_positions(op)
    if not positions:
        return None
    value = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(value, Tensor):
        return None
    if value.dtype is torch.bool and op._opname.rstrip("_") in _NOT_OF_BOOLS:
        return "does not take booleans"
    for name, number in _numbers(positions, args, kwargs):
        if isinstance(number, int) and not -(2**63) <= number < 2**63:
            return f"is given {number}, which is not a 64-bit integer"
        if value.dtype is not torch.bool and not _holds(value.dtype, number):
            return f"is given {number}, which {value.dtype} cannot hold"
        if name == "alpha" and not _scales(number, value.dtype):
            return f"is given alpha={number} for {value.dtype}"
        if ops.mutates(op) and _rank(number) > _rank_of(value.dtype) and op._opname not in _KEEP_DTYPE:
            return f"writes with {number} into {value.dtype}"
    return None


@cache
def _number_positions(op: OpOverload) -> tuple[tuple[int, str], ...]:
    arguments = op._schema.arguments
    return tuple(
        (i, a.name) for i, a in enumerate(arguments) if str(a.type).removeprefix("Optional[").rstrip("]") in _TAKE
    )


@cache
def _subtracts(op: OpOverload) -> bool:
    return op.namespace == "aten" and op._opname in ("sub", "sub_", "rsub")


def _numbers(
    positions: Sequence[tuple[int, str]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, PythonNumber]]:
    for position, name in positions:
        number = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(number, bool | int | float | complex):
            yield name, number


def _holds(dtype: torch.dtype, number: PythonNumber) -> bool:
    if isinstance(number, complex):
        return dtype.is_complex
    if dtype.is_complex or isinstance(number, bool):
        return True
    if dtype.is_floating_point:
        limit = torch.finfo(dtype).max
        return not math.isfinite(number) or -limit <= number <= limit
    limits = torch.iinfo(dtype)
    return math.isfinite(number) and limits.min <= number <= limits.max


def _scales(number: PythonNumber, dtype: torch.dtype) -> bool:
    """Whether eager accepts ``alpha=number`` for a result of ``dtype``."""
    if isinstance(number, bool):
        return dtype is torch.bool
    return dtype.is_complex or _rank(number) <= min(_rank_of(dtype), 2)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype is torch.bool)


def _rank(number: PythonNumber) -> int:
    """The position of the number's type in the order bool, integer, real, complex."""
    return next(i for i, kind in enumerate((bool, int, float, complex)) if isinstance(number, kind))


def _rank_of(dtype: torch.dtype) -> int:
    return 0 if dtype is torch.bool else 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1
