"""Polynomials in the sizes of a call through numbers that are known at some sizes.

    sizes (50, 3), (20, 5), (61, 9), ...      9,600  6,400  35,136  ...      64 * n0 * n1
                                                146     96     299  ...      n0 * n1 - 4

The polynomial with the fewest terms is taken: three of degree 3 at most, or any number of degree 2 where the samples
determine these. It has to give the number of each sample. Of many sizes, a term is not any product, but a number of the
graph, or such a number times a size of an argument. No two terms are multiples of each other at all samples, with or
without a constant added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations, combinations_with_replacement
from math import comb, gcd
from typing import Any

from fuse.kernel.arithmetic.extents import Conditions
from fuse.kernel.arithmetic.polynomials import Terms, product_of, sum_of

LARGEST_DEGREE = 3
"""Degree of a polynomial: the elements of the scores of attention are the batch size times the square of the length."""
DETERMINED_DEGREE = 2
"""Degree up to which all coefficients in the sizes of the arguments have to follow from the samples."""
MOST_TRIPLES = 35
"""Most products of sizes, four sizes' own, of which any three may be the terms; of more, one term is a constant."""
SPARE = 3
"""Samples beyond the number of coefficients, at which a polynomial is only checked."""
FEW_SIZES = 9
"""Most sizes, those included that operators compute, of which any product may be a term: nine need 39 samples."""
MOST_SIZES = 24
"""Most sizes: five halves, one after another, of images of any height and width, with a padding for each."""
SAMPLES_A_SIZE = 4
"""Samples for each size, where polynomials of degree 2 in all of them have more coefficients."""
SAMPLES_OF_GRAPH = 24
"""Samples where the terms are numbers of the graph: eight times as many as there are coefficients."""


CONSTANT: Terms = (((), 1),)


def fewest_samples(sizes: int) -> int:
    """Number of samples that polynomials in so many sizes need.

    >>> fewest_samples(1), fewest_samples(2), fewest_samples(3), fewest_samples(9), fewest_samples(12)
    (6, 9, 13, 39, 24)
    """
    if sizes > FEW_SIZES:
        return SAMPLES_OF_GRAPH
    return min(comb(sizes + DETERMINED_DEGREE, DETERMINED_DEGREE), SAMPLES_A_SIZE * sizes) + SPARE


