"""One kernel for all calls of a region, where calls differ in sizes.

    add [5, 64], tanh [5, 64]      seen before
    add [7, 64], tanh [7, 64]      lowered now       ->      add [n, 64], tanh [n, 64]  while  n >= 2
    add [9, 64], tanh [9, 64]      is the same kernel, told n = 9

A region is *spelled* as a text without its numbers, and the numbers. Where an equal text came with other numbers
before, those that differ are written down as polynomials in the sizes that are known to vary, and the region is lowered
with extents (:mod:`fuse.kernel.extents`) in their place. The kernel then serves every call with this text whose other
numbers are equal, whose polynomials hold, and whose sizes meet the conditions that were noted: all of it is checked for
each call, nothing is assumed of sizes that were not seen.

The caller says which calls vary in sizes (:func:`lowering_for`). Regions of one call, too, may have one text and other
numbers, as those of several layers: each is compared with that in its place in other calls.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement, product
from typing import Any, Generic, TypeVar

from fuse.kernel.extents import LEAST, TELLING, Conditions, Real
from fuse.kernel.polynomials import Terms, product_of, sum_of
from fuse.kernel.spelled import Numbers

Made = TypeVar("Made")

LARGEST_REFERENCES = 8
"""Calls that are remembered of one text."""
LARGEST_FAMILIES = 8
"""Kernels for varying sizes of one text; beyond, each call has its own, as without."""


@dataclass(frozen=True)
class SizedCall:
    """A call whose regions are lowered: its sizes that vary from call to call (None where none are known to), and the
    numbers of each text so far.

    ``remarks``: what passes noted of calls of this model, by place; each place as the first call had it, ``own`` are
    those of this call.
    """

    sizes: frozenset[int] | None
    numbers: dict[str, list[Numbers]] = field(default_factory=dict)
    remarks: dict[Hashable, set[Hashable]] = field(default_factory=dict)
    own: set[Hashable] = field(default_factory=set)

    def place(self, text: str, numbers: Numbers) -> int:
        """Which of the regions with this text these numbers are of: several layers may have regions alike."""
        found = self.numbers.setdefault(text, [])
        if numbers not in found:
            found.append(numbers)
        return found.index(numbers)

    def follows_from_sizes(self, place: Hashable, what: Hashable) -> bool:
        """Whether a call of other sizes had something else in this place, so that it is no rule; it is remembered.

        >>> remarks = {}
        >>> first, second = SizedCall(None, remarks=remarks), SizedCall(frozenset({5}), remarks=remarks)
        >>> first.follows_from_sizes("x / length", 3), second.follows_from_sizes("x / length", 1)
        (False, True)
        >>> first.follows_from_sizes("x * 1", 1), second.follows_from_sizes("x * 1", 1)
        (False, False)
        """
        if place not in self.remarks:
            self.own.add(place)
            self.remarks[place] = set()
        if place in self.own:
            self.remarks[place].add(what)
        return self.sizes is not None and what not in self.remarks[place]


_CALL: ContextVar[SizedCall | None] = ContextVar("call", default=None)


@contextlib.contextmanager
def lowering_for(sizes: frozenset[int] | None, remarks: dict[Hashable, set[Hashable]] | None = None) -> Iterator[None]:
    """Regions that are lowered inside are those of one call.

    ``sizes`` are those that vary from call to call. Where there are some, regions get kernels for all sizes, if they
    can; where none is larger than one, only kernels that are there. With None, each gets its own. ``remarks`` are those
    of all calls of one model.
    """
    with lowering_of(SizedCall(sizes, remarks={} if remarks is None else remarks)):
        yield


@contextlib.contextmanager
def lowering_of(call: SizedCall | None) -> Iterator[None]:
    """Regions that are lowered inside are of this call, too: what of it is only made once it is needed."""
    token = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(token)


def call_at_hand() -> SizedCall | None:
    """The call whose regions are lowered; None where nobody said so."""
    return _CALL.get()


def sizes_vary() -> bool:
    """Whether the call whose regions are lowered is known to differ from others in sizes."""
    call = call_at_hand()
    return call is not None and call.sizes is not None


def sizes_are_told() -> bool:
    """Whether kernels of the call whose regions are lowered can be told sizes, and serve other calls then."""
    call = call_at_hand()
    return call is not None and bool(call.sizes)


# ---- relations -------------------------------------------------------------------------------------------------------

Relation = tuple[int | Terms, ...]
"""Each number of a text: a constant, or a polynomial in the sizes."""


def relation_of(
    now: Numbers, references: Sequence[Numbers], apart: frozenset[int] = frozenset()
) -> tuple[tuple[int, ...], Relation] | None:
    """How the numbers of a text follow from sizes: where each size stands, and what every number is.

    The sizes are the smallest numbers that differ and follow from no others: as a multiple of one, of two of them, one
    and a few, a number without one, or what is left of one in whole windows; numbers ``apart`` follow from none. Calls
    in which a size is one tell only where no others do (one window, then several). None where there is nothing to
    relate to, and where a number below zero follows from no other.

    >>> relation_of((7, 3, 448, 8), [(5, 3, 320, 6)])
    ((0,), (((('n0',), 1),), 3, ((('n0',), 64),), (((), 1), (('n0',), 1))))
    >>> relation_of((7, 7.0), [(5, 5.0)])
    ((0, 1), (((('n0',), 1),), ((('n1',), 1),)))
    >>> relation_of((99, 29, 2), [(11, 53, 1)], frozenset({99}))  # 64 windows - steps
    ((2, 0), (((('n1',), 1),), ((('n0',), 64), (('n1',), -1)), ((('n0',), 1),)))
    >>> relation_of((9, 55, -55), [(5, 59, -59)])  # 64 - steps
    ((0,), (((('n0',), 1),), (((), 64), (('n0',), -1)), (((), -64), (('n0',), 1))))
    """
    alike = [o for o in references if all(map(are_alike, now, o))]
    alike = alike or [o for o in references if all(map(_are_alike_but_for_ones, now, o))]
    columns = list(zip(now, *alike, strict=True))
    vary = {place for place, column in enumerate(columns) if len(set(column)) > 1}
    if not vary:
        return None
    sizes: list[Column] = []
    factors: list[tuple[Column, Terms]] = []  # sizes, and those that are a few more or less than one
    known: dict[tuple[type, Column], Terms] = {}
    kinds = [(type(column[0]), column) for column in columns]  # 2 and 2.0 are two numbers: 1 / 2 is 0 in C++
    places: list[int] = []
    whole = {columns[place] for place in vary if kinds[place][0] is int}
    rests = _rests(whole, apart)
    for column in sorted(whole, key=lambda c: (c in rests, min(c) < 0, max(map(abs, c)), c)):
        terms = None if column[0] in apart else _multiple(column, factors)
        if terms is None:
            if column in rests:
                terms = sum_of(*(product_of(known[int, of], (((), times),)) for of, times in rests[column]))
            elif column[0] not in apart:
                terms = _shift(column, sizes)
            if terms is None and min(column) < 0:
                return None
            if terms is None:
                terms = (((f"n{len(sizes)}",), 1),)
                sizes.append(column)
                places.append(kinds.index((int, column)))
            factors.append((column, terms))
        known[int, column] = terms
    for place in sorted(vary):
        if kinds[place] not in known:  # floats, which follow from nothing
            known[kinds[place]] = (((f"n{len(places)}",), 1),)
            places.append(place)
    numbers = (known[kind] if place in vary else kind[1][0] for place, kind in enumerate(kinds))
    return tuple(places), tuple(numbers)


def are_alike(a: Any, b: Any) -> bool:
    """Whether two numbers may be one that varies: floats, and sizes that tell, or what is cut off by them.

    >>> are_alike(5, 7), are_alike(-5, -7), are_alike(-5, 7), are_alike(1, 2)
    (True, True, False, False)
    """
    return a == b or isinstance(a, float) or min(a, b) >= TELLING or max(a, b) <= -TELLING


def _are_alike_but_for_ones(now: Any, other: Any) -> bool:
    """Whether two numbers may be one that varies, and that tells now: the other call may have had one of it."""
    return are_alike(now, other) or (now >= TELLING and other >= LEAST)


Column = tuple[Any, ...]
"""One number of a text in several calls."""


def _multiple(column: Column, factors: Sequence[tuple[Column, Terms]]) -> Terms | None:
    """A number as a multiple of a factor, or of two."""
    for i, (one, terms) in enumerate(factors):
        for two, more in [((1,) * len(one), (((), 1),)), *factors[: i + 1]]:
            times = column[0] // ((one[0] * two[0]) or 1)
            if times and all(c == times * a * b for c, a, b in zip(column, one, two, strict=True)):
                return product_of(terms, more, (((), times),))
    return None


def _shift(column: Column, sizes: Sequence[Column]) -> Terms | None:
    """A number as a size and a few more or less, or as what is left of a number without a size."""
    for sign, (i, one) in product((1, -1), enumerate(sizes)):
        shift = column[0] - sign * one[0]
        if all(c == sign * a + shift for c, a in zip(column, one, strict=True)):
            return (((), shift), ((f"n{i}",), sign))
    return None


def _rests(columns: Set[Column], apart: frozenset[int]) -> dict[Column, tuple[tuple[Column, int], tuple[Column, int]]]:
    """Numbers that are what is left of a size in whole windows (``n % 64``), or what a size leaves of them
    (``-n % 64``): of each the size and the number of windows, with what they are times.

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


