"""The operators of scalar expressions: their reference functions, definitions and costs.

``MEANINGS`` has the reference of each operator as a function of torch tensors. ``DEFINITIONS`` has operators that are
formulas of others; a target without a function for one uses the formula. A new operator is a line here, and a line in
the table of a target where its function has another name.

``convert``, ``round_bfloat16``, ``round_float16`` and ``select`` are determined by the dtypes of their operands and
result. ``chosen`` is a ``select`` without a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fuse import ops

RELATIONS = frozenset(
    {"less", "at_most", "greater", "at_least", "equal", "unequal", "and", "or", "isnan", "isinf", "isfinite"}
)
"""Operators whose result is a bool, whatever their operands are."""

_COSTLY = """
    acos acosh asin asinh atan atan2 atanh cos cosh elu erf erfc exp exp2 expm1 gelu gelu_tanh hypot log log10 log1p
    log2 logsigmoid mish pow sigmoid silu sin sinh softplus tan tanh
"""
COSTS: Mapping[str, int] = dict.fromkeys(_COSTLY.split(), ops.TRANSCENDENTAL_WEIGHT) | {
    "logaddexp": 2 * ops.TRANSCENDENTAL_WEIGHT
}
"""Costs of operators, in arithmetic operations of a few cycles; other functions cost one such operation."""


def _multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` computed in float64 and rounded to the dtype of ``a``; for float64, rounded twice."""
    return (a.double() * b.double() + c.double()).to(a.dtype)


def _either(first: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of two numbers: ``a`` if ``first(a, b)``, else ``b``; NaN if one of them is."""
    return lambda a, b: torch.where(a != a, a, torch.where(first(a, b), a, b))


_CALLED_ALIKE = """
    abs acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc exp exp2 expm1 floor floor_divide fmod
    frac hypot log log10 log1p log2 logaddexp pow reciprocal remainder round rsqrt sigmoid sign sin sinh sqrt tan tanh
    trunc
"""
MEANINGS: Mapping[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "divide": torch.div,
    "quotient": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "modulo": torch.fmod,
    "negate": torch.neg,
    "invert": torch.bitwise_not,
    "bit_and": torch.bitwise_and,
    "bit_or": torch.bitwise_or,
    "bit_xor": torch.bitwise_xor,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "less": torch.lt,
    "at_most": torch.le,
    "greater": torch.gt,
    "at_least": torch.ge,
    "equal": torch.eq,
    "unequal": torch.ne,
    "select": torch.where,
    "chosen": torch.where,
    "maximum": _either(torch.gt),
    "minimum": _either(torch.lt),
    "larger": lambda a, b: torch.where(b > a, b, a),
    "fmax": lambda a, b: torch.where(b != b, a, torch.where(a >= b, a, b)),
    "fmin": lambda a, b: torch.where(b != b, a, torch.where(a <= b, a, b)),
    "fma": _multiply_add,
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "isfinite": torch.isfinite,
    **{name: getattr(torch, name) for name in _CALLED_ALIKE.split()},
}


def _gelu_tanh(f: Any, x: Any) -> Any:
    return 0.5 * x * (1 + f.tanh(0.79788456080286535588 * (x + 0.044715 * (x * x * x))))


DEFINITIONS: Mapping[str, Callable[..., Any]] = {
    "relu": lambda f, x: f.select(x < 0, 0, x),
    "leaky_relu": lambda f, x, slope: f.select(x > 0, x, x * slope),
    "clamp": lambda f, x, low, high: f.minimum(high, f.maximum(low, x)),
    "hardsigmoid": lambda f, x: f.clamp(x + 3, 0, 6) / 6,
    "hardswish": lambda f, x: x * f.clamp(x + 3, 0, 6) / 6,
    "elu": lambda f, x, alpha, scale, slope: f.select(x < 0, f.expm1(x * slope) * (alpha * scale), x * scale),
    "gelu": lambda f, x: x * 0.5 * (1 + f.erf(x * 0.70710678118654752440)),
    "gelu_tanh": _gelu_tanh,
    "silu": lambda f, x: x / (1 + f.exp(-x)),
    "mish": lambda f, x: x * f.tanh(f.log1p(f.exp(x))),
    "softplus": lambda f, x, beta, threshold: f.select(x * beta > threshold, x, f.log1p(f.exp(x * beta)) / beta),
    "logsigmoid": lambda f, x: f.minimum(x, 0) - f.log1p(f.exp(-f.abs(x))),
}
"""Operators as formulas of others; ``f`` has all operators as methods (``Functions`` of ``expressions.py``)."""
