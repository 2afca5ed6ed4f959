"""Errors of a tensor against its float64 value, in the measures that accuracy tools print.

    relative     ||x - exact|| / ||exact||          Euclidean norms; SQNR = -20 log10 of it, in decibels
    max_abs      the largest |x - exact|
    max_ulps     the largest |x - exact| in units in the last place of exact, in the dtype of x
    cosine       x . exact / (||x|| ||exact||)

Elements that are the same infinity or NaN on both sides are left out. An element that is finite on one side only makes
the relative error infinite.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from fuse.errors import FuseError


@dataclass(frozen=True)
class Errors:
    """Distances of a tensor from its float64 value."""

    relative: float
    max_abs: float
    max_ulps: float
    cosine: float

    @property
    def sqnr(self) -> float:
        """Signal-to-quantisation-noise ratio in decibels; infinite if there is no difference.

        >>> Errors(0.01, 0.1, 2.0, 1.0).sqnr
        40.0
        """
        if self.relative == 0:
            return math.inf
        return -20 * math.log10(self.relative) if math.isfinite(self.relative) else -math.inf


@dataclass(frozen=True)
class Range:
    """The range of a tensor's values, and values that the narrow dtype cannot represent.

    ``smallest`` and ``largest`` are the least non-zero and the largest magnitude of the float64 values. ``overflows``
    counts finite values that became infinite, ``underflows`` non-zero values that became zero, ``nans`` new NaNs.
    """

    smallest: float
    largest: float
    overflows: int
    underflows: int
    nans: int


def errors(value: Tensor, exact: Tensor) -> Errors:
    """The distance of ``value`` from ``exact``, its float64 value. Integers and booleans are compared as numbers.

    >>> errors(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0], dtype=torch.float64))
    Errors(relative=0.22360679774997896, max_abs=0.5, max_ulps=2097152.0, cosine=0.9965457582448796)
    """
    if value.is_complex():
        return errors(torch.view_as_real(value.resolve_conj()), torch.view_as_real(exact.resolve_conj()))
    mine, truth = value.detach().double(), exact.detach().double()
    finite = torch.isfinite(mine) & torch.isfinite(truth)
    same = (mine == truth) | (mine.isnan() & truth.isnan())
    if not bool(finite.all()):
        broken = not bool((finite | same).all())
        mine, truth = torch.where(finite, mine, 0.0), torch.where(finite, truth, 0.0)
    else:
        broken = False
    distance = (mine - truth).abs_()
    size, own = _norm(truth), _norm(mine)
    norm = _norm(distance)
    relative = math.inf if broken or (norm and not size) else norm / size if norm else 0.0
    cosine = 1.0 if not size and not own else _dot(mine, truth) / (size * own) if size and own else 0.0
    largest = float(distance.max()) if distance.numel() else 0.0
    ulps = 0.0
    if largest and value.is_floating_point():
        ulps = float((distance / last_places(truth, value.dtype)).max())
    broken_size = math.inf if broken else largest
    return Errors(relative, broken_size, math.inf if broken else ulps, math.nan if broken else min(cosine, 1.0))


def range_of(value: Tensor, exact: Tensor) -> Range:
    """The range of ``exact``, and overflows, underflows and NaNs in ``value``.

    >>> range_of(torch.tensor([torch.inf, 0.0]), torch.tensor([1e39, 1e-50], dtype=torch.float64))
    Range(smallest=1e-50, largest=1e+39, overflows=1, underflows=1, nans=0)
    """
    if not value.is_floating_point() or not value.numel():
        return Range(0.0, 0.0, 0, 0, 0)
    truth = exact.detach().double()
    finite = torch.isfinite(truth)
    magnitude = torch.where(finite, truth, 0.0).abs()
    some = magnitude[magnitude > 0]
    return Range(
        float(some.min()) if some.numel() else 0.0,
        float(magnitude.max()),
        int((finite & value.isinf()).sum()),
        int(((truth != 0) & (value == 0)).sum()),
        int((value.isnan() & ~truth.isnan()).sum()),
    )


def last_places(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The unit in the last place of each value, in ``dtype``.

    >>> last_places(torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64), torch.bfloat16).tolist()
    [0.0078125, 0.015625, 9.183549615799121e-41]
    """
    facts = torch.finfo(dtype)
    exponent = torch.frexp(exact.abs().clamp_min(facts.tiny)).exponent - 1
    return torch.ldexp(torch.full_like(exact, facts.eps), exponent)


@dataclass(frozen=True)
class PrecisionTarget:
    """The required accuracy of a result: ``sqnr>=40`` (decibels), ``cosine>=0.999``, ``relative<=0.01``,
    ``max_abs<=0.1``."""

    measure: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> PrecisionTarget:
        """Read one from a flag.

        Raises:
            FuseError: it is none.

        >>> PrecisionTarget.parse("sqnr>=40")
        PrecisionTarget(measure='sqnr', bound=40.0)
        """
        found = re.fullmatch(r"\s*(sqnr|cosine|relative|max_abs)\s*(>=|<=)\s*([-+.0-9e]+)\s*", text)
        if not found or (found[2] == ">=") != (found[1] in ("sqnr", "cosine")):
            raise FuseError(f"target {text!r} is none of sqnr>=40, cosine>=0.999, relative<=0.01, max_abs<=0.1")
        try:
            return cls(found[1], float(found[3]))
        except ValueError as error:
            raise FuseError(f"target {text!r}: {found[3]} is not a number") from error

    def met(self, found: Errors) -> bool:
        """Whether errors are small enough.

        >>> PrecisionTarget("sqnr", 40.0).met(Errors(0.02, 1.0, 1.0, 1.0))
        False
        """
        value: float = getattr(found, self.measure)
        return value >= self.bound if self.measure in ("sqnr", "cosine") else value <= self.bound

    def harder(self, missed: Errors) -> PrecisionTarget:
        """A target that is harder by twice what ``missed`` falls short.

        >>> PrecisionTarget("cosine", 0.75).harder(Errors(0.5, 1.0, 1.0, 0.5))
        PrecisionTarget(measure='cosine', bound=1.25)
        """
        value: float = getattr(missed, self.measure)
        return PrecisionTarget(self.measure, self.bound + 2 * (self.bound - value))

    def __str__(self) -> str:
        return f"{self.measure}{'>=' if self.measure in ('sqnr', 'cosine') else '<='}{self.bound:g}"


def _norm(value: Tensor) -> float:
    """The Euclidean norm, without overflow in the squares."""
    if not value.numel():
        return 0.0
    scale = float(value.abs().max())
    if scale == 0 or 1e-140 < scale < 1e140:
        return float(torch.linalg.vector_norm(value))
    return float(torch.linalg.vector_norm(value / scale)) * scale


def _dot(one: Tensor, other: Tensor) -> float:
    return float((one.flatten() * other.flatten()).sum())
