"""Numbers of a text as polynomials in the sizes that vary, from their values in several calls.

batch 5, 7    length 3, 3    elements 320, 448    a margin 6, 8    ->    n0, 3, 64 * n0, n0 + 1
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from itertools import combinations, permutations, product
from typing import Any

from fuse.kernel.arithmetic.extents import LEAST, LEAST_LOWERED, Conditions, Extent, Real
from fuse.kernel.arithmetic.polynomials import Terms, product_of, sum_of
from fuse.kernel.sizes.region_text import MOVED, Numbers, is_moved

FEWEST_OF_SUMS = 4
"""Fewest calls from which follows that a number is the sum of two sizes."""

Relation = tuple[int | Terms, ...]
"""Each number of a text: a constant, or a polynomial in the sizes."""


def relation_of(
    now: Numbers, references: Sequence[Numbers], apart: frozenset[int] = frozenset()
) -> tuple[tuple[int, ...], Relation] | None:
    """The numbers ``now`` of a text as polynomials in its sizes: positions of the sizes, and a term for every number.

    Sizes are the smallest numbers that differ between calls and do not follow from others. A number follows from sizes
    as a multiple of one or two of them, as a size plus or minus a constant, as the sum of two sizes, or as the
    remainder of a size in whole windows; a negative number, also as the opposite of one that is known, or as the
    difference of two. The numbers
    ``apart`` are always sizes. Sizes are named in the order of their positions, so that high images and wide ones have
    one relation. Calls in which a number is one are used only if there are no others. Returns None if no number
    differs, or if a negative number does not follow from others.

    >>> relation_of((7, 3, 448, 8), [(5, 3, 320, 6)])
    ((0,), (((('n0',), 1),), 3, ((('n0',), 64),), (((), 1), (('n0',), 1))))
    >>> relation_of((7, 7.0), [(5, 5.0)])
    ((0, 1), (((('n0',), 1),), ((('n1',), 1),)))
    >>> relation_of((99, 29, 2), [(11, 53, 1)], frozenset({99}))  # 64 windows - steps
    ((0, 2), (((('n0',), 1),), ((('n0',), -1), (('n1',), 64)), ((('n1',), 1),)))
    >>> relation_of((9, 55, -55), [(5, 59, -59)])  # 64 - steps
    ((0,), (((('n0',), 1),), (((), 64), (('n0',), -1)), (((), -64), (('n0',), 1))))
    """
    alike = [o for o in references if all(map(are_alike, now, o))]
    alike = alike or [o for o in references if all(map(_are_alike_but_for_ones, now, o))]
    columns = list(zip(now, *alike, strict=True))
    vary = {position for position, column in enumerate(columns) if len(set(column)) > 1}
    if not vary:
        return None
    sizes: list[Column] = []
    factors: list[tuple[Column, Terms]] = []  # sizes and the numbers that follow from them
    known: dict[tuple[type, Column], Terms] = {}
    kinds = [(type(column[0]), column) for column in columns]  # 2 and 2.0 are two numbers: 1 / 2 is 0 in C++
    positions: list[int] = []
    whole = {columns[position] for position in vary if kinds[position][0] is int}
    rests = _rests(whole, apart)
    for column in sorted(whole, key=lambda c: (min(c) < 0, c in rests, max(map(abs, c)), c)):
        terms = None if column[0] in apart else _multiple(column, factors, columns)
        if terms is None:
            if column in rests:
                terms = sum_of(*(product_of(known[int, of], (((), times),)) for of, times in rests[column]))
            elif column[0] not in apart:
                terms = _shift(column, sizes) or _sum(column, sizes) or _moved(column, factors)
            if terms is None and min(column) < 0:
                opposite = known.get((int, tuple(-number for number in column)))
                terms = product_of(opposite, (((), -1),)) if opposite is not None else _difference(column, factors)
                if terms is None:
                    return None
            if terms is None:
                terms = (((f"n{len(sizes)}",), 1),)
                sizes.append(column)
                positions.append(kinds.index((int, column)))
            factors.append((column, terms))
        known[int, column] = terms
    for position in sorted(vary):
        if kinds[position] not in known:  # floats, which never follow from others
            known[kinds[position]] = (((f"n{len(positions)}",), 1),)
            positions.append(position)
    numbers = tuple(known[kind] if position in vary else kind[1][0] for position, kind in enumerate(kinds))
    in_order = sorted(positions)
    return tuple(in_order), renamed(numbers, [f"n{in_order.index(position)}" for position in positions])


def renamed(relation: Relation, names: Sequence[str]) -> Relation:
    """A relation with other names of its sizes ``n0``, ``n1``, ...

    >>> renamed((((("n1",), 1),), 8, ((("n0", "n1"), 2),), ((("n0",), 1),)), ["n1", "n0"])
    (((('n0',), 1),), 8, ((('n0', 'n1'), 2),), ((('n1',), 1),))
    """
    new = {f"n{i}": name for i, name in enumerate(names)}

    def with_names(terms: Terms) -> Terms:
        return tuple(sorted((tuple(sorted(new[name] for name in factors)), times) for factors, times in terms))

    return tuple(with_names(terms) if isinstance(terms, tuple) else terms for terms in relation)


def are_alike(a: Any, b: Any) -> bool:
    """Whether two numbers may be one number that varies: floats, integers from 2 on, or integers up to -2.

    >>> are_alike(5, 7), are_alike(-5, -7), are_alike(-5, 7), are_alike(1, 2)
    (True, True, False, False)
    """
    return a == b or isinstance(a, float) or min(a, b) >= LEAST_LOWERED or max(a, b) <= -LEAST_LOWERED


def _are_alike_but_for_ones(now: Any, other: Any) -> bool:
    """Whether two numbers may be one number that varies, where the other call may have had a one."""
    return are_alike(now, other) or (now >= LEAST_LOWERED and other >= LEAST)


Column = tuple[Any, ...]
"""The values of one number of a text in several calls."""


def _multiple(column: Column, factors: Sequence[tuple[Column, Terms]], columns: Sequence[Column] = ()) -> Terms | None:
    """A number as a multiple of a factor, or of the product of two; None if it is none.

    If several have this value in all calls, those that come last before it among ``columns`` are taken: a stride is a
    product of its own tensor's sizes.

    >>> high, half = ((62, 56), ((("n0",), 1),)), ((31, 28), ((("n1",), 1),))
    >>> _multiple((3844, 3136), [half, high], [(62, 56), (3844, 3136), (31, 28)])  # and not 4 * n1 * n1
    ((('n0', 'n0'), 1),)
    """
    found: list[tuple[tuple[Column, ...], Terms]] = []
    for i, (one, terms) in enumerate(factors):
        for two, more in [((1,) * len(one), (((), 1),)), *factors[: i + 1]]:
            times = column[0] // ((one[0] * two[0]) or 1)
            if times and all(c == times * a * b for c, a, b in zip(column, one, two, strict=True)):
                found.append(((one, two) if more[0][0] else (one,), product_of(terms, more, (((), times),))))
    if len(found) < 2 or column not in columns:
        return found[0][1] if found else None
    places = {of: place for place, of in enumerate(columns[: columns.index(column)])}
    return max(found, key=lambda one: min(places.get(of, -1) for of in one[0]))[1]


def _shift(column: Column, sizes: Sequence[Column]) -> Terms | None:
    """A number as a size plus a constant, or a constant minus a size; None if it is neither."""
    for sign, (i, one) in product((1, -1), enumerate(sizes)):
        shift = column[0] - sign * one[0]
        if all(c == sign * a + shift for c, a in zip(column, one, strict=True)):
            return (((), shift), ((f"n{i}",), sign))
    return None


def _moved(column: Column, factors: Sequence[tuple[Column, Terms]]) -> Terms | None:
    """A width of a padding, or an end of a slice, that is a multiple of a factor, or of the product of two."""
    terms = _multiple(tuple(number - MOVED for number in column), factors) if is_moved(column) else None
    return None if terms is None else sum_of(terms, (((), MOVED),))


def _sum(column: Column, sizes: Sequence[Column]) -> Terms | None:
    """A number as the sum of two sizes and a constant; None if it is none, or if too few calls tell.

    >>> _sum((7, 12, 9, 14), [(2, 5, 3, 9), (4, 6, 5, 4)])
    (((), 1), (('n0',), 1), (('n1',), 1))
    """
    if len(column) < FEWEST_OF_SUMS:
        return None
    for (i, one), (j, two) in combinations(enumerate(sizes), 2):
        shift = column[0] - one[0] - two[0]
        if all(c == a + b + shift for c, a, b in zip(column, one, two, strict=True)):
            terms = ((((), shift),) if shift else ()) + (((f"n{i}",), 1), ((f"n{j}",), 1))
            return sum_of(terms)
    return None


def _difference(column: Column, factors: Sequence[tuple[Column, Terms]]) -> Terms | None:
    """A negative number as the difference of two factors; None if it is none.

    >>> _difference((-5, -3), [((27, 13), ((("n0",), 1),)), ((2, 1), ((("n1",), 1),)), ((32, 16), ((("n1",), 16),))])
    ((('n0',), 1), (('n1',), -16))
    """
    for (one, terms), (two, more) in permutations(factors, 2):
        if all(c == a - b for c, a, b in zip(column, one, two, strict=True)):
            return sum_of(terms, product_of(more, (((), -1),)))
    return None


def _rests(columns: Set[Column], apart: frozenset[int]) -> dict[Column, tuple[tuple[Column, int], tuple[Column, int]]]:
    """Numbers that are the remainder of a size in whole windows (``n % 64``) or its padding to them (``-n % 64``).

    For each, the size and the number of windows, with their coefficients. Sizes are numbers ``apart``.

    >>> _rests({(11, 99), (53, 29), (1, 2)}, frozenset({11}))
    {(53, 29): (((11, 99), -1), ((1, 2), 64))}
    """
    found: dict[Column, tuple[tuple[Column, int], tuple[Column, int]]] = {}
    counts: set[Column] = set()
    smallest = sorted((c for c in columns if min(c) >= 0), key=lambda c: (max(c), c))
    sizes = [c for c in smallest if c[0] in apart]
    for rest, size, sign in product((c for c in smallest if c[0] not in apart), sizes, (1, -1)):
        whole = [all_of - sign * left for left, all_of in zip(rest, size, strict=True)]
        for windows in smallest if rest not in found and rest not in counts else ():
            steps = whole[0] // (windows[0] or 1)
            is_count = steps > max(rest) and whole == [steps * count for count in windows]
            if is_count and windows not in (rest, size) and windows not in found:
                found[rest] = (size, sign), (windows, -sign * steps)
                counts.add(windows)
                break
    return found


def lifted(
    relation: Relation, sizes: Numbers, usual: Numbers, of_text: bool = True, derived: Mapping[str, str] | None = None
) -> tuple[Conditions, Numbers]:
    """The numbers of a call with these sizes, numbers that vary as extents; and the conditions of these extents.

    ``derived``: Python expressions for the names in ``relation`` that are not sizes.
    """
    conditions = Conditions(of_text=of_text, quotients=dict(derived or {}))
    values: dict[str, Any] = {}
    for i, (size, most) in enumerate(zip(sizes, usual, strict=True)):
        name = f"n{i}"
        values[name] = conditions.real(name, size) if isinstance(size, float) else conditions.size(name, size, most)
    for name, python in conditions.quotients.items():
        values[name] = Extent(conditions.function(python)(*sizes), (((name,), 1),), conditions)
    numbers: list[Any] = []
    for number in relation:
        if isinstance(number, tuple) and isinstance(real := values[number[-1][0][-1]], Real):
            numbers.append(real)
        elif isinstance(number, tuple):
            terms = (math.prod((values[f] for f in factors), start=c) for factors, c in number)
            numbers.append(sum(terms, start=0))
        else:
            numbers.append(number)
    return conditions, tuple(numbers)
