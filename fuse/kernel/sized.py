"""One kernel for all calls of a region that differ only in sizes.

    add [5, 64], tanh [5, 64]      seen before
    add [7, 64], tanh [7, 64]      lowered now       ->      add [n, 64], tanh [n, 64]  while  n >= 2
    add [9, 64], tanh [9, 64]      served by the same kernel, with n = 9 as an argument

A region is split into a text without numbers, and its numbers (:mod:`fuse.kernel.region_text`). If the same text came
with other numbers before, those that differ become polynomials in the sizes that vary, and the region is lowered with
extents (:mod:`fuse.kernel.extents`) in their place. The kernel serves every call with the same text, whose constant
numbers are equal, whose other numbers follow by the polynomials, and whose sizes meet the recorded conditions. Each
call is checked; nothing is assumed about new sizes.

The caller says which sizes vary (:func:`lowering_for`). The layers of a network may give regions with one text and
different numbers within a call. The first of them is compared with the first in other calls, the second with the
second.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import combinations, combinations_with_replacement, permutations, product
from typing import Any, Generic, TypeVar

from fuse.kernel.extents import LEAST, LEAST_LOWERED, Conditions, Extent, Real
from fuse.kernel.polynomials import Terms, product_of, sum_of
from fuse.kernel.region_text import Numbers

Made = TypeVar("Made")

LARGEST_REFERENCES = 8
"""Most calls whose numbers are kept for one occurrence of a text."""
FEWEST_OF_SUMS = 4
"""Fewest calls from which follows that a number is the sum of two sizes."""
LARGEST_FAMILIES = 8
"""Most kernels for varying sizes of one text, failed attempts included; after that, each size gets its own kernel."""


@dataclass(frozen=True)
class SizedCall:
    """The call whose regions are being lowered.

    Attributes:
        sizes: its sizes that vary from call to call; None if none are known to vary.
        numbers: by text of a region, the numbers of its occurrences in this call so far.
        remarks: facts that passes recorded, by site in the model, as the first call with that site had them.
        own: the sites that this call recorded first.
    """

    sizes: frozenset[int] | None
    numbers: dict[str, list[Numbers]] = field(default_factory=dict)
    remarks: dict[Hashable, set[Hashable]] = field(default_factory=dict)
    own: set[Hashable] = field(default_factory=set)

    def occurrence(self, text: str, numbers: Numbers) -> int:
        """The index of ``numbers`` among the distinct numbers that regions of this call with this text have so far."""
        found = self.numbers.setdefault(text, [])
        if numbers not in found:
            found.append(numbers)
        return found.index(numbers)

    def follows_from_sizes(self, site: Hashable, what: Hashable) -> bool:
        """Whether the fact ``what`` at ``site`` holds at this call's sizes only; the first call's facts are recorded.

        False as long as no size varies, and if the first call with this site had the same fact.

        >>> remarks = {}
        >>> first, second = SizedCall(None, remarks=remarks), SizedCall(frozenset({5}), remarks=remarks)
        >>> first.follows_from_sizes("x / length", 3), second.follows_from_sizes("x / length", 1)
        (False, True)
        >>> first.follows_from_sizes("x * 1", 1), second.follows_from_sizes("x * 1", 1)
        (False, False)
        """
        if site not in self.remarks:
            self.own.add(site)
            self.remarks[site] = set()
        if site in self.own:
            self.remarks[site].add(what)
        return self.sizes is not None and what not in self.remarks[site]


_CALL: ContextVar[SizedCall | None] = ContextVar("call", default=None)


@contextlib.contextmanager
def lowering_for(sizes: frozenset[int] | None, remarks: dict[Hashable, set[Hashable]] | None = None) -> Iterator[None]:
    """A context in which the regions of one call are lowered.

    ``sizes`` are the call's sizes that vary from call to call. If there are some, regions get kernels for varying sizes
    where possible. If the set is empty (all are one), only existing kernels for varying sizes are used. With None, each
    region gets a kernel of its own. ``remarks`` are shared by all calls of a model.
    """
    with lowering_of(SizedCall(sizes, remarks={} if remarks is None else remarks)):
        yield


@contextlib.contextmanager
def lowering_of(call: SizedCall | None) -> Iterator[None]:
    """A context in which later parts of a call, such as its backward graph, are lowered."""
    token = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(token)


def call_at_hand() -> SizedCall | None:
    """The call whose regions are being lowered; None outside of :func:`lowering_for`."""
    return _CALL.get()


def sizes_vary() -> bool:
    """Whether the current call is known to differ from others in sizes."""
    call = call_at_hand()
    return call is not None and call.sizes is not None


def sizes_are_symbolic() -> bool:
    """Whether regions of the current call may get new kernels that take sizes as arguments."""
    call = call_at_hand()
    return call is not None and bool(call.sizes)


# ---- relations -------------------------------------------------------------------------------------------------------

Relation = tuple[int | Terms, ...]
"""Each number of a text: a constant, or a polynomial in the sizes."""


def relation_of(
    now: Numbers, references: Sequence[Numbers], apart: frozenset[int] = frozenset()
) -> tuple[tuple[int, ...], Relation] | None:
    """The numbers ``now`` of a text as polynomials in its sizes: positions of the sizes, and a term for every number.

    Sizes are the smallest numbers that differ between calls and do not follow from others. A number follows from sizes
    as a multiple of one or two of them, as a size plus or minus a constant, as the sum of two sizes, or as the
    remainder of a size in whole windows; a negative number, also as the difference of two that are known. The numbers
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
    for column in sorted(whole, key=lambda c: (c in rests, min(c) < 0, max(map(abs, c)), c)):
        terms = None if column[0] in apart else _multiple(column, factors)
        if terms is None:
            if column in rests:
                terms = sum_of(*(product_of(known[int, of], (((), times),)) for of, times in rests[column]))
            elif column[0] not in apart:
                terms = _shift(column, sizes) or _sum(column, sizes)
            if terms is None and min(column) < 0 and (terms := _difference(column, factors)) is None:
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


