"""Specialisations: programs for calls that differ only in values that Python reads.

    call -> the specialisation that followed last time  -- confirmed -->  result
                |  missed: nothing that the caller sees has changed
                v
            the others that fit the values computed so far, the most recent first  -- confirmed -->  result
                |  all missed
                v
            captured again, with the values that this call reads; eager if that was useless too often

A program computes the values that Python read when it was captured, and confirms that they are the same before inputs
are written and results are returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fuse.graph.locks import ForkedLock
from fuse.graph.numbers.learned import Learned, Learning
from fuse.runtime.programs.steps import Fallback, Launches
from fuse.runtime.variants.ending import Ending, without_conditions

LARGEST_FAMILY = 8
"""Most specialisations of one kind of calls: each takes a capture, and a call that none serves may run them all."""
LARGEST_UNUSED = 4
"""Most specialisations as long as none has served a second call: a value that never returns, such as a time, costs so
many captures."""

PATIENCE = 16
"""Excess of calls that no specialisation served over others, at which no more are tried: so many calls
have run a program for nothing by then."""

LARGEST_DOUBT = 0.4
"""Share of calls (an average over about eight) that the likely specialisation did not serve, above which it is not the
first guess."""

LEAST_DOUBT = 0.01
"""Share of such calls below which served calls are no longer counted, which saves a lock in each. It takes nineteen
calls of one specialisation: a call that another served counts an eighth, which falls by an eighth with each call."""

CLOSE = 1e-4
"""Relative tolerance between a fused value and the value of eager operators: above the differences of float32 sums
in another order."""


class Missed(Exception):
    """A specialisation does not serve this call.

    ``learned`` is the value that differs now; None if the program raised. ``values`` are those of this call, by key.
    """

    def __init__(self, learned: Learned | None, values: Mapping[int, object] | None = None) -> None:
        super().__init__(str(learned) if learned else "raised")
        self.learned = learned
        self.values = values or {}


class Confirmation:
    """A check that a program computes the values that Python read; raises ``Missed`` if not.

    Numbers that the first call computes with other roundings than eager are expected from then on. With an ``ending``,
    a loop may end after any number of steps in ``served``: by how often it went on, the ending of such a captured call.

    >>> confirm = Confirmation(Learning(1, (Learned("model.py:3", "truth", 0, None, True),), ()))
    >>> confirm([torch.tensor(True)])
    >>> confirm([torch.tensor(False)])
    Traceback (most recent call last):
    fuse.runtime.variants.specialised.Missed: a value read at model.py:3 is True
    """

    def __init__(self, learning: Learning, ending: Ending | None = None) -> None:
        self.learning = learning
        self.ending = ending
        self.served = {ending.count: ending} if ending else {}
        self._others = without_conditions(learning, ending.truths) if ending else learning
        self._is_first = True

    def __call__(self, values: Sequence[Tensor | None]) -> None:
        if self._is_first:
            self._is_first = False
            self.learning = replace(
                self.learning, learned=tuple(_as_computed(one, values) for one in self.learning.learned)
            )
            self._others = without_conditions(self.learning, self.ending.truths) if self.ending else self.learning
        ended = self.ending is not None and self.ending.went_on(values) in self.served
        learning = self._others if ended else self.learning
        if different := learning.difference(values):
            raise Missed(different, self.learning.values_by_key(values))

    def fits(self, values: Mapping[int, object]) -> bool:
        """Whether the values of a call, by key, do not exclude that the program serves it."""
        if self.ending is None:
            return self.learning.fits(values)
        truths, reads = self.ending.truths, self.ending.reads
        stops = (
            position for position, key in enumerate(reads) if values.get(key, truths.goes_on) is not truths.goes_on
        )
        went_on = next(stops, None)
        served = went_on is None or went_on in self.served
        return served and self._others.fits(values)

    def serve(self, endings: Mapping[int, Ending]) -> None:
        """Let the program serve calls with these endings too, by how often their loops went on."""
        self.served = {**endings, **self.served}

    def launched(self, values: Sequence[Tensor | None], launches: Launches | int) -> Launches | int:
        """The launches of a call, with the copies that its result needs after a loop that ended early."""
        if self.ending is None or not self.ending.lasting:
            return launches
        copies = self.served[self.ending.went_on(values)].copies(values)
        if not copies:
            return launches
        counted = Launches.unpack(launches)
        return replace(counted, aten=counted.aten + copies)

    def reconstruct(self, values: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> Any:
        """The result of a confirmed call whose loop may have ended early."""
        assert self.ending is not None
        return self.served[self.ending.went_on(values)].reconstruct(values, inputs)


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
    """Statistics of the specialisations of one kind of calls; several threads may update them."""

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
        """The members in the order in which to try them; they are given the most recent first.

        ``member`` maps an element of ``members`` to the specialisation.

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
            if one is not None and (position := next((i for i, t in enumerate(tried) if member(t) is one), None)):
                tried.insert(0, tried.pop(position))
        return tried

    def likely(self) -> T | None:
        """The member that is tried first: the one that followed the last one before, or the last one itself."""
        return self._follows.get(id(self._last), self._last)

    def wavers(self) -> bool:
        """Whether another than the likely member often serves."""
        return self._doubt > LARGEST_DOUBT

    def served(self, member: T, again: bool = True) -> None:
        """Count a call that ``member`` served; ``again``: a later call than the one that it was made for."""
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
        """Whether one more specialisation may be made; counts it if so."""
        with self._lock:
            limit = LARGEST_FAMILY if self._used else LARGEST_UNUSED
            if self.made >= limit:
                return False
            self.made += 1
            return True

    def joined(self, members: int = 1) -> None:
        """Count ``members`` specialisations less, because one serves their calls too."""
        with self._lock:
            self.made -= members
            self._used = True

    def loops(self) -> None:
        """Allow ``LARGEST_FAMILY`` specialisations: calls may differ in the number of steps of a loop."""
        self._used = True

    def in_vain(self, name: str, learned: Learned | None, ends: bool = False) -> Fallback:
        """Count a call that no specialisation served; returns the reason why it runs eager.

        After many such calls, or one that ``ends`` the family, all calls run eager.
        """
        source = learned.source if learned else ""
        where = f" at {source}" if source else ""
        with self._lock:
            self._balance, self._is_steady = self._balance - 1, False
            reason = Fallback(name, source, f"a value that forward reads{where} differs from call to call")
            if ends or self._balance <= -(PATIENCE if self._used else LARGEST_UNUSED):
                self.reason = reason
        return reason
