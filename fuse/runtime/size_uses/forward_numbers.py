"""Numbers that ``forward`` computes from sizes, and the numbers of graphs that are equal to them.

    pad = -x.shape[0] % 8                    3   5   2     a number of ``forward``, at three captured lengths
    the graph's padding                      3   5   2     equal in all of these calls: it is that number
    8 * windows = length + padding          16  40  24     so there are (n + -n % 8) // 8 windows

A number of a graph that is no polynomial in sizes, and that no operator computes, is one of ``forward``'s. Several may
be equal to it in all captured calls. Then it is known only where they agree, and so is a number that all captured calls
had alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from fuse.kernel.arithmetic.extents import Conditions
from fuse.kernel.arithmetic.polynomials import Terms
from fuse.kernel.sizes.region_text import Numbers
from fuse.runtime.size_uses.derived_sizes import Equation, solved

UNKNOWN = "unknown"
"""Prefix of the names of sizes for which no formula is known."""


def expressions_of(conditions: Conditions) -> list[str]:
    """The quotients and remainders that were computed, and what was computed from these, as Python expressions."""
    computed = (terms for terms in conditions.computed or () if any("(" in f for factors, _ in terms for f in factors))
    return [text for text in dict.fromkeys(map(conditions.python, computed)) if UNKNOWN not in text]


def equal_numbers(
    expressions: Iterable[str], calls: Sequence[Numbers], columns: Mapping[Numbers, int | Terms], named: Conditions
) -> Iterator[tuple[str, int | Terms]]:
    """The expressions that had the values of a number of the graph in all calls, or one value, with this number.

    ``calls`` are the sizes of the calls, ``columns`` the numbers by their values.
    """
    for expression in expressions:
        compute = named.function(expression)
        values = tuple(compute(*sizes) for sizes in calls)
        number = columns.get(values, values[0] if len(set(values)) == 1 else None)
        if number is not None:
            yield expression, number


def equations_with(
    equal: Iterable[tuple[str, int | Terms]], unknown: Sequence[str], named: Conditions
) -> Iterator[Equation]:
    """Equations for unknown sizes, from expressions that are equal to numbers with these.

    >>> windows = ((("derived0()",), 8), (("n0",), -1))
    >>> next(equations_with([("(-n0 % 8)", windows)], ["derived0()"], Conditions(("n0",))))
    ('derived0()', '(((1)*(-n0 % 8)+(1)*n0) // 8)')
    """
    for expression, number in equal:
        if isinstance(number, tuple):
            yield from solved(number, (((expression,), 1),), named, unknown)


def agreements(equal: Iterable[tuple[str, int | Terms]], named: Conditions) -> dict[str, bool]:
    """Conditions that these expressions are equal to the numbers."""
    numbers = ((text, named.python(of) if isinstance(of, tuple) else str(of)) for text, of in equal)
    return {f"{text} == {of}": True for text, of in numbers}