def _multiple(column: Column, factors: Sequence[tuple[Column, Terms]]) -> Terms | None:
    """A number as a multiple of a factor, or of the product of two; None if it is none."""
    for i, (one, terms) in enumerate(factors):
        for two, more in [((1,) * len(one), (((), 1),)), *factors[: i + 1]]:
            times = column[0] // ((one[0] * two[0]) or 1)
            if times and all(c == times * a * b for c, a, b in zip(column, one, two, strict=True)):
                return product_of(terms, more, (((), times),))
    return None


def _shift(column: Column, sizes: Sequence[Column]) -> Terms | None:
    """A number as a size plus a constant, or a constant minus a size; None if it is neither."""
    for sign, (i, one) in product((1, -1), enumerate(sizes)):
        shift = column[0] - sign * one[0]
        if all(c == sign * a + shift for c, a in zip(column, one, strict=True)):
            return (((), shift), ((f"n{i}",), sign))
    return None


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


# ---- kernels ---------------------------------------------------------------------------------------------------------


Lower = Callable[[Numbers, Conditions], Made | None]


@dataclass(frozen=True)
class SizeFamily(Generic[Made]):
    """A kernel for all calls of a text whose numbers follow from sizes by the same polynomials.

    Attributes:
        made: the kernel.
        conditions: recorded while it was lowered.
        positions: of the sizes among a call's numbers.
        numbers: computes the numbers of a call from its sizes.
        met: whether sizes meet the conditions.
    """

    made: Made
    conditions: Conditions
    positions: tuple[int, ...]
    numbers: Callable[..., Numbers]
    met: Callable[..., bool]

    def sizes(self, numbers: Numbers) -> Numbers | None:
        """The sizes of a call with these numbers; None where it is no member."""
        sizes = tuple(numbers[position] for position in self.positions)
        return sizes if self.numbers(*sizes) == numbers and self.met(*sizes) else None


@dataclass
class Text(Generic[Made]):
    """Known regions with one text: their numbers by occurrence, their families, and the number of failed attempts."""

    references: dict[int, list[Numbers]] = field(default_factory=dict)
    families: list[SizeFamily[Made]] = field(default_factory=list)
    failures: int = 0

    def remember(self, occurrence: int, numbers: Numbers) -> None:
        """Keep the numbers of the region that had this occurrence index in its call."""
        known = self.references.setdefault(occurrence, [])
        if numbers not in known:
            self.references[occurrence] = [*known[-LARGEST_REFERENCES + 1 :], numbers]

    def member(
        self, numbers: Numbers, occurrence: int, apart: frozenset[int], lower: Lower[Made]
    ) -> tuple[SizeFamily[Made], Numbers] | None:
        """The family that serves a call with these numbers, and the call's sizes; None if there is none.

        A new family is made if none serves the call. ``lower`` makes a kernel for numbers with extents among them, or
        returns None.
        """
        others = self.references.get(occurrence, [])
        for family in self.families:
            if (sizes := family.sizes(numbers)) is not None:
                return family, sizes
        if not apart or len(self.families) + self.failures >= LARGEST_FAMILIES:
            return None
        found, base, seen = relation_of(numbers, others, apart), numbers, others
        if found is None and others:  # a size is one in this call: relate the last call to this one instead
            base, seen = others[-1], [numbers]
            found = relation_of(base, seen, _in_their_positions(apart, numbers, base))
        elif found is None and (supposed := _supposed(numbers, apart)) is not None:
            seen = [supposed]
            found = relation_of(base, seen, apart)
        if found is None:
            return None
        made = _family(base, seen, *found, lower)
        if made is None and (tied := relation_of(base, seen)) not in (None, found):  # an image and one twice as high
            made = _family(base, seen, *tied, lower)
        if made is None:
            self.failures += 1
            return None
        self.families.insert(0, made)
        sizes = made.sizes(numbers)
        return None if sizes is None else (made, sizes)


