"""Replacements of ``range``, ``len``, ``enumerate``, ``zip``, ``sum`` and ``int`` that keep sizes symbolic (extents).

    for t in range(x.shape[0]):      t is 0, 1, 2, ... and in the last step n0 - 1
        out.append(cell(x[t]))
    if len(out) == 17:               len(out) is n0, the only size with the value of the list's length
        return out[0]
    rows = int(x.shape[1])           rows is n1
    if t == x.shape[0] - 1:          is known without a record: in all steps but the last, t is less than n0 - 1

They are used while ``forward`` runs with symbolic sizes, because these functions count without reading a size. In all
but the last step, a count is a plain number: code that depends on it changes the graph of every longer loop too. That
is not so for a count that is taken from the end of a list (``list(range(n))[-2]``): such a list records the number of
steps. Where all numbers that ``forward`` computes are kept, a plain one would be missing, so that any loop records it.
"""

from __future__ import annotations

import builtins
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuse.kernel.arithmetic.extents import Extent, pinned, plain
from fuse.runtime.size_uses.tables import is_table
from fuse.runtime.size_uses.watched_integers import WatchedInteger, symbolic

_LONG = (list, tuple, dict, set, deque)
_range, _len, _enumerate, _zip, _sum = builtins.range, builtins.len, builtins.enumerate, builtins.zip, builtins.sum
_int = builtins.int


def counting(
    rows: Callable[[Tensor], int], known: Callable[[int], int], count: Callable[[int], None]
) -> dict[str, Any]:
    """The replacements, by the names of Python's functions.

    ``rows`` maps a tensor to its first size as ``forward`` sees it. ``known`` maps the length of a list: to a symbolic
    size if one has this value. Both return the number unchanged for callers such as other threads. ``count`` notes a
    plain number that is a sum: it may have one term for each step of a loop.
    """

    def length(of: Any, /) -> int:
        if isinstance(of, _SymbolicRange):
            return of.count
        if isinstance(of, Tensor) and of.dim():
            return rows(of)
        found = _len(of)
        return known(found) if isinstance(of, _LONG) and not isinstance(of, torch.Size) else found

    def numbered(of: Any, start: int = 0) -> Iterator[tuple[int, Any]]:
        if isinstance(of, Tensor):
            _pin_if_kept(rows(of))
        counts: Iterator[int] = itertools.count()
        if isinstance(of, (Tensor, list, tuple)):
            last = (rows(of) if isinstance(of, Tensor) else known(_len(of))) - 1
            numbers = _range(plain(symbolic(last)))
            counts = itertools.chain(counted(numbers, last), itertools.count(_len(numbers)))
        for position, item, is_last in _with_last(of):
            steps = rows(of) if isinstance(of, Tensor) else known(position + 1) if is_last else 0
            yield (steps - 1 if is_last else next(counts)) + start, item

    def zipped(*of: Any, **how: bool) -> Iterator[tuple[Any, ...]]:
        ranges = {position: _own(one) for position, one in _enumerate(of) if isinstance(one, (_range, _SymbolicRange))}
        tables = [one for one in of if isinstance(one, _LONG) and is_table(one)]
        for position, items, is_last in _with_last(_zip(*of, **how)):
            if is_last and any(_len(one) > position + 1 for one in tables):  # the size chooses its last element
                pinned(symbolic(known(position + 1)))
            ends = {at: own.start + own.step * (known(position + 1) - 1) for at, own in ranges.items() if is_last}
            yield tuple(item if _is_symbolic(item) else ends.get(at, item) for at, item in _enumerate(items))

    def total(of: Any, /, start: Any = 0) -> Any:
        items = of if isinstance(of, torch.Size) else list(of)
        found = _sum(items, start)
        symbols = _sum(map(_is_symbolic, items))
        if type(found) is int or (symbols and symbols < _len(items) and not isinstance(of, torch.Size)):
            count(plain(symbolic(found)))
        return found

    return {"range": _Range, "len": length, "enumerate": numbered, "zip": zipped, "sum": total}


def _pin_if_kept(steps: Any) -> None:
    """Pin the number of steps if all numbers that are computed are kept: most of its counts are plain."""
    number = symbolic(steps)
    if isinstance(number, Extent) and number.conditions.computed is not None:
        pinned(number)


def _is_symbolic(number: Any) -> bool:
    return isinstance(number, Extent) or type(number) is WatchedInteger


def _with_last(of: Any) -> Iterator[tuple[int, Any, bool]]:
    """The items with their positions, and whether each is the last one.

    >>> list(_with_last("ab"))
    [(0, 'a', False), (1, 'b', True)]
    """
    items = iter(of)
    end = object()
    item, position = next(items, end), 0
    while item is not end:
        following = next(items, end)
        yield position, item, following is end
        item, position = following, position + 1


@dataclass
class _Step:
    """A step of a loop: whether it is the ``current`` one, or the one before it."""

    current: bool = True


