"""Counts that know which size they are: ``range``, ``len`` and ``enumerate`` while sizes are followed.

    for t in range(x.shape[0]):      t is 0, 1, 2, ... and in the last step n0 - 1
        out.append(cell(x[t]))
    if len(out) == 17:               len(out) is n0: a list that is as long as the size of which there is but one
        return out[0]

Only these count in Python without asking a size, and ``zip``, which ends a range with the shortest. In all but the last
step a number counts from the start, so that what depends on it shows in the graph of every longer loop.
"""

from __future__ import annotations

import builtins
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from fuse.kernel.extents import Extent

_LONG = (list, tuple, dict, set, deque)
_range, _len, _enumerate, _zip = builtins.range, builtins.len, builtins.enumerate, builtins.zip


def counting(number: Callable[[int], int], known: Callable[[int], int]) -> dict[str, Any]:
    """What stands for Python's functions, by their names.

    ``number`` gives the size of a tensor as ``forward`` is to see it, ``known`` the length of a list: a size only if
    some size has this value. Both give numbers back as they are to whom it does not concern, such as other threads.
    """

    def length(of: Any, /) -> int:
        found = _len(of)
        if isinstance(of, _Steps):
            return of.count
        return number(found) if isinstance(of, Tensor) else known(found) if isinstance(of, _LONG) else found

    def numbered(of: Any, start: int = 0) -> Iterator[tuple[int, Any]]:
        counted = number if isinstance(of, Tensor) else known
        for place, item, is_last in _with_last(of):
            yield (counted(place + 1) - 1 if is_last else place) + start, item

    def zipped(*of: Any, **how: bool) -> Iterator[tuple[Any, ...]]:
        ranges = {place: _own(one) for place, one in _enumerate(of) if isinstance(one, (_range, _Steps))}
        for place, items, is_last in _with_last(_zip(*of, **how)):
            ends = {at: own.start + own.step * (known(place + 1) - 1) for at, own in ranges.items() if is_last}
            yield tuple(item if isinstance(item, Extent) else ends.get(at, item) for at, item in _enumerate(items))

    return {"range": _Range, "len": length, "enumerate": numbered, "zip": zipped}


def _with_last(of: Any) -> Iterator[tuple[int, Any, bool]]:
    """Items with their places, and whether each is the last one.

    >>> list(_with_last("ab"))
    [(0, 'a', False), (1, 'b', True)]
    """
    items = iter(of)
    end = object()
    item, place = next(items, end), 0
    while item is not end:
        following = next(items, end)
        yield place, item, following is end
        item, place = following, place + 1


class _AsRange(type):
    """What is a range is one of Python's own, or counts up to a size."""

    def __instancecheck__(cls, instance: object) -> bool:
        return type(instance) in (_range, _Steps)

    def __call__(cls, *bounds: Any) -> Any:
        made = _range(*bounds)
        return _Steps(made, bounds) if any(isinstance(bound, Extent) for bound in bounds) and made else made


class _Range(metaclass=_AsRange):
    """Stands for Python's ``range``."""


class _Steps:
    """The numbers of a range, the last of which follows from its bounds."""

    def __init__(self, own: range, bounds: tuple[int, ...]) -> None:
        start, stop = bounds[:2] if _len(bounds) > 1 else (0, bounds[0])
        step = bounds[2] if _len(bounds) > 2 else 1
        steps = (stop - start + step - 1) // step if step > 0 else (start - stop - step - 1) // -step
        self.count = steps
        self._own = own
        self._last = start + (steps - 1) * step

    def __iter__(self) -> Iterator[int]:
        yield from self._own[:-1]
        yield self._last

    def __reversed__(self) -> Iterator[int]:
        yield self._last
        yield from reversed(self._own[:-1])

    def __len__(self) -> int:
        return _len(self._own)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return list(self)[place]
        return self._last if self._own[place] == self._own[-1] else self._own[place]

    def __contains__(self, number: object) -> bool:
        return number in list(self)


def _own(steps: range | _Steps) -> range:
    return steps._own if isinstance(steps, _Steps) else steps
