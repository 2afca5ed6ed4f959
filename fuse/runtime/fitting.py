"""Polynomials in the sizes of a call through numbers that are known at some sizes.

    sizes (50, 3), (20, 5), (61, 9), ...      9,600  6,400  35,136  ...      64 * n0 * n1
                                                146     96     299  ...      n0 * n1 - 4

The polynomial with the fewest terms is taken, of degree 3 at most. It has to give the number of each sample. There are
:data:`SPARE` samples more than polynomials of degree 2 have coefficients, at sizes that determine these coefficients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import chain, combinations, combinations_with_replacement
from math import comb, prod
from typing import Any

from fuse.kernel.polynomials import Monomial, Terms

LARGEST_DEGREE = 3
"""Degree of a polynomial: the elements of the scores of attention are the batch size times the square of the length."""
DETERMINED_DEGREE = 2
"""Degree up to which all coefficients have to follow from the sizes of the samples."""
MOST_TERMS = 3
"""Most terms of a polynomial: the extent of a strided view has three."""
SPARE = 3
"""Samples beyond the number of coefficients, at which a polynomial is only checked."""
MOST_SIZES = 3
"""Most sizes that vary, such as a batch and two lengths: four would need eighteen samples."""


def fewest_samples(sizes: int) -> int:
    """Number of samples that polynomials in so many sizes need.

    >>> fewest_samples(1), fewest_samples(2), fewest_samples(3)
    (6, 9, 13)
    """
    return comb(sizes + DETERMINED_DEGREE, DETERMINED_DEGREE) + SPARE


def determine(samples: Sequence[Sequence[int]]) -> bool:
    """Whether polynomials of degree 2 follow from their values at these sizes.

    >>> determine([(5,), (7,), (9,)]), determine([(5,), (7,), (7,)])
    (True, False)
    """
    count = len(samples[0])
    monomials = list(_monomials(count, DETERMINED_DEGREE))
    rows = [[Fraction(prod(sample[i] for i in one)) for one in monomials] for sample in samples]
    return _rank(rows) == len(monomials)


def polynomial_through(column: Sequence[Any], samples: Sequence[Sequence[int]]) -> Terms | None:
    """The polynomial in ``n0``, ``n1``, ... that has the numbers of ``column`` at the sizes ``samples``; None if there
    is none with few terms.

    >>> samples = [(5, 2), (7, 3), (6, 8), (9, 4)]
    >>> polynomial_through([64 * a * b - 32 for a, b in samples], samples)
    (((), -32), (('n0', 'n1'), 64))
    >>> polynomial_through([a // 2 for a, _ in samples], samples) is None
    True
    """
    if any(type(number) is not int for number in column):
        return None
    values = {one: [prod(sample[i] for i in one) for sample in samples] for one in _monomials(len(samples[0]))}
    for support in chain.from_iterable(combinations(values, count) for count in range(1, MOST_TERMS + 1)):
        found = _coefficients([values[one] for one in support], column)
        if found is not None:
            named = ((_named(one), c) for one, c in zip(support, found, strict=True) if c)
            return tuple(sorted(named))
    return None


def _monomials(count: int, degree: int = LARGEST_DEGREE) -> Iterator[tuple[int, ...]]:
    """Products of sizes by their numbers, those of low degree first.

    >>> list(_monomials(2, 2))
    [(), (0,), (1,), (0, 0), (0, 1), (1, 1)]
    """
    for of in range(degree + 1):
        yield from combinations_with_replacement(range(count), of)


def _named(monomial: tuple[int, ...]) -> Monomial:
    return tuple(f"n{i}" for i in monomial)


def _coefficients(values: Sequence[Sequence[int]], column: Sequence[int]) -> list[int] | None:
    """Integers with which the sum of ``values`` is ``column`` in every sample; None if there are none."""
    rows = [[Fraction(n) for n in row] for row in zip(*values, column, strict=True)]
    count = len(values)
    if _rank(rows) != count or any(rows[i][i] == 0 for i in range(count)):
        return None
    found = [rows[i][count] for i in range(count)]
    return [c.numerator for c in found] if all(c.denominator == 1 for c in found) else None


def _rank(rows: list[list[Fraction]]) -> int:
    """The rank of a matrix, which is brought to reduced echelon form in place."""
    rank = 0
    for column in range(len(rows[0])):
        pivot = next((row for row in range(rank, len(rows)) if rows[row][column]), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        first = rows[rank][column]
        rows[rank] = [number / first for number in rows[rank]]
        for row in range(len(rows)):
            if row != rank and (times := rows[row][column]):
                rows[row] = [a - times * b for a, b in zip(rows[row], rows[rank], strict=True)]
        rank += 1
    return rank