@dataclass(frozen=True)
class Samples:
    """Sizes at which numbers are known. The first ``free`` of them are sizes of arguments; others follow from these.
    ``of_graph``: the numbers of the graph as polynomials in the sizes, which are called ``n0``, ``n1``, ..."""

    sizes: tuple[tuple[int, ...], ...]
    free: int
    of_graph: tuple[Terms, ...] = ()

    @cached_property
    def _values(self) -> dict[Terms, list[int]]:
        """The values of each term, the constant first."""
        count = len(self.sizes[0])
        named = Conditions(tuple(f"n{i}" for i in range(count)))
        terms = list(_monomials(count, LARGEST_DEGREE))
        if count > FEW_SIZES:
            terms = [*_monomials(count, 1), *_with_one_more(map(_monic, self.of_graph), self.free)]
        evaluate = named.evaluator(list(dict.fromkeys(terms)))
        columns = zip(*(evaluate(*sizes) for sizes in self.sizes), strict=True)
        return {one: list(column) for one, column in zip(dict.fromkeys(terms), columns, strict=True)}

    @cached_property
    def _by_changes(self) -> dict[tuple[int, ...], Terms]:
        return {_changes(values): one for one, values in self._values.items()}

    def determine(self) -> bool:
        """Whether polynomials follow from their values at these sizes.

        >>> Samples(((5,), (7,), (9,)), 1).determine(), Samples(((5,), (7,), (7,)), 1).determine()
        (True, False)
        """
        free = Conditions(tuple(f"n{i}" for i in range(self.free)))
        evaluate = free.evaluator(list(_monomials(self.free, DETERMINED_DEGREE)))
        rows = [[Fraction(n) for n in evaluate(*sizes[: self.free])] for sizes in self.sizes]
        return _rank(rows) == len(rows[0]) and len(self._by_changes) == len(self._values)

    def polynomial_through(self, column: Sequence[Any]) -> Terms | None:
        """The polynomial in ``n0``, ``n1``, ... that has the numbers of ``column`` at these sizes; None if there is
        none with few terms.

        >>> samples = Samples(((5, 2), (7, 3), (6, 8), (9, 4)), 2)
        >>> samples.polynomial_through([64 * a * b - 32 for a, b in samples.sizes])
        (((), -32), (('n0', 'n1'), 64))
        >>> samples.polynomial_through([a // 2 for a, _ in samples.sizes]) is None
        True
        >>> samples = Samples(tuple((a, b) for a in (5, 7, 12) for b in (2, 3, 9)), 2)
        >>> samples.polynomial_through([(a + 1) * (b + 1) for a, b in samples.sizes])
        (((), 1), (('n0',), 1), (('n0', 'n1'), 1), (('n1',), 1))
        """
        if any(type(number) is not int for number in column):
            return None
        for support in self._supports(column):
            found = _coefficients([self._values[one] for one in support], column)
            if found is not None:
                return sum_of(*(product_of(one, (((), c),)) for one, c in zip(support, found, strict=True)))
        return None

    def _supports(self, column: Sequence[int]) -> Iterator[tuple[Terms, ...]]:
        """Terms of which the numbers may be the sum, with coefficients; the fewest first."""
        one_changes = self._by_changes.get(_changes(column), CONSTANT)
        yield (one_changes,)
        if one_changes != CONSTANT:
            yield CONSTANT, one_changes
        pairs = list(combinations(list(self._values.items())[1:], 2))
        for (one, a), (two, b) in pairs:
            if _may_be_dependent((a, b, column)):
                yield one, two
        since_first = [number - column[0] for number in column[1:]]
        changes = {one: [number - values[0] for number in values[1:]] for one, values in self._values.items()}
        for (one, _), (two, _) in pairs:
            if _may_be_dependent((changes[one], changes[two], since_first)):
                yield CONSTANT, one, two
        every = list(_monomials(len(self.sizes[0]), DETERMINED_DEGREE))
        if len(self.sizes) >= len(every) + SPARE and self._values.keys() >= set(every):
            yield tuple(every)
        if len(self._values) <= MOST_TRIPLES:
            yield from combinations(list(self._values)[1:], 3)


def _monomials(count: int, degree: int) -> Iterator[Terms]:
    """Products of sizes, those of low degree first.

    >>> [of for ((of, _),) in _monomials(2, 2)]
    [(), ('n0',), ('n1',), ('n0', 'n0'), ('n0', 'n1'), ('n1', 'n1')]
    """
    for of in range(degree + 1):
        for one in combinations_with_replacement(range(count), of):
            yield ((tuple(sorted(f"n{i}" for i in one)), 1),)


def _monic(terms: Terms) -> Terms:
    """A polynomial without its constant, divided by what divides its coefficients.

    >>> _monic((((), 8), (("n0",), -64), (("n1",), 128)))
    ((('n0',), 1), (('n1',), -2))
    """
    rest = [(factors, times) for factors, times in terms if factors]
    common = gcd(*(times for _, times in rest)) if rest and rest[0][1] > 0 else -gcd(*(times for _, times in rest))
    return tuple((factors, times // common) for factors, times in rest)


def _with_one_more(polynomials: Iterable[Terms], free: int) -> Iterator[Terms]:
    """Polynomials, and each of them times one of so many sizes."""
    for one in polynomials:
        yield one
        yield from (product_of(one, (((f"n{i}",), 1),)) for i in range(free))


def _changes(values: Sequence[int]) -> tuple[int, ...]:
    """The differences from the first value, in their ratios: equal for values and for multiples plus a constant.

    >>> _changes([5, 7, 11]), _changes([20, 18, 14]), _changes([8, 8, 8])
    ((0, 1, 3), (0, 1, 3), (0, 0, 0))
    """
    differences = [one - values[0] for one in values]
    first = next((one for one in differences if one), 1)
    common = gcd(*differences) or 1
    return tuple(one // (common if first > 0 else -common) for one in differences)


def _may_be_dependent(columns: tuple[Sequence[int], Sequence[int], Sequence[int]]) -> bool:
    """Whether the first three numbers of three columns are linearly dependent."""
    (a, b, c), (d, e, f), (g, h, i) = (column[:3] for column in columns)
    return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g) == 0


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