def lifted(relation: Relation, sizes: Numbers, usual: Numbers, of_text: bool = True) -> tuple[Conditions, Numbers]:
    """The numbers of the call with these sizes, those that vary as extents."""
    conditions = Conditions(of_text=of_text)
    values: dict[str, Any] = {}
    for i, (size, most) in enumerate(zip(sizes, usual, strict=True)):
        name = f"n{i}"
        values[name] = conditions.real(name, size) if isinstance(size, float) else conditions.size(name, size, most)
    numbers: list[Any] = []
    for number in relation:
        if isinstance(number, tuple) and isinstance(told := values[number[-1][0][-1]], Real):
            numbers.append(told)
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
    """What was made for all calls of a text whose numbers follow from sizes alike.

    ``numbers`` computes the numbers of a call from its sizes, ``met`` says whether they meet the conditions.
    """

    made: Made
    conditions: Conditions
    places: tuple[int, ...]
    numbers: Callable[..., Numbers]
    met: Callable[..., bool]

    def sizes(self, numbers: Numbers) -> Numbers | None:
        """The sizes of a call with these numbers; None where it is no member."""
        sizes = tuple(numbers[place] for place in self.places)
        return sizes if self.numbers(*sizes) == numbers and self.met(*sizes) else None


@dataclass
class Text(Generic[Made]):
    """What is known of regions with one text: the numbers of some, and families. ``failures`` bounds the attempts."""

    references: dict[int, list[Numbers]] = field(default_factory=dict)
    families: list[SizeFamily[Made]] = field(default_factory=list)
    failures: int = 0

    def remember(self, place: int, numbers: Numbers) -> None:
        """Keep the numbers of the region in this place of a call."""
        known = self.references.setdefault(place, [])
        if numbers not in known:
            self.references[place] = [*known[-LARGEST_REFERENCES + 1 :], numbers]

    def member(
        self, numbers: Numbers, place: int, apart: frozenset[int], lower: Lower[Made]
    ) -> tuple[SizeFamily[Made], Numbers] | None:
        """The family that a call with these numbers belongs to, and its sizes; a new one if need be and possible.

        ``lower`` makes what serves a region with these numbers, extents among them, or None.
        """
        others = self.references.get(place, [])
        for family in self.families:
            if (sizes := family.sizes(numbers)) is not None:
                return family, sizes
        if not apart or len(self.families) + self.failures >= LARGEST_FAMILIES:
            return None
        found, base, seen = relation_of(numbers, others, apart), numbers, others
        if found is None and others:  # a size is one in this call, and does not tell; it was another in the last
            base, seen = others[-1], [numbers]
            found = relation_of(base, seen, _in_their_places(apart, numbers, base))
        elif found is None and (supposed := _supposed(numbers, apart)) is not None:
            seen = [supposed]
            found = relation_of(base, seen, apart)
        if found is None:
            return None
        made = _family(base, seen, *found, lower)
        if made is None:
            self.failures += 1
            return None
        self.families.insert(0, made)
        sizes = made.sizes(numbers)
        return None if sizes is None else (made, sizes)