class Counted(int):
    """A count of a loop's step, or such a count plus a constant: it is less than ``bound`` at all sizes at which the
    loop has this step and further ones. This is known while ``step`` is the current one, or the one before it: a loop
    of another size may end with an earlier one.

    >>> from fuse.kernel.arithmetic.extents import Conditions
    >>> conditions = Conditions(of_text=False)
    >>> steps = conditions.size("n0", 37)
    >>> counts = counted(range(36), steps - 1)
    >>> t = next(counts)
    >>> t == steps - 1, steps > t + 1, t < steps, conditions.noted
    (False, True, True, {'n0 >= 1': True})
    >>> next(counts), next(counts), t == steps - 1, len(conditions.noted)
    (1, 2, False, 2)
    """

    compares_with_extents = True
    bound: Any
    step: _Step

    def __add__(self, other: Any) -> Any:
        found = _int(self) + other
        return _below(found, self.bound + other, self.step) if type(other) is _int else found

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self + -other if type(other) is _int else _int(self) - other

    __hash__ = _int.__hash__


def counted(numbers: Iterable[int], bound: Any) -> Iterator[int]:
    """The numbers of a loop's steps but the last, of which each is less than ``bound``; plain ones if this is no size.

    Whoever looks one step ahead has asked for the next number already.
    """
    before, step = _Step(), _Step()
    for number in numbers:
        before.current = False
        before, step = step, _Step()
        yield _below(number, bound, step) if _is_symbolic(bound) else number


def _below(number: int, bound: Any, step: _Step) -> Counted:
    found = Counted(number)
    found.bound, found.step = bound, step
    return found


def _comparing(name: str, of_less: bool) -> Callable[..., Any]:
    """A method of counts for a comparison that is ``of_less`` where the count is less than the other number."""
    operation = getattr(operator, name)

    def compared(self: Counted, other: Any) -> Any:
        if self.step.current and _is_symbolic(other):
            apart = symbolic(other) - symbolic(self.bound)
            if not isinstance(apart, Extent) and apart >= 0:
                return of_less
        return operation(_int(self), other)

    return compared


_OF_LESS = {"__eq__": False, "__ne__": True, "__lt__": True, "__le__": True, "__gt__": False, "__ge__": False}
for _name, _of_less in _OF_LESS.items():
    setattr(Counted, _name, _comparing(_name, _of_less))


class _AsRange(type):
    """Metaclass of the replacement of ``range``: instances are Python's ranges and symbolic ranges."""

    def __instancecheck__(cls, instance: object) -> bool:
        return type(instance) in (_range, _SymbolicRange)

    def __call__(cls, *bounds: Any) -> Any:
        made = _range(*(plain(symbolic(bound)) for bound in bounds))
        return _SymbolicRange(made, bounds) if any(map(_is_symbolic, bounds)) and made else made


class _Range(metaclass=_AsRange):
    """Replacement of Python's ``range``."""


class _SymbolicRange:
    """A range with a symbolic bound. Where it starts at a plain number, its last number is symbolic, and the others
    are plain: loops of other lengths have them, too. Otherwise all are symbolic."""

    def __init__(self, own: range, bounds: tuple[int, ...]) -> None:
        start, stop = bounds[:2] if _len(bounds) > 1 else (0, bounds[0])
        step = bounds[2] if _len(bounds) > 2 else 1
        steps = (stop - start + step - 1) // step if step > 0 else (start - stop - step - 1) // -step
        self.count = steps
        self._own = own
        self._start, self._step = start, step
        self._last = start + (steps - 1) * step
        self._is_plain = not any(map(_is_symbolic, (start, step)))

    def __iter__(self) -> Iterator[int]:
        _pin_if_kept(self.count)
        before = self._own[:-1]
        if self._is_plain:
            yield from counted(before, self._last) if self._own.step > 0 else before
        else:
            yield from (self._start + position * self._step for position in _range(_len(before)))
        yield self._last

    def __reversed__(self) -> Iterator[int]:
        _pin_if_kept(self.count)
        yield from (self._last - position * self._step for position in _range(_len(self._own) - 1))
        yield self._start

    def __len__(self) -> int:
        pinned(symbolic(self.count))  # it becomes a list: ``len`` itself is replaced
        return _len(self._own)

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return list(self)[position]
        number = self._own[plain(symbolic(position))]
        if plain(symbolic(position)) < 0:
            return self._last + (position + 1) * self._step
        if number == self._own[-1]:
            return self._last
        _pin_if_kept(self.count)
        return number if self._is_plain else self._start + position * self._step

    def __contains__(self, number: object) -> bool:
        return any(one == number for one in self)


class _AsInt(type):
    """Metaclass of the replacement of ``int``: instances are Python's integers."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _int)

    def __subclasscheck__(cls, of: type) -> bool:
        return issubclass(of, _int)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_int, name)

    def __call__(cls, *given: Any, **how: Any) -> Any:
        return given[0] if _len(given) == 1 and _is_symbolic(given[0]) else _int(*given, **how)


class Int(metaclass=_AsInt):
    """Replacement of Python's ``int``, which leaves a symbolic size as it is."""


def _own(steps: range | _SymbolicRange) -> range:
    return steps._own if isinstance(steps, _SymbolicRange) else steps
