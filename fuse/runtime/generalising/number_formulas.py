"""Formulas for the numbers of captured graphs with one text.

    rows of x   50  20  61     a size, n0
    columns      3   5   9     a size, n1
    elements   150 100 549     n0 * n1
    a constant  64  64  64     64
    pooled      25  10  30     n0 // 2, by the pool's own formula

Each number is a constant, or a polynomial in the sizes of the arguments and in sizes that operators compute from these
(:mod:`fuse.runtime.size_uses.derived_sizes`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, combinations_with_replacement, product
from math import prod

from fuse.kernel.arithmetic.extents import Conditions
from fuse.kernel.sizes.region_text import Numbers
from fuse.kernel.sizes.relations import Relation, lifted, relation_of, renamed
from fuse.runtime.generalising.captured_calls import CapturedGraphs
from fuse.runtime.resizing.resized import nodes_with
from fuse.runtime.size_uses.derived_sizes import Equations, equations_of, in_given_sizes

FEWEST = 4
"""Fewest calls with one text where several sizes vary: with fewer, several formulas may fit."""
FEWEST_OF_ONE_SIZE = 3
"""Fewest calls where one size varies, and fewest values of each size: a formula in one size (a multiple, a sum with a
constant, a multiple of a square) follows from one or two calls, and the others check it."""
FEW_COLUMNS = 16
"""Most sizes of which products of four are compared."""
NO_EQUATIONS = Equations((), False, frozenset())
Derived = Mapping[str, tuple[str, ...]]
"""By name of a size that is computed, its formulas in the sizes of the arguments; none as long as they are unknown."""


@dataclass(frozen=True)
class Formulas:
    """The positions of the sizes among the numbers of a text; all numbers as polynomials in these and in derived sizes;
    the formulas of derived sizes, and the equations that operators give for these."""

    positions: tuple[int, ...]
    relation: Relation
    derived: Derived
    equations: Equations = NO_EQUATIONS

    @property
    def sizes(self) -> Conditions:
        """The sizes by their names, without conditions."""
        return named_sizes(len(self.positions), self.derived)


def formulas_through(calls: Sequence[CapturedGraphs], fewest: int) -> Formulas | None:
    """Formulas for the numbers of calls with one text; None if there are none, or if several may fit.

    Each size needs ``fewest`` different values.
    """
    found = _polynomials(calls, fewest)
    if found is None and fewest >= FEWEST_OF_ONE_SIZE:
        found = _with_derived_sizes(calls)
    numbers = [one.numbers for one in calls]
    return found if found is not None and _are_independent_sizes(found.sizes.sizes, found.relation, numbers) else None


def _polynomials(same: Sequence[CapturedGraphs], fewest: int) -> Formulas | None:
    """Formulas without derived sizes for the numbers of graphs with one text; None if there are none."""
    last = same[-1]
    found = relation_of(last.numbers, [one.numbers for one in same[:-1]])
    if found is None or (len(found[0]) > 1 and len(same) < FEWEST):
        return None
    positions, relation = found
    if any(len({one.numbers[position] for one in same}) < fewest for position in positions):
        return None
    arguments = relation[: last.arguments]
    are_given = all(source_of(f"n{i}", arguments) for i in range(len(positions)))
    return Formulas(positions, relation, {}) if are_given else None


def _with_derived_sizes(same: Sequence[CapturedGraphs]) -> Formulas | None:
    """Formulas for the numbers of graphs with one text, some of which follow from derived sizes; None if there are
    none."""
    arguments = [one.numbers[: one.arguments] for one in same]
    given = relation_of(arguments[-1], arguments[:-1])
    if len(same) < FEWEST or given is None:
        return None
    columns = list(zip(*(one.numbers for one in same), strict=True))
    clearest = min(range(len(same)), key=lambda i: _equal_by_chance(columns, given[0], i))
    chosen = same[clearest]
    others = [one.numbers for one in same if one is not chosen]
    found = relation_of(chosen.numbers, others, frozenset(chosen.numbers[position] for position in given[0]))
    if found is None or not set(given[0]) <= set(found[0]):
        return None
    if not all(_has_enough_values(columns[position]) for position in found[0]):
        return None
    free = given[0]
    rest = [position for position in found[0] if position not in free]
    names = {position: f"n{i}" for i, position in enumerate(free)} | {p: f"derived{i}()" for i, p in enumerate(rest)}
    relation = renamed(found[1], [names[position] for position in found[0]])
    relation = (*given[1], *relation[len(given[1]) :])  # a stride may also be a multiple of a derived size
    if not rest or not _products_vary(_moved([columns[position] for position in found[0]], columns)):
        return None
    values = {names[position]: chosen.numbers[position] for position in rest}
    equations = _equations(chosen, relation, free, values)
    derived = None if equations is None else in_given_sizes(equations.of_operators, list(values))
    if equations is None or derived is None or any(not of and name in equations.loose for name, of in derived.items()):
        return None
    made = Formulas(free, relation, derived, equations)
    return made if not all(derived.values()) or give(made, same) else None


def _equal_by_chance(columns: Sequence[Numbers], sizes: Sequence[int], call: int) -> int:
    """How many numbers equal one of the sizes in this call, and not in all calls."""
    own = {columns[position] for position in sizes}
    values = {column[call] for column in own}
    return sum(column[call] in values for column in set(columns) - own)


def _has_enough_values(column: Numbers) -> bool:
    """Whether a size had three values, or all between its least and its largest one: it never has others.

    >>> _has_enough_values((5, 9, 5, 5)), _has_enough_values((2, 3, 3, 2))
    (False, True)
    """
    values = set(column)
    return len(values) >= FEWEST_OF_ONE_SIZE or max(values) - min(values) < len(values)


def _moved(sizes: Sequence[Numbers], columns: Sequence[Numbers]) -> list[Numbers]:
    """The numbers that are sizes, or sizes plus a constant.

    >>> _moved([(2, 4, 3)], [(2, 4, 3), (5, 7, 6), (2, 4, 3), (4, 8, 6)])
    [(2, 4, 3), (5, 7, 6)]
    """
    distinct = dict.fromkeys(columns)
    return [one for one in distinct if any(len({a - b for a, b in zip(one, of, strict=True)}) == 1 for of in sizes)]


def _products_vary(columns: Sequence[Numbers]) -> bool:
    """Whether no product of two to four sizes, and no sum of two, is the same in all calls: it would be a constant.

    >>> _products_vary([(2, 4, 3), (24, 12, 16)]), _products_vary([(2, 4, 3), (24, 12, 17)])
    (False, True)
    """
    most = 4 if len(columns) <= FEW_COLUMNS else 3
    several = chain.from_iterable(combinations_with_replacement(columns, count) for count in range(2, most + 1))
    products = (map(prod, zip(*of, strict=True)) for of in several)
    sums = (map(sum, zip(*of, strict=True)) for of in combinations(columns, 2))
    return all(len(set(of)) > 1 for of in chain(products, sums))


def _equations(
    call: CapturedGraphs, relation: Relation, sizes: Sequence[int], derived: Mapping[str, int]
) -> Equations | None:
    """The equations of operators for derived sizes, by values in this call; ``sizes`` are positions of its numbers."""
    now = tuple(call.numbers[position] for position in sizes)
    conditions, numbers = lifted(relation, now, now, derived={name: str(value) for name, value in derived.items()})
    conditions.quotients.clear()  # the values are those of this call only
    try:
        return equations_of(nodes_with(call.call.graphs, numbers[len(call.call.integers) :]), conditions, list(derived))
    except Exception:  # a fault in fuse must not reach the user: every size is captured
        return None


def give(formulas: Formulas, calls: Sequence[CapturedGraphs]) -> bool:
    """Whether formulas give the numbers of all calls, and those of a derived size agree."""
    conditions = formulas.sizes
    numbers = conditions.evaluator(formulas.relation)
    choices = [conditions.function(f"{{{', '.join(of)}}}") for of in formulas.derived.values()]
    of_calls = [(one.numbers, [one.numbers[position] for position in formulas.positions]) for one in calls]
    return all(numbers(*sizes) == own and all(len(of(*sizes)) == 1 for of in choices) for own, sizes in of_calls)


def named_sizes(count: int, derived: Derived) -> Conditions:
    """So many sizes by their names, and sizes derived from them, without conditions."""
    names = tuple(f"n{i}" for i in range(count))
    return Conditions(names, quotients={name: of[0] for name, of in derived.items() if of})


def source_of(name: str, relation: Relation) -> tuple[int, int, int] | None:
    """A number that is ``factor * size + shift``: its position, the factor and the shift; None if there is none."""
    for position, terms in enumerate(relation):
        if isinstance(terms, tuple):
            factors = dict(terms)
            shift = factors.pop((), 0)
            if list(factors) == [(name,)]:
                return position, factors[name,], shift
    return None


def _are_independent_sizes(names: Sequence[str], relation: Relation, calls: Sequence[Numbers]) -> bool:
    """Whether the sizes of these calls vary independently, so that formulas in them are unique.

    They do not if a size is a linear combination of others and a constant, of another and their product, or a product
    of powers of others: if 2 * n0 + n1 is always 20, or n0 * n1 is always 48, the numbers 20 and 48 are unknown at
    other sizes. These numbers need not be in a graph: the gradient of a mean is divided by 48, which may give a float.

    >>> relation = ((("n0",), 1),), ((("n1",), 1),)
    >>> _are_independent_sizes(("n0", "n1"), relation, [(8, 6), (12, 4), (16, 3), (24, 2)])  # the product is always 48
    False
    >>> _are_independent_sizes(("n0", "n1"), relation, [(8, 6), (12, 4), (16, 5), (24, 2)])
    True
    """
    columns: dict[str, dict[Numbers, None]] = {}  # by size: its values, and the values of size plus a constant
    for terms, column in zip(relation, zip(*calls, strict=True), strict=True):
        if isinstance(terms, tuple):
            ((factors, times), *_) = (term for term in terms if term[0])
            alone = len(factors) == 1 and sum(1 for term in terms if term[0]) == 1
            if alone and factors[0] in names and abs(times) == 1:
                columns.setdefault(factors[0], {})[column] = None
    sizes = [next(iter(of)) for of in columns.values()]
    changes = [[float(n - of[0]) for n in of[1:]] for of in sizes]
    for pair in combinations(changes, 2):
        if not _independent([*pair, [a * b for a, b in zip(*pair, strict=True)]]):
            return False
    powers = ([[math.log(n / of[0]) for n in of[1:]] for of in chosen] for chosen in product(*columns.values()))
    return _independent(changes) and all(map(_independent, powers))


def _independent(columns: Sequence[Sequence[float]]) -> bool:
    """Whether the columns are linearly independent.

    >>> _independent([[1.0, 2.0, 3.0], [1.0, 0.0, 1.0]]), _independent([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]])
    (True, False)
    """
    rest = [[number / (max(map(abs, column)) or 1.0) for number in column] for column in columns]
    while rest:
        column = rest.pop()
        position = max(range(len(column)), key=lambda i: abs(column[i]))
        if abs(column[position]) < 1e-9:
            return False
        for other in rest:
            times = other[position] / column[position]
            other[:] = [b - times * a for a, b in zip(column, other, strict=True)]
            other[position] = 0.0
    return True
