"""Index arithmetic: affine expressions over loop variables, and how a reshape is undone on them.

A loop variable is an *atom*. The index of every tensor dimension is ``sum(coefficient * atom) + constant``. A reshape
regroups digits:

    view [6] -> [2, 3]      flat = 3*i + j, read back as digit of extent 6
    view [2, 3] -> [6]      i = n // 3, j = n % 3: affine only when n is written as 3*hi + lo

The second case asks the schedule to split the atom ``n`` into two loops (``SplitNeeded``), after which the digits are
affine again, so that no kernel divides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Affine:
    """``constant + sum(coefficient * atom)``; ``terms`` holds non-zero coefficients, sorted by atom name.

    >>> i, j = Affine.of("i"), Affine.of("j")
    >>> str(i * 4 + j + 1)
    '4 * i + j + 1'
    """

    terms: tuple[tuple[str, int], ...] = ()
    constant: int = 0

    @staticmethod
    def of(atom: str) -> Affine:
        return Affine(((atom, 1),))

    def __add__(self, other: Affine | int) -> Affine:
        if isinstance(other, int):
            return Affine(self.terms, self.constant + other)
        if not other.terms:
            return Affine(self.terms, self.constant + other.constant)
        if not self.terms:
            return Affine(other.terms, self.constant + other.constant)
        merged = dict(self.terms)
        for atom, coefficient in other.terms:
            merged[atom] = merged.get(atom, 0) + coefficient
        return Affine(tuple(sorted((a, c) for a, c in merged.items() if c)), self.constant + other.constant)

    def __mul__(self, factor: int) -> Affine:
        if factor == 0:
            return ZERO
        return Affine(tuple((a, c * factor) for a, c in self.terms), self.constant * factor)

    def atoms(self) -> tuple[str, ...]:
        return tuple(atom for atom, _ in self.terms)

    def coefficient(self, atom: str) -> int:
        return dict(self.terms).get(atom, 0)

    def __str__(self) -> str:
        parts = [atom if c == 1 else f"{c} * {atom}" for atom, c in sorted(self.terms, key=lambda t: -abs(t[1]))]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts).replace("+ -", "- ")


ZERO = Affine()
Index = tuple[Affine, ...]


@dataclass(frozen=True)
class Cannot:
    """Why an index cannot be written down; a value, not an exception, at the border of this package."""

    reason: str


class SplitNeeded(Exception):
    """The loop over ``atom`` must become an outer loop and an inner one of ``inner`` steps."""

    def __init__(self, atom: str, inner: int) -> None:
        super().__init__(f"split {atom} by {inner}")
        self.atom = atom
        self.inner = inner


class NotAffine(Exception):
    """An index has no affine form; the message is a reason for the user."""


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """
    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def offset(index: Index, strides: Sequence[int]) -> Affine:
    """Elements from the first one to ``index`` in a buffer with these strides."""
    total = ZERO
    for i, stride in zip(index, strides, strict=True):
        if stride and (i.terms or i.constant):
            total = total + i * stride
    return total


def reshape(index: Index, shape: Sequence[int], target: Sequence[int], extents: Mapping[str, int]) -> Index:
    """The index into ``target`` of the element at ``index`` in ``shape`` (both row-major, equally many elements).

    Raises:
        SplitNeeded: an atom must become two loops first.
        NotAffine: no split helps.

    >>> reshape((Affine.of("i"), Affine.of("j")), (2, 3), (6,), {"i": 2, "j": 3})[0].__str__()
    '3 * i + j'
    """
    if tuple(shape) == tuple(target):
        return index
    strides = contiguous_strides(shape)
    rest = offset(index, [stride if extent > 1 else 0 for stride, extent in zip(strides, shape, strict=True)])
    digits = []
    for extent in reversed(target):
        rest, digit = _take_digit(rest, extent, extents)
        digits.append(digit)
    return tuple(reversed(digits))


def _take_digit(flat: Affine, extent: int, extents: Mapping[str, int]) -> tuple[Affine, Affine]:
    """``divmod(flat, extent)`` for an affine ``flat``."""
    if extent == 1:
        return flat, ZERO
    high: dict[str, int] = {}
    low: dict[str, int] = {}
    for atom, coefficient in flat.terms:
        if coefficient % extent == 0:
            high[atom] = coefficient // extent
        else:
            low[atom] = coefficient
    high_constant, low_constant = divmod(flat.constant, extent)
    reach = low_constant + sum(c * (extents[a] - 1) for a, c in low.items() if c > 0)
    least = low_constant + sum(c * (extents[a] - 1) for a, c in low.items() if c < 0)
    if reach >= extent or least < 0:
        for atom, coefficient in sorted(low.items(), key=lambda item: -abs(item[1])):
            inner = extent // math.gcd(coefficient, extent)
            if 1 < inner < extents[atom] and extents[atom] % inner == 0:
                raise SplitNeeded(atom, inner)
            inner = math.gcd(extents[atom], inner)
            if 1 < inner < extents[atom]:
                raise SplitNeeded(atom, inner)
        raise NotAffine("a reshape regroups dimensions in a way that no loop order follows")
    return Affine(tuple(sorted(high.items())), high_constant), Affine(tuple(sorted(low.items())), low_constant)
