"""Python's values, compared between the steps of a loop: whether a step changed them.

h, [h0, h1], None        tensors, and lists of them, of any length: the graph has what was done with them
h.item()                 likewise
3, "decoder", cell       equal if they are; modules and functions if they are the same
{"n": 3}, State(n=3)     equal if all that they hold is
iter(x), (f(t) for ...)  may have moved: they are unlike at each look
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fuse.graph.numbers.read_numbers import Number
from fuse.graph.state.object_contents import attributes_of
from fuse.kernel.arithmetic.extents import Extent
from fuse.runtime.size_uses.watched_integers import WatchedInteger, symbolic

MOST = 2000
"""Objects that are looked at, of those that a value holds. A value that holds more counts as changed."""

CHEAP = 16
"""Numbers and texts of a list that take as long as another object."""

_TENSORS = "tensors"
_PLAIN = frozenset({bool, str, bytes, float, complex, torch.dtype, torch.device, type(None)})
_SUBCLASSED: Mapping[type, Callable[[Any], Any]] = {
    str: str.__str__,
    bytes: bytes.__bytes__,
    float: float.__float__,
    complex: complex.__complex__,
}
"""Classes that users derive from, and what gives the plain value."""
_NUMBERS = frozenset({int, float, bool, str, type(None)})
_LISTS = (list, tuple, deque)
_CONTAINERS: tuple[Any, ...] = (*_LISTS, dict, set, frozenset)
_OF_MODULES = frozenset(vars(nn.Module()))


def look(value: Any, spend: Callable[[int], object] | None = None, largest: int | None = None) -> Any:
    """A value as it is now: equal to an earlier look if nothing but tensors changed. ``spend`` gets the number of
    objects that were looked at. Of lists and dictionaries with more than ``largest`` entries, tensors apart, only the
    number of these is looked at.

    >>> look([torch.ones(1)]) == look([torch.zeros(2), torch.ones(3)]), look([1]) == look([1, 1])
    (True, False)
    >>> state = {"n": 1}
    >>> before = look(state)
    >>> state["n"] += 1
    >>> look(state) == before, look(iter([])) == look(iter([]))
    (False, False)
    """
    kind = type(value)
    if kind in _NUMBERS:
        return kind, value
    one = _Look(largest)
    found = one.at(value)
    if spend is not None:
        spend(MOST - one.left)
    return found


class _Look:
    def __init__(self, largest: int | None) -> None:
        self.left, self._largest = MOST, largest
        self._above: set[int] = set()

    def at(self, value: Any) -> Any:
        self.left -= 1
        kind = type(value)  # classes of users may answer ``isinstance`` by code of their own
        if kind is Number or issubclass(kind, Tensor):
            return _TENSORS
        if issubclass(kind, Extent) or kind is WatchedInteger:
            return symbolic(value).terms
        if kind in _PLAIN:
            return kind, value
        for base, plain in _SUBCLASSED.items():
            if issubclass(kind, base):
                return kind, plain(value)
        if issubclass(kind, int):
            return int, int.__index__(value)
        if issubclass(kind, (type, BuiltinFunctionType, ModuleType)):
            return id(value)
        if self.left < 0 or issubclass(kind, Iterator):
            return object()
        if id(value) in self._above:  # it holds itself
            return None
        self._above.add(id(value))
        found = self._inside(kind, value)
        self._above.remove(id(value))
        return found

    def _inside(self, kind: type, value: Any) -> Any:
        for base in _CONTAINERS:
            if issubclass(kind, base):
                return self._contained(base, value)
        if kind is MethodType:
            return id(value.__func__), self.at(value.__self__)
        held = attributes_of(value) or {}
        own = {name: one for name, one in held.items() if name not in _OF_MODULES}
        is_one = issubclass(kind, (nn.Module, FunctionType)) or not held
        return id(value) if is_one else kind, self.at(own) if own else None

    def _contained(self, base: Any, value: Any) -> Any:
        """The entries of a list, a dictionary or the like, without code of users."""
        size = base.__len__(value)
        first = next(iter(dict.values(value)) if base is dict else base.__iter__(value), None)
        if self._largest is not None and size > self._largest and not issubclass(type(first), Tensor):
            return id(value), size
        if base is dict:
            return self._entries([*dict.keys(value)]), self._entries([*dict.values(value)])
        if base in _LISTS:
            return self._entries([*base.__iter__(value)])
        return frozenset(map(self.at, base.__iter__(value)))

    def _entries(self, values: Sequence[Any]) -> Any:
        kinds = set(map(type, values))
        if kinds and all(issubclass(kind, Tensor) for kind in kinds):
            return _TENSORS
        if kinds <= _NUMBERS:
            self.left -= len(values) // CHEAP
            return tuple(kinds), tuple(values)
        looks = tuple(map(self.at, values))
        nothing = type(None), None
        of_tensors = all(one in (_TENSORS, nothing) for one in looks) and _TENSORS in looks
        return _TENSORS if of_tensors else looks


def is_recorded(value: Any) -> bool:
    """Whether a value is made of tensors and symbolic sizes only, whose uses are recorded.

    >>> is_recorded((torch.ones(1), None)), is_recorded((torch.ones(1), 3))
    (True, False)
    """
    kind = type(value)
    for base in _LISTS:
        if issubclass(kind, base):
            return all(map(is_recorded, base.__iter__(value)))
    if issubclass(kind, dict):
        return all(type(one) is str for one in dict.keys(value)) and all(map(is_recorded, dict.values(value)))
    return value is None or issubclass(kind, (Tensor, Extent)) or kind in (WatchedInteger, Number)
