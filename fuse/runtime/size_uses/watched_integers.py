"""Integers as ``forward`` sees them while its uses of sizes are recorded: no ``int``, so that C code has to ask.

    cache[:, n : n + 1]         the operator gets the plain number, which its graph has, too
    if n > 100:                 recorded:  not n0 > 100
    table[n], range(n)[3]       C code asks for the number: recorded as n0 == 37
    {n: 1}, f"{n}", n ** 2      the same

An extent (:mod:`fuse.kernel.arithmetic.extents`) is an ``int``, whose value C code reads without a record. A watched
integer holds an extent, and computes and compares as it does. Arguments are often positions in tables, and sizes seldom
are: sizes are watched where an argument is.
"""

from __future__ import annotations

import builtins
import operator
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor

from fuse.kernel.arithmetic.extents import Extent, pinned, plain

Called = Callable[[FrameType], Any]
"""The function of C that a frame calls now; None if it calls none."""

_SIZES_ONE_BY_ONE = {
    *("empty", "ones", "rand", "randn", "zeros", "new_empty", "new_ones", "new_zeros"),
    *("expand", "permute", "repeat", "reshape", "tile", "view"),
}
"""Operators that take sizes as separate arguments. torch reads these only if the first one has no function of its own
for torch's operators."""


class WatchedInteger:
    """An extent in place of an integer; ``isinstance`` takes it for an ``int``.

    >>> from fuse.kernel.arithmetic.extents import Conditions
    >>> conditions = Conditions(of_text=False)
    >>> n = WatchedInteger(conditions.size("n0", 37), lambda frame: None)
    >>> symbolic(n * 2 + 1).terms, n > 100, isinstance(n, int)
    ((((), 1), (('n0',), 2)), False, True)
    >>> conditions.noted
    {'n0 >= 1': True, '((-100)+(1)*n0) > 0': False}
    >>> list(range(50))[n], list(conditions.noted)[-1]
    (37, '((-37)+(1)*n0) == 0')
    """

    __slots__ = ("_called", "_extent")
    __array_ufunc__ = None  # numpy arrays leave arithmetic to this class

    def __init__(self, extent: Extent, called: Called) -> None:
        self._extent = extent
        self._called = called

    __class__ = property(lambda self: int)  # the class that isinstance sees

    def passed(self) -> int:
        """The number for an operator. The numbers of graphs are polynomials in sizes; any other number is recorded,
        unless all that are computed are kept."""
        computed = any("(" in factor for factors, _ in self._extent.terms for factor in factors)
        kept = self._extent.conditions.computed is not None
        return int(pinned(self._extent)) if computed and not kept else plain(self._extent)

    def __index__(self) -> int:
        return self.passed() if is_operator(self._called(sys._getframe(1))) else int(pinned(self._extent))

    def __int__(self) -> int:
        return int(pinned(self._extent))

    def __float__(self) -> float:
        return float(pinned(self._extent))

    def __complex__(self) -> complex:
        return complex(pinned(self._extent))

    def __bool__(self) -> bool:
        return bool(self._extent)

    def __hash__(self) -> int:
        return hash(pinned(self._extent))

    def __repr__(self) -> str:
        return repr(pinned(self._extent))

    def __format__(self, form: str) -> str:
        return format(pinned(self._extent), form)

    def __neg__(self) -> Any:
        return self._with(-self._extent)

    def __abs__(self) -> Any:
        return self._with(abs(self._extent))

    def __invert__(self) -> int:
        return ~int(pinned(self._extent))

    def __pos__(self) -> Any:
        return self

    __ceil__ = __floor__ = __trunc__ = __copy__ = __pos__

    def __round__(self, digits: Any = None) -> Any:
        return self._with(round(self._extent, digits))

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        """Attributes and methods of plain numbers, such as ``bit_length``."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(pinned(self._extent), name)

    @property
    def __torch_function__(self) -> Callable[..., Any]:
        """Calls a torch function with watched integers in place of numbers; sizes are asked for by ``__index__``."""
        called = self._called(sys._getframe(1))
        if getattr(called, "__name__", "") in _SIZES_ONE_BY_ONE:
            raise AttributeError("__torch_function__")
        return _plainly

    def _with(self, number: Any) -> Any:
        return watched(number, self._called)


def _plainly(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Call a torch function with plain numbers."""
    return func(*passed(args), **passed(kwargs or {}))


def watched(number: Any, called: Called) -> Any:
    """An extent as a watched integer; any other number unchanged."""
    return WatchedInteger(number, called) if isinstance(number, Extent) else number


def symbolic(number: Any) -> Any:
    """The extent of a watched integer; any other value unchanged."""
    return number._extent if type(number) is WatchedInteger else number


def passed(value: Any) -> Any:
    """An argument of an operator, or an index of a tensor, with plain numbers."""
    kind = type(value)
    if kind is WatchedInteger:
        return value.passed()
    if kind is tuple or kind is list:
        return kind(map(passed, value))
    if isinstance(value, torch.Size):
        return tuple(map(passed, value))
    if kind is dict:
        return {name: passed(one) for name, one in value.items()}
    if kind is slice:
        return slice(passed(value.start), passed(value.stop), passed(value.step))
    return value


def is_operator(called: Any) -> bool:
    """Whether a function of C that is called is one of torch's on tensors, of which a graph has the numbers.

    >>> is_operator(torch.zeros), is_operator(torch.ones(1).view), is_operator([].pop), is_operator(operator.index)
    (True, True, False, False)
    """
    owner = getattr(called, "__self__", None)
    if isinstance(owner, ModuleType):
        return owner.__name__.partition(".")[0] == "torch"
    if owner is not None:
        return isinstance(owner, Tensor)
    name = getattr(called, "__name__", None)
    return name is not None and getattr(torch._C._VariableFunctions, name, None) is called


def _computing(name: str, pins: bool, reflected: bool) -> Callable[..., Any]:
    """A method of watched integers for Python's operator ``name``."""
    operation = builtins.divmod if name == "divmod" else getattr(operator, f"__{name}__")

    def computed(self: WatchedInteger, other: Any) -> Any:
        if isinstance(other, Tensor):
            number: Any = self.passed()
        else:
            number, other = symbolic(self), symbolic(other)
            if pins:
                number, other = pinned(number), pinned(other)
        found = operation(other, number) if reflected else operation(number, other)
        return tuple(map(self._with, found)) if name == "divmod" else self._with(found)

    return computed


for _name in ("add", "sub", "mul", "floordiv", "mod", "divmod"):
    setattr(WatchedInteger, f"__{_name}__", _computing(_name, False, False))
    setattr(WatchedInteger, f"__r{_name}__", _computing(_name, False, True))
for _name in ("pow", "truediv", "lshift", "rshift", "and", "or", "xor"):
    setattr(WatchedInteger, f"__{_name}__", _computing(_name, True, False))
    setattr(WatchedInteger, f"__r{_name}__", _computing(_name, True, True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(WatchedInteger, f"__{_name}__", _computing(_name, False, False))
