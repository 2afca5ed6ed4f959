"""One kernel for all calls of a region that differ only in sizes.

    add [5, 64], tanh [5, 64]      seen before
    add [7, 64], tanh [7, 64]      lowered now       ->      add [n, 64], tanh [n, 64]  while  n >= 2
    add [9, 64], tanh [9, 64]      served by the same kernel, with n = 9 as an argument

A region is split into a text without numbers, and its numbers (:mod:`fuse.kernel.sizes.region_text`). If the same text
came with other numbers before, those that differ become polynomials in the sizes that vary, and the region is lowered
with extents (:mod:`fuse.kernel.arithmetic.extents`) in their place. The kernel serves every call with the same text,
whose constant numbers are equal, whose other numbers follow by the polynomials, and whose sizes meet the recorded
conditions. Each call is checked; nothing is assumed about new sizes.

The caller says which sizes vary (:func:`lowering_for`). The layers of a network may give regions with one text and
different numbers within a call. The first of them is compared with the first in other calls, the second with the
second.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement
from typing import Any, Generic, TypeVar

from torch.fx import GraphModule

from fuse.kernel.arithmetic.extents import LEAST, LEAST_LOWERED, Conditions
from fuse.kernel.sizes.region_text import Numbers
from fuse.kernel.sizes.relations import Relation, lifted, relation_of

Made = TypeVar("Made")

LARGEST_REFERENCES = 8
"""Most calls whose numbers are kept for one occurrence of a text."""
LARGEST_FAMILIES = 8
"""Most lowerings of one text for varying sizes, failed ones included; after that, each size gets its own kernel."""


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

    def so_far(self) -> SizedCall:
        """The same call, for one of several parts that may come next: each counts occurrences from here on."""
        return replace(self, numbers={text: list(found) for text, found in self.numbers.items()})

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

    def varies(self, site: Hashable, what: Hashable, graph: GraphModule) -> bool:
        """Whether a call had another fact than ``what`` at ``site``, which is recorded, in a model that divides sizes
        (:func:`keep_what_varies`). If not, a later call may have another one: then ``graph`` is outdated."""
        known = self.remarks.setdefault(site, set())
        known.add(what)
        if self.sizes is not None and len(known) > 1 and _KEEPS in self.remarks:
            return True
        graph.meta.setdefault("facts", []).append((self.remarks, known))
        return False


_KEEPS = "operators that do nothing in some calls are kept"


def keep_what_varies(remarks: dict[Hashable, set[Hashable]]) -> None:
    """Let passes keep operators that do nothing at some sizes, and something at others, in later calls of a model."""
    remarks.setdefault(_KEEPS, set())


def is_outdated(graph: GraphModule) -> bool:
    """Whether a pass took a fact for one of all calls that another call does not have: a capture now gives another
    graph."""
    return any(len(known) > 1 and _KEEPS in remarks for remarks, known in graph.meta.get("facts", ()))


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


Lower = Callable[[Numbers, Conditions], Made | None]


@dataclass(frozen=True)
class SizeFamily(Generic[Made]):
    """A kernel for all calls of a text whose numbers follow from sizes by the same polynomials.

    Attributes:
        made: the kernel.
        conditions: recorded while it was lowered.
        positions: of the sizes among a call's numbers.
        relation: the numbers of a call as polynomials in its sizes.
        numbers: computes the numbers of a call from its sizes.
        ranges: tests of sizes, of which one has to pass: whether they meet the conditions of one lowering.
    """

    made: Made
    conditions: Conditions
    positions: tuple[int, ...]
    relation: Relation
    numbers: Callable[..., Numbers]
    ranges: list[Callable[..., bool]]

    def met(self, *sizes: Any) -> bool:
        """Whether the kernel serves these sizes."""
        return any(one(*sizes) for one in self.ranges)

    def is_of(self, other: SizeFamily[Made]) -> bool:
        """Whether another family has the same kernel, with the same polynomials: two that differ may be equal numbers
        where each was lowered."""
        alike = (self.positions, self.relation) == (other.positions, other.relation)
        return alike and repr(self.made) == repr(other.made)

    def sizes(self, numbers: Numbers) -> Numbers | None:
        """The sizes of a call with these numbers; None where it is no member."""
        sizes = tuple(numbers[position] for position in self.positions)
        return sizes if self.numbers(*sizes) == numbers and self.met(*sizes) else None


@dataclass
class Text(Generic[Made]):
    """Known regions with one text: their numbers by occurrence, their families, and failed attempts to make a family,
    each the numbers of a call with their relation to those of others."""

    references: dict[int, list[Numbers]] = field(default_factory=dict)
    families: list[SizeFamily[Made]] = field(default_factory=list)
    failures: set[Hashable] = field(default_factory=set)

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
        attempts = sum(len(family.ranges) for family in self.families) + len(self.failures)
        if not apart or attempts >= LARGEST_FAMILIES:
            return None
        found, base, seen = relation_of(numbers, others, apart), numbers, others
        if found is None and others:  # a size is one in this call: relate the last call to this one instead
            base, seen = others[-1], [numbers]
            found = relation_of(base, seen, _in_their_positions(apart, numbers, base))
        elif found is None and (supposed := _supposed(numbers, apart)) is not None:
            seen = [supposed]
            found = relation_of(base, seen, apart)
        if found is None or (base, found) in self.failures:
            return None
        made = _family(base, seen, *found, lower)
        if made is None and (tied := relation_of(base, seen)) not in (None, found):  # an image and one twice as high
            made = _family(base, seen, *tied, lower)
        if made is None:
            self.failures.add((base, found))
            return None
        if (known := next((one for one in self.families if one.is_of(made)), None)) is not None:
            known.ranges.extend(made.ranges)  # lowering compared sizes, with no effect
        else:
            self.families.insert(0, made)
        sizes = made.sizes(numbers)
        return None if sizes is None else (known or made, sizes)


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
    family = SizeFamily(made, conditions, positions, relation, conditions.evaluator(relation), [conditions.met()])
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
        return replace(family, ranges=[conditions.met()])
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