def _supposed(numbers: Numbers, apart: frozenset[int]) -> Numbers | None:
    """What another call might have where this one has ``numbers``, the first with their text: as a branch is taken for
    the first time. What the sizes ``apart`` are factors of is taken to follow from them; where that is wrong, the
    kernel serves this call only. None where widths may be mistaken for sizes: these are often powers of two.

    >>> _supposed((5, 8, 40, 8, 55), frozenset({5, 11}))
    (11, 8, 88, 8, 253)
    >>> _supposed((5, 1 / 5, 1 / 8), frozenset({5}))
    (11, 0.09090909090909091, 0.125)
    >>> _supposed((4, 8, 32, 8), frozenset({4})) is None
    True
    """
    others = {size: 2 * size + 1 for size in sorted(apart)}
    if any(size < TELLING or size & (size - 1) == 0 for size in others):
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


def _in_their_places(apart: frozenset[int], numbers: Numbers, others: Numbers) -> frozenset[int]:
    """Numbers of another call in place of this call's numbers ``apart``."""
    return frozenset(other for number, other in zip(numbers, others, strict=True) if number in apart)


def _family(
    numbers: Numbers,
    others: Sequence[Numbers],
    places: tuple[int, ...],
    relation: Relation,
    lower: Lower[Made],
) -> SizeFamily[Made] | None:
    """A kernel that serves a region at all sizes, lowered for the sizes of this call and once more for others.

    None where that gives another kernel: something was not noted. None, too, where no other sizes are known that meet
    the conditions, so that nothing would be gained.
    """
    now = tuple(numbers[place] for place in places)
    conditions, values = lifted(relation, now, now)
    made = lower(values, conditions)
    if made is None:
        return None
    expected = ", ".join(conditions.python(n) if isinstance(n, tuple) else repr(n) for n in relation)
    family = SizeFamily(made, conditions, places, conditions.function(f"({expected},)"), conditions.met())
    assert family.sizes(numbers) is not None
    elsewhere = _elsewhere(family, now, others)
    if elsewhere is None:
        return None
    if not _is_again(family, relation, elsewhere, now, lower):
        return None
    ones = tuple(n if isinstance(n, float) else 1 for n in now)
    if family.met(*ones) and not _is_again(family, relation, ones, now, lower):
        whole = [name for name, n in zip(conditions.sizes, now, strict=True) if type(n) is int]
        conditions.noted |= {f"{name} >= {TELLING}": True for name in whole}
        return replace(family, met=conditions.met())
    return family


