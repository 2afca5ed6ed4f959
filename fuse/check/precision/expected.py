"""The expected error of one operator, from its result's dtype and the number of terms that it sums.

    ||y - exact||  <=  roundings * u * ||exact||  +  4 sqrt(K) u32 * scale  +  what is below the smallest number

``u`` is half the last place of 1 in the result's dtype, the largest error of one rounding. K numbers are summed for
each result, in float32 at least; ``scale`` bounds the sum of their magnitudes (the product of the operands' norms in a
matrix product). Higham, "Accuracy and Stability of Numerical Algorithms", 2002, chapter 3, with sqrt(K) for random
signs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fuse import ops

aten = torch.ops.aten

ONE_ROUNDING = 1.25
"""Allowed roundings of an operator that computes in a wider dtype than its result's: one, and a quarter for slack."""

IN_ITS_OWN_DTYPE = 8.0
"""Allowed roundings of an operator that computes in its result's dtype (float32)."""


_NORMALISED = frozenset([aten._softmax.default, aten._log_softmax.default, aten.logsumexp.default])
"""Operators that sum exponentials of differences: terms below exp(-100) are lost in any dtype, without an error."""


def expected_error(target: Any, operands: Sequence[Tensor], exact: Tensor, dtype: torch.dtype) -> float:
    """The largest Euclidean norm of the error that ``dtype`` explains, for the result of ``target``.

    >>> one = torch.ones(4, dtype=torch.float64)
    >>> round(expected_error(torch.ops.aten.add.Tensor, [one, one], one, torch.bfloat16), 5)
    0.00977
    """
    if not dtype.is_floating_point:
        return 0.0
    facts = torch.finfo(dtype)
    size = finite_norm(exact)
    half = dtype in (torch.float16, torch.bfloat16)
    roundings = ONE_ROUNDING if half else IN_ITS_OWN_DTYPE
    below = facts.smallest_normal * facts.eps * math.sqrt(max(exact.numel(), 1))
    working = torch.finfo(torch.float32 if half else dtype).eps / 2
    return roundings * facts.eps / 2 * size + working * _summed(target, operands, exact) + below


def _summed(target: Any, operands: Sequence[Tensor], exact: Tensor) -> float:
    """``4 sqrt(K) * scale`` for an operator that sums K terms; 0 for other operators."""
    kind = ops.kind(target) if isinstance(target, OpOverload) else "other"
    floats = [t for t in operands if t.is_floating_point() and t.numel()]
    if not floats or kind in ("pointwise", "movement", "random", "view"):
        return 0.0
    if target in _NORMALISED:
        return 100 * finite_norm(exact)
    floats.sort(key=Tensor.numel, reverse=True)
    norms = [finite_norm(t) for t in floats]
    results = max(exact.numel(), 1)
    if kind in ("gemm", "convolution") and len(floats) > 1:
        one, other = floats[:2]
        terms = max(t.numel() // t.shape[0] for t in operands[1:2]) if kind == "convolution" else 0
        terms = terms or math.isqrt(one.numel() * other.numel() // results) or 1
        return 4 * math.sqrt(terms) * norms[0] * norms[1] + sum(norms[2:])
    terms = max(floats[0].numel() // results, 1)
    return 4 * terms * norms[0] + 4 * math.sqrt(terms) * finite_norm(exact)


def finite_norm(value: Tensor) -> float:
    """The Euclidean norm of what is finite.

    >>> finite_norm(torch.tensor([3.0, 4.0, torch.inf]))
    5.0
    """
    finite = torch.where(torch.isfinite(value), value, 0.0)
    return float(torch.linalg.vector_norm(finite.double()))