def _supposed(numbers: Numbers, apart: frozenset[int]) -> Numbers | None:
    """Numbers of a made-up call with other sizes, for a text that no call had before (a branch taken the first time).

    Multiples of the sizes ``apart`` are assumed to follow from them; if that is wrong, the kernel serves this call
    only. Returns None if a size is a power of two or a multiple of another, so that it could be confused with another
    number.

    >>> _supposed((5, 8, 40, 8, 55), frozenset({5, 11}))
    (11, 8, 88, 8, 253)
    >>> _supposed((5, 1 / 5, 1 / 8), frozenset({5}))
    (11, 0.09090909090909091, 0.125)
    >>> _supposed((4, 8, 32, 8), frozenset({4})) is None
    True
    """
    others = {size: 2 * size + 1 for size in sorted(apart)}
    if any(size < LEAST_LOWERED or size & (size - 1) == 0 for size in others):
        return None
    if any(a != b and a % b == 0 for a in others for b in others):
        return None
    several = [of for count in (3, 2, 1) for of in combinations_with_replacement(others, count)]

    def another(number: Any) -> Any:
        if isinstance(number, float):
            count = round(1 / number) if 1e-9 < number < 1 else 1
            return 1 / another(count) if number == 1 / count else number
        for of in several if type(number) is int and number > 1 else ():
            times, rest = divmod(number, math.prod(of))
            if not rest and (times == 1 or times in numbers):
                return times * math.prod(others[size] for size in of)
        return number

    supposed = tuple(map(another, numbers))
    return None if supposed == numbers else supposed


def _in_their_positions(apart: frozenset[int], numbers: Numbers, others: Numbers) -> frozenset[int]:
    """Numbers of another call in place of this call's numbers ``apart``."""
    return frozenset(other for number, other in zip(numbers, others, strict=True) if number in apart)


def _family(
    numbers: Numbers,
    others: Sequence[Numbers],
    positions: tuple[int, ...],
    relation: Relation,
    lower: Lower[Made],
) -> SizeFamily[Made] | None:
    """A kernel for a region at varying sizes, lowered for the sizes of this call, and again for others as a check.

    Returns None if both differ, because a decision was not recorded. Also returns None if no other sizes meet the
    conditions, because the kernel would serve this call only.
    """
    now = tuple(numbers[position] for position in positions)
    conditions, values = lifted(relation, now, now)
    made = lower(values, conditions)
    if made is None:
        return None
    family = SizeFamily(made, conditions, positions, conditions.evaluator(relation), conditions.met())
    assert family.sizes(numbers) is not None
    elsewhere = _elsewhere(family, now, others)
    if elsewhere is None:
        return None
    if not _is_again(family, relation, elsewhere, now, lower):
        return None
    ones = tuple(n if isinstance(n, float) else 1 for n in now)
    if family.met(*ones) and not _is_again(family, relation, ones, now, lower):
        whole = [name for name, n in zip(conditions.sizes, now, strict=True) if type(n) is int]
        conditions.noted |= {f"{name} >= {LEAST_LOWERED}": True for name in whole}
        return replace(family, met=conditions.met())
    return family


def _is_again(family: SizeFamily[Made], relation: Relation, sizes: Numbers, usual: Numbers, lower: Lower[Made]) -> bool:
    """Whether the same kernel is made at other sizes."""
    again, values = lifted(relation, sizes, usual)
    try:
        return lower(values, again) == family.made
    except Exception:  # sizes that were made up may contradict each other
        return False


def _elsewhere(family: SizeFamily[Made], now: Numbers, others: Sequence[Numbers]) -> Numbers | None:
    """Sizes that the family serves, of other calls or made up: those that differ most from ``now``."""
    seen = [sizes for other in others if (sizes := family.sizes(other)) is not None]
    together = [tuple(change(n) for n in now) for change in _CHANGES]
    apart = [(*now[:i], change(n), *now[i + 1 :]) for i, n in enumerate(now) for change in _CHANGES]
    whole = [position for position, n in enumerate(now) if type(n) is int]
    made_up = [sizes for sizes in (*together, *apart) if all(sizes[i] >= LEAST for i in whole) and family.met(*sizes)]
    differ = [sum(a != b for a, b in zip(sizes, now, strict=True)) for sizes in (*seen, *made_up)]
    return max(zip(differ, (*seen, *made_up), strict=True), key=lambda found: found[0], default=(0, None))[1]


_CHANGES: tuple[Callable[[int], int], ...] = (lambda n: n + 1, lambda n: 2 * n, lambda n: 3 * n, lambda n: n - 1)