def _is_again(family: SizeFamily[Made], relation: Relation, sizes: Numbers, usual: Numbers, lower: Lower[Made]) -> bool:
    """Whether the same is made at other sizes."""
    again, values = lifted(relation, sizes, usual)
    try:
        return lower(values, again) == family.made
    except Exception:  # sizes that were made up may contradict each other
        return False


def _elsewhere(family: SizeFamily[Made], now: Numbers, others: Sequence[Numbers]) -> Numbers | None:
    """The sizes, of other calls or made up, that the family serves and in which most differ from those ``now``."""
    seen = [sizes for other in others if (sizes := family.sizes(other)) is not None]
    together = [tuple(change(n) for n in now) for change in _CHANGES]
    apart = [(*now[:i], change(n), *now[i + 1 :]) for i, n in enumerate(now) for change in _CHANGES]
    whole = [place for place, n in enumerate(now) if type(n) is int]
    made_up = [sizes for sizes in (*together, *apart) if all(sizes[i] >= LEAST for i in whole) and family.met(*sizes)]
    differ = [sum(a != b for a, b in zip(sizes, now, strict=True)) for sizes in (*seen, *made_up)]
    return max(zip(differ, (*seen, *made_up), strict=True), key=lambda found: found[0], default=(0, None))[1]


_CHANGES: tuple[Callable[[int], int], ...] = (lambda n: n + 1, lambda n: 2 * n, lambda n: 3 * n, lambda n: n - 1)
