"""Compare one tensor of the fused run with eager's, against a float64 reference.

    error of fused  <=  2 x error of eager  +  tolerance          at each element, in units of the element's size

The size of an element is the size of the terms that were summed into it (:mod:`fuse.check.sizes`), and the tolerance is
relative to it. So an element whose large terms cancel may be off by the last places of these terms. Errors are
distances from the reference. If eager itself is the reference, its error is zero and the tolerance wider. NaN and
infinities have to be at eager's positions, unless eager overflowed on the way, and float64 and fused did not. Integers
and booleans have to be equal. Strides have to be equal in every dimension of more than one element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fuse.check.sizes import ALL, FEW
from fuse.graph.describing import dtype_name

# Tolerances in units of the last place of an element's size.
ULPS_FLOAT64_REFERENCE = 16.0
ULPS_HALF_PRECISION = 6.0
"""For float16 and bfloat16: their last place is up to 0.8 % of an element, sixteen would hide an error of a quarter."""
ULPS_EAGER_REFERENCE = 256.0


@dataclass(frozen=True)
class Comparison:
    """One tensor compared. ``problem`` is empty when it passed; errors are absolute."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    error: float
    eager_error: float
    allowed: float
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    name: str,
    fused: Tensor,
    eager: Tensor,
    reference: Tensor | None = None,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    size: Callable[[int], Tensor | None] | None = None,
    rounding: float = 0.0,
) -> Comparison:
    """Compare ``fused`` with ``eager``; ``reference`` is the float64 result, or None where there is none.

    ``atol`` and ``rtol`` (absolute, and relative to each reference value) replace the default tolerance. ``size``
    gives the size of each element after so many runs. It is called only if magnitudes and eager's own errors do not
    explain an error: the gradient of a bias before a softmax is zero, but its terms are not. Without it, all elements
    have the size of the largest.
    ``rounding`` is the last place of 1 in the coarsest dtype on the way: a float64 result of float32 values is no
    more accurate than they are.

    >>> compare("y", torch.tensor([1.0]), torch.tensor([1.0])).problem
    ''
    >>> compare("y", torch.tensor([1.5]), torch.tensor([1.0])).problem
    'error 0.5 at (0,), allowed 3.05e-05'
    """
    described = name, dtype_name(eager.dtype), tuple(eager.shape)
    if problem := _metadata_problem(fused, eager):
        return Comparison(*described, 0.0, 0.0, 0.0, problem)
    if eager.numel() == 0:
        return Comparison(*described, 0.0, 0.0, 0.0)
    if not (eager.is_floating_point() or eager.is_complex()):
        wrong = fused != eager
        problem = f"{int(wrong.sum())} values differ, the first at {_position(wrong)}" if wrong.any() else ""
        return Comparison(*described, 0.0, 0.0, 0.0, problem)
    return _floats(described, fused.detach(), eager.detach(), reference, atol, rtol, size, rounding)


def _floats(
    described: tuple[str, str, tuple[int, ...]],
    fused: Tensor,
    eager: Tensor,
    reference: Tensor | None,
    atol: float | None,
    rtol: float | None,
    size: Callable[[int], Tensor | None] | None,
    rounding: float,
) -> Comparison:
    odd = ~torch.isfinite(eager)
    misplaced = odd != ~torch.isfinite(fused)
    misplaced |= odd & ~_same(fused, eager)
    if reference is not None:  # eager overflowed on the way, and fused did not
        truth = reference.detach().to(eager.dtype)
        misplaced &= ~(odd & ((torch.isfinite(fused) & torch.isfinite(truth)) | _same(fused, truth)))
    if misplaced.any():
        at = _position(misplaced)
        return Comparison(*described, 0.0, 0.0, 0.0, f"{fused[at]} at {at}, where eager has {eager[at]}")
    wide = torch.complex128 if eager.is_complex() else torch.float64
    exact = (eager if reference is None else reference.detach()).to(wide)
    judged = torch.isfinite(fused) & torch.isfinite(exact)
    error = torch.where(judged, (fused.to(wide) - exact).abs(), 0.0)
    own = torch.where(judged & ~odd, (eager.to(wide) - exact).abs(), 0.0)
    magnitude = torch.where(judged, exact.abs(), 0.0)
    tiny = torch.finfo(eager.dtype).tiny
    finer = reference is not None and eager.dtype != torch.float64
    against_float64 = ULPS_HALF_PRECISION if eager.dtype.itemsize == 2 else ULPS_FLOAT64_REFERENCE
    ulps = against_float64 if finer else ULPS_EAGER_REFERENCE
    unit = max(ulps * torch.finfo(eager.dtype).eps, rounding)
    if atol is not None or rtol is not None:
        allowed = 2 * own.max() + (atol or 0.0) + (rtol or 0.0) * magnitude + tiny
    elif size is not None and not bool((error > (plain := _least(None, magnitude, own, unit) + tiny)).any()):
        allowed = plain
    elif size is not None and not bool((error > (least := _least(size(FEW), magnitude, own, unit) + tiny)).any()):
        allowed = least
    else:
        terms = size(ALL) if size is not None else None
        sizes = magnitude.max().expand_as(magnitude) if terms is None else torch.maximum(terms, magnitude)
        ratio = (own / sizes.clamp(min=tiny)).max()
        allowed = (2 * ratio + unit) * sizes + tiny
    wrong = error > allowed
    worst = error.max().item(), own.max().item(), allowed.max().item()
    if not wrong.any():
        return Comparison(*described, *worst)
    excess = torch.where(wrong, error / allowed, 0.0)
    at = _position(excess == excess.max())
    limit = allowed.expand_as(error)[at].item()
    return Comparison(*described, *worst, f"error {error[at].item():.3g} at {at}, allowed {limit:.3g}")


def _least(few: Tensor | None, magnitude: Tensor, own: Tensor, unit: float) -> Tensor:
    """The least error of each element that all runs would allow, from the sizes after few runs."""
    return 2 * own + unit * (magnitude if few is None else torch.maximum(few, magnitude))


def _same(one: Tensor, other: Tensor) -> Tensor:
    return (one == other) | (one.isnan() & other.isnan())


def _metadata_problem(fused: Tensor, eager: Tensor) -> str:
    for what in ("dtype", "device", "layout", "requires_grad"):
        if getattr(fused, what) != getattr(eager, what):
            return f"{what} {getattr(fused, what)} instead of {getattr(eager, what)}"
    if fused.shape != eager.shape:
        return f"shape {tuple(fused.shape)} instead of {tuple(eager.shape)}"
    strides = zip(eager.shape, fused.stride(), eager.stride(), strict=True)
    if eager.numel() and any(size > 1 and mine != theirs for size, mine, theirs in strides):
        return f"stride {fused.stride()} instead of {eager.stride()}"
    return ""


def _position(mask: Tensor) -> tuple[int, ...]:
    """The position of the first true value."""
    return tuple(mask.nonzero()[0].tolist())
