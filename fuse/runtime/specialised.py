"""Programs for calls that only values tell apart: which to try first, and when to make no more of them.

    call -> the specialisation that followed last time  -- confirmed -->  result
                |  missed: nothing that the caller sees has changed
                v
            the others that fit what was computed by then, the most recent first  -- confirmed -->  result
                |  all missed
                v
            captured once more, with what this call reads; eager where that was in vain too often

A program computes what Python learned when it was captured, and confirms that it is as it was before inputs are written
and results leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fuse.graph.learned import Learned, Learning
from fuse.graph.locks import ForkedLock
from fuse.runtime.ending import Ending, beside
from fuse.runtime.steps import Fallback, Launches

LARGEST_FAMILY = 8
LARGEST_UNUSED = 4
"""Specialisations made without any having served a second call."""

PATIENCE = 16
"""Calls in vain, more than others, after which no specialisation is tried any more."""

LARGEST_DOUBT = 0.4
"""Share of the last eight calls or so in which another than the likely specialisation served."""

LEAST_DOUBT = 0.01
"""The same share below which calls that the last specialisation serves are no longer counted, which saves a lock in
each: nineteen of them in a row after one that another served, whose share of an eighth falls by an eighth a call."""

CLOSE = 1e-4
"""Relative tolerance between a fused value and the value of eager operators."""


class Missed(Exception):
    """A specialisation does not serve this call: ``learned`` is otherwise now, or the program raised (None). ``told``:
    what is learned now, by keys."""

    def __init__(self, learned: Learned | None, told: Mapping[int, object] | None = None) -> None:
        super().__init__(str(learned) if learned else "raised")
        self.learned = learned
        self.told = told or {}


class Confirmation:
    """Raises where values that a program gives are not what was learned.

    Numbers that the first call computes with other roundings than eager operators did are those expected from then on.
    With an ``ending``, a loop may end after any number of steps that is ``served``: how often it went on, and how such
    a call ended when it was captured.

    >>> confirm = Confirmation(Learning(1, (Learned("model.py:3", "truth", 0, None, True),), ()))
    >>> confirm([torch.tensor(True)])
    >>> confirm([torch.tensor(False)])
    Traceback (most recent call last):
    fuse.runtime.specialised.Missed: a value read at model.py:3 is True
    """

    def __init__(self, learning: Learning, ending: Ending | None = None) -> None:
        self.learning = learning
        self.ending = ending
        self.served = {ending.count: ending} if ending else {}
        self._others = beside(learning, ending.truths) if ending else learning
        self._is_first = True

    def __call__(self, values: Sequence[Tensor | None]) -> None:
        if self._is_first:
            self._is_first = False
            self.learning = replace(
                self.learning, learned=tuple(_as_computed(one, values) for one in self.learning.learned)
            )
            self._others = beside(self.learning, self.ending.truths) if self.ending else self.learning
        ended = self.ending is not None and self.ending.went_on(values) in self.served
        learning = self._others if ended else self.learning
        if different := learning.difference(values):
            raise Missed(different, self.learning.values_by_key(values))

    def fits(self, told: Mapping[int, object]) -> bool:
        """Whether nothing that is known of a call says that the program does not serve it."""
        if self.ending is None:
            return self.learning.fits(told)
        truths, reads = self.ending.truths, self.ending.reads
        stops = (place for place, key in enumerate(reads) if told.get(key, truths.goes_on) is not truths.goes_on)
        went_on = next(stops, None)
        served = went_on is None or went_on in self.served
        return served and self._others.fits(told)

    def serve(self, endings: Mapping[int, Ending]) -> None:
        """The program is known to serve calls that end otherwise, by how often their loops went on."""
        self.served = {**endings, **self.served}

    def launched(self, values: Sequence[Tensor | None], launches: Launches | int) -> Launches | int:
        """What a call launched whose loop ended somewhere, with what is to be copied of its values."""
        if self.ending is None or not self.ending.lasting:
            return launches
        copies = self.served[self.ending.went_on(values)].copies(values)
        if not copies:
            return launches
        counted = Launches.unpack(launches)
        return replace(counted, aten=counted.aten + copies)

    def play(self, values: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> Any:
        """The result of a call whose loop ended somewhere, which was confirmed."""
        assert self.ending is not None
        return self.served[self.ending.went_on(values)].play(values, inputs)


def _as_computed(learned: Learned, values: Sequence[Tensor | None]) -> Learned:
    value = values[learned.leaf]
    assert value is not None
    if learned.guard == "values":
        expected = learned.expected
        assert isinstance(expected, Tensor)
        if value.is_floating_point() and torch.allclose(value, expected, rtol=CLOSE, atol=1e-12, equal_nan=True):
            return replace(learned, expected=value.clone())
    elif isinstance(learned.expected, float):
        number = float(value if learned.index is None else value[learned.index])
        if math.isclose(number, learned.expected, rel_tol=CLOSE, abs_tol=1e-12):
            return replace(learned, expected=number)
    return learned


T = TypeVar("T")
M = TypeVar("M")


@dataclass(eq=False)
class Family(Generic[T]):
    """Record of the specialisations of one kind of calls. Several threads may update it."""

    made: int = 1
    reason: Fallback | None = None
    _used: bool = False
    _balance: int = 0
    _doubt: float = 0.0
    _last: T | None = None
    _follows: dict[int, T] = field(default_factory=dict)
    _is_steady: bool = False  # another call that the last member serves would tell nothing new
    _lock: ForkedLock = field(default_factory=ForkedLock)

    def ordered(self, members: Iterable[M], member: Callable[[M], T]) -> list[M]:
        """The members, given the most recent first, in the order in which to try them; ``member`` says which one is.

        >>> family = Family()
        >>> for one in "abab":
        ...     family.served(one)
        >>> family.ordered("ab", lambda one: one)
        ['a', 'b']
        """
        tried = list(members)
        with self._lock:
            likely = [self._follows.get(id(self._last)), self._last]
        for one in reversed(likely):
            if one is not None and (place := next((i for i, t in enumerate(tried) if member(t) is one), None)):
                tried.insert(0, tried.pop(place))
        return tried

    def likely(self) -> T | None:
        """The member that is tried first, if one is known to follow the last."""
        return self._follows.get(id(self._last), self._last)

    def wavers(self) -> bool:
        """Whether the likely member is often not the one that serves."""
        return self._doubt > LARGEST_DOUBT

    def served(self, member: T, again: bool = True) -> None:
        """``member`` served a call; ``again``: not the one that it was made for."""
        if again and self._is_steady and member is self._last:
            return
        with self._lock:
            self._doubt += (float(member is not self.likely()) - self._doubt) / 8
            if self._last is not None:
                self._follows[id(self._last)] = member
            self._is_steady = member is self._last and self._balance == PATIENCE and self._doubt < LEAST_DOUBT
            self._last = member
            self._used |= again
            self._balance = min(self._balance + again, PATIENCE)

    def grows(self) -> bool:
        """Whether one more specialisation is made."""
        with self._lock:
            limit = LARGEST_FAMILY if self._used else LARGEST_UNUSED
            if self.made >= limit:
                return False
            self.made += 1
            return True

    def joined(self, members: int = 1) -> None:
        """So many specialisations are not needed any more, because one serves other calls, too."""
        with self._lock:
            self.made -= members
            self._used = True

    def loops(self) -> None:
        """What differs between calls may be how many steps a loop takes, so that more specialisations are worth it."""
        self._used = True

    def in_vain(self, name: str, learned: Learned | None) -> Fallback:
        """No specialisation served a call; says why it runs eager. After many such calls they all do."""
        source = learned.source if learned else ""
        where = f" at {source}" if source else ""
        with self._lock:
            self._balance, self._is_steady = self._balance - 1, False
            reason = Fallback(name, source, f"a value that forward reads{where} differs from call to call")
            if self._balance <= -(PATIENCE if self._used else LARGEST_UNUSED):
                self.reason = reason
        return reason
