"""Numbers that ``forward`` reads from tensors: symbolic, until Python needs their value.

    scale = x.abs().max().item()       a Number: a node of the graph, and its value in this call
    x / scale                          div(x, node): nothing is learned
    if scale > 3:                      learned: the boolean gt(node, 3)
    if random.random() < 0.5:          learned: the boolean; Python compares, and no node is needed (drawn_numbers.py)
    range(int(n)), f"{scale}"          learned: the number itself
    scale * 2 + 1, n % 8, n // 2       another Number

Arithmetic is Python's: in double precision, or on integers that are known to stay below 2**53, where int64 and double
are exact. Dividing by a Number learns that it is not zero, because Python raises for zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.fx import Node

from fuse.errors import CaptureError

aten = torch.ops.aten

_EXACT = 2**53
_SMALL = 2**31
"""The bound that an integer is learned to have when it is first used in arithmetic."""


T = TypeVar("T")


class WantsPlain(CaptureError):
    """Only plain numbers can be used like this; the call is recorded again with plain numbers."""

    def __init__(self) -> None:
        super().__init__("forward uses a number that it reads in a way that a graph cannot hold")


class Reading(Protocol):
    """The recorder of numbers, :class:`fuse.graph.values.value_reads.Reader`; ``closed`` after the recording;
    ``differentiates`` while the backward pass is recorded; ``plain`` if it makes numbers plain where it can."""

    closed: bool
    differentiates: bool
    plain: bool
    gave_symbols: bool

    def refusing(self) -> AbstractContextManager[None]: ...

    def emit(self, op: Any, *args: Any, **kwargs: Any) -> Node: ...
    def truth(self, node: Node) -> bool: ...
    def number(self, node: Node) -> Any: ...
    def tensor(self, node: Node) -> Tensor: ...
    def uncounted(self, compute: Callable[[], T]) -> T: ...


class DrawnNumber(Protocol):
    """A random number that Python drew (:class:`fuse.graph.numbers.drawn_numbers.DrawRecord`).

    ``is_plain``: it has no node.
    """

    @property
    def is_plain(self) -> bool: ...
    def compared(self, name: str, other: float | int) -> Any: ...
    def learned(self) -> int: ...
    def remainder(self, modulus: int) -> int | None: ...
    def node(self) -> Node: ...


@dataclass(eq=False)
class _Facts:
    """The facts about a number.

    ``made``: the node of the number as float64 or int64; None before that of a ``drawn`` number is needed. ``value``:
    its value in this call. ``origin``: the tensor without dimensions that it was read from, if any. ``bound``: the
    largest absolute value that an integer is known to have. ``root``: the node of the integer that it is a sum of, and
    what was added; None if it is no sum. ``settled``: an integer that was learned to equal one that Python knows.
    """

    reader: Reading
    made: Node | None
    value: float | int
    origin: Node | None = None
    bound: int | None = None
    root: tuple[Node, int] | None = None
    drawn: DrawnNumber | None = None
    settled: bool = False

    @property
    def node(self) -> Node:
        if self.made is None:
            assert self.drawn is not None
            with self.reader.refusing():
                self.made = self.drawn.node()
            self.reader.gave_symbols = True
        return self.made


class Number:
    """A number that was read from a tensor; ``isinstance`` takes it for a ``float`` or an ``int``."""

    __slots__ = ("facts",)
    __array_ufunc__ = None  # numpy arrays leave arithmetic to this class

    def __init__(self, facts: _Facts) -> None:
        self.facts = facts

    __class__ = property(lambda self: type(self.facts.value))  # the class that isinstance sees

    def __hash__(self) -> int:
        """The hash of the value. During a recording, a key needs a plain number."""
        if self.facts.reader.closed:
            return hash(self.facts.value)
        raise WantsPlain

    def __bool__(self) -> bool:
        return bool(_binary("ne", mirrored=False)(self, 0))

    def __neg__(self) -> Any:
        return _binary("mul", mirrored=False)(self, -1)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        facts = self.facts
        is_plain = (drawn := _drawing(self)) is not None and drawn.is_plain
        if facts.reader.closed or is_plain or (isinstance(facts.value, int) and _bound(self) is None):
            return abs(known(self))
        node = facts.reader.emit(aten.abs.default, facts.node)
        return Number(_Facts(facts.reader, node, abs(facts.value), None, facts.bound))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return torch.tensor(known(self)).numpy().__array__(*args)

    def __getattr__(self, name: str) -> Any:
        """Methods of plain numbers, such as ``is_integer``."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(known(self), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function with Numbers among its arguments."""
        args, kwargs = _with_tensors(func, args, kwargs or {})
        return func(*_all_known(args), **{name: _all_known(value) for name, value in kwargs.items()})


def read_number(reader: Reading, node: Node, value: float | int, origin: Node | None) -> Number:
    """The Number of ``node``, a float64 or int64 without dimensions, whose value in this call is ``value``."""
    return Number(_Facts(reader, node, value, origin))


def drawn_number(reader: Reading, value: float | int, drawn: DrawnNumber, bound: int | None) -> Number:
    """The Number of a random number that Python drew, whose value in this call is ``value``."""
    return Number(_Facts(reader, None, value, None, bound, None, drawn))


def is_number(value: Any) -> bool:
    """Whether ``value`` is a :class:`Number`.

    >>> is_number(3)
    False
    """
    return type(value) is Number


def node_of(number: Number) -> Node:
    """The node that computes ``number``."""
    node: Node = number.facts.node
    return node


def distance(start: Number, end: Number) -> int | None:
    """``end - start``, if both are the same integer plus numbers that Python knows."""
    (one, before), (other, after) = _root_of(start), _root_of(end)
    return after - before if one is other and isinstance(start, int) else None


def _root_of(number: Number) -> tuple[Node, int]:
    return number.facts.root or (number.facts.node, 0)


def known(value: Any) -> Any:
    """``value``, learned if it is a :class:`Number`, as a plain number."""
    if type(value) is not Number:
        return value
    facts = value.facts
    if facts.settled:
        return facts.value
    if facts.reader.differentiates:  # the gradients of later calls depend on their own numbers
        raise CaptureError("the backward pass uses a number that forward reads") if facts.reader.plain else WantsPlain
    if facts.reader.closed:
        return facts.value
    if (drawn := _drawing(value)) is not None:
        with facts.reader.refusing():
            return drawn.learned()
    return facts.reader.number(facts.node)


def _all_known(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)([_all_known(item) for item in value])
    return known(value)


# ---- arithmetic and comparisons of numbers ---------------------------------------------------------------------------


def _computed(name: str, left: Any, right: Any) -> Any:
    """The result of an arithmetic operator with a Number; None if it needs plain numbers."""
    reader: Reading = next(one.facts.reader for one in (left, right) if type(one) is Number)
    if (drawn := _drawing(left) or _drawing(right)) is not None:
        if name in _COMPARISONS and type(left) is not type(right):  # with a number that Python knows
            return drawn.compared(name, right) if type(left) is Number else drawn.compared(_MIRRORED[name], left)
        if drawn.is_plain:
            return None
    kinds = [type(_value(one)) is float for one in (left, right)]
    bounds = [0 if is_float else _bound(one) for one, is_float in zip((left, right), kinds, strict=True)]
    if reader.closed or None in bounds:
        return None
    if name == "truediv" and right == 0:
        return None
    wide = any(kinds) or name == "truediv"
    reach = bounds[0] * bounds[1] if name == "mul" else bounds[0] + bounds[1]  # type: ignore[operator]  # no None
    if not wide and reach >= _EXACT:
        return None
    operands = [_operand(reader, one, wide) for one in (left, right)]
    if name in _COMPARISONS:
        if not isinstance(operands[0], Node):
            name, operands = _MIRRORED[name], operands[::-1]
        overload = "Tensor" if isinstance(operands[1], Node) else "Scalar"
        truth = reader.truth(reader.emit(getattr(getattr(aten, name), overload), *operands))
        if name in ("eq", "ne") and truth is (name == "eq") and not wide and overload == "Scalar":
            number = left if type(left) is Number else right
            number.facts.settled = True
        return truth
    if not isinstance(operands[0], Node):  # ATen's operators take a tensor and a number, in this order
        operands[0] = reader.emit(aten.full_like.default, operands[1], operands[0])
    node = reader.emit(getattr(aten, _ATEN[name]).Tensor, *operands)
    value = _PYTHON[name](_value(left), _value(right))
    return Number(_Facts(reader, node, value, None, None if wide else reach, _root(name, left, right)))


def _divided(name: str, number: Number, by: int) -> Number | None:
    """``number % by`` or ``number // by`` for an integer ``number`` and a positive ``by``; None if it needs plain
    numbers."""
    bound = _bound(number)
    if bound is None:
        return None
    reader, node, value = number.facts.reader, number.facts.node, number.facts.value
    if name == "mod":
        return Number(_Facts(reader, reader.emit(aten.remainder.Scalar, node, by), value % by, None, by))
    made = reader.emit(aten.div.Scalar_mode, node, by, rounding_mode="floor")
    return Number(_Facts(reader, made, value // by, None, bound))


def _root(name: str, left: Any, right: Any) -> tuple[Node, int] | None:
    """The root of ``left + right`` or ``left - right``, where one is a Number and the other an integer."""
    number, by = (left, right) if type(left) is Number else (right, left)
    is_sum = name == "add" or (name == "sub" and number is left)
    if not is_sum or type(by) is not int or type(_value(number)) is not int:
        return None
    node, before = _root_of(number)
    return node, before + by if name == "add" else before - by


def _operand(reader: Reading, value: Any, wide: bool) -> Any:
    if type(value) is not Number:
        return float(value) if wide else int(value)
    if wide and type(value.facts.value) is int:
        return reader.emit(aten._to_copy.default, value.facts.node, dtype=torch.float64)
    return value.facts.node


def _bound(value: Any) -> int | None:
    """The largest absolute value of an integer, learned if necessary; None if it may be too large."""
    if type(value) is not Number:
        return abs(value) if abs(value) < _EXACT else None
    facts = value.facts
    if facts.bound is None and not facts.reader.closed:
        above = facts.reader.truth(facts.reader.emit(aten.gt.Scalar, facts.node, -_SMALL))
        below = facts.reader.truth(facts.reader.emit(aten.lt.Scalar, facts.node, _SMALL))
        facts.bound = _SMALL if above and below else None
    bound: int | None = facts.bound
    return bound


def _drawing(value: Any) -> DrawnNumber | None:
    """The drawing of a random number during its recording; None for any other value."""
    return value.facts.drawn if type(value) is Number and not value.facts.reader.closed else None


def _is_symbolic_integer(number: Number) -> bool:
    """Whether ``number`` is an integer that has a node, during its recording."""
    facts = number.facts
    plain = (drawn := _drawing(number)) is not None and drawn.is_plain
    return type(facts.value) is int and not facts.reader.closed and not plain


def _settled(value: Any) -> Any:
    """A Number whose value is learned already as a plain number."""
    return value.facts.value if type(value) is Number and value.facts.settled else value


def _value(value: Any) -> Any:
    return value.facts.value if type(value) is Number else value


_ATEN = {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div"}
_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}
_COMPARISONS = frozenset(_MIRRORED)
_PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "truediv": lambda a, b: a / b,
    "lt": lambda a, b: a < b,
    "gt": lambda a, b: a > b,
    "le": lambda a, b: a <= b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}


def _binary(name: str, mirrored: bool) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        if isinstance(other, Tensor):
            return NotImplemented  # Python then calls the tensor's method
        if name in ("eq", "ne") and (other is None or isinstance(other, str)):
            return name == "ne"
        left, right = (_settled(other), _settled(self)) if mirrored else (_settled(self), _settled(other))
        found = None
        if type(other) in (bool, int, float, Number) and Number in (type(left), type(right)):
            found = _computed(name, left, right)
        return _PYTHON[name](known(left), known(right)) if found is None else found

    return method


def _plainly(name: str) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        if any(isinstance(other, Tensor) for other in others):
            return NotImplemented
        modulus = others[0] if name == "__mod__" and type(others[0]) is int and others[0] > 0 else None
        if modulus is not None and (drawn := _drawing(self)) is not None:
            with self.facts.reader.refusing():
                remainder = drawn.remainder(modulus)
            if remainder is not None:
                return remainder
        if (
            name in ("__mod__", "__floordiv__")
            and _is_symbolic_integer(self)
            and type(others[0]) is int
            and others[0] > 0
        ):
            found = _divided(name.strip("_"), self, others[0])
            if found is not None:
                return found
        return getattr(known(self), name)(*map(known, others))

    return method


for _name in _PYTHON:
    setattr(Number, f"__{_name}__", _binary(_name, mirrored=False))
    if _name not in _COMPARISONS:
        setattr(Number, f"__r{_name}__", _binary(_name, mirrored=True))
_OTHERS = """
    and ceil complex divmod float floor floordiv format index int invert lshift mod or pow rand rdivmod repr rfloordiv
    rlshift rmod ror round rpow rrshift rshift rxor str trunc xor
"""
for _name in _OTHERS.split():
    setattr(Number, f"__{_name}__", _plainly(f"__{_name}__"))


# ---- numbers as operands of tensors ----------------------------------------------------------------------------------

_COMPUTE = frozenset(
    """
    add add_ div div_ divide eq ge gt le lt mul mul_ multiply ne __rdiv__ rsub __rsub__ __rtruediv__ sub sub_ subtract
    true_divide
    """.split()  # noqa: SIM905
)
"""Functions with the same result if a number is replaced by a tensor without dimensions, of the dtype that they convert
the number to."""

_TAKE = frozenset(
    "clamp clamp_ clamp_max clamp_min fill_ masked_fill masked_fill_ __setitem__ where".split()  # noqa: SIM905
)
"""The same, for functions that reject a number that does not fit the dtype."""


_WEIGHTS = {"add": "alpha", "sub": "alpha", "subtract": "alpha", "lerp": "weight"}
"""Functions of two tensors, and the name of the number by which they weigh the second one."""
_EXACTLY_SCALED = frozenset({torch.float32, torch.float64})
"""Dtypes in which they compute; narrower ones they convert first."""
_LARGEST_FLOAT = torch.finfo(torch.float32).max
"""The largest number by which they weigh ``float32`` tensors; beyond it they raise an error."""


def _with_tensors(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments with tensors in place of Numbers, if ``func`` then has the same result."""
    name = getattr(func, "__name__", "")
    unchanged = args, kwargs
    if (weight := _WEIGHTS.get(name.rstrip("_"))) and (weighed := _weighed(args, kwargs, weight)) is not None:
        return weighed, {}
    if name not in _COMPUTE | _TAKE or "rounding_mode" in kwargs or type(kwargs.get("alpha")) is Number:
        return unchanged
    if name == "__setitem__":
        if type(args[2]) is not Number:
            return unchanged
        made = _as_tensor(args[2], args[0], True)
        return unchanged if made is None else ((args[0], args[1], made), kwargs)
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    tensors = [a for a in given.values() if isinstance(a, Tensor) and not (name in _TAKE and a.dtype is torch.bool)]
    if len(tensors) != 1:
        return unchanged
    for argument, value in given.items():
        if type(value) is Number:
            given[argument] = _as_tensor(value, tensors[0], name in _TAKE)
            if given[argument] is None:
                return unchanged
    return tuple(given[i] for i in range(len(args))), {key: given[key] for key in kwargs}


def _weighed(args: tuple[Any, ...], kwargs: Mapping[str, Any], weight: str) -> tuple[Any, ...] | None:
    """The operands of ``add(x, y, alpha=n)`` or ``lerp(x, y, n)`` with a tensor in place of the Number; None if the
    result may be another."""
    start, end, number = (*args, *kwargs.values()) if len(args) + len(kwargs) == 3 else (None, None, None)
    if type(number) is not Number or set(kwargs) - {weight}:
        return None
    if not (isinstance(start, Tensor) and isinstance(end, Tensor) and start.dtype is end.dtype in _EXACTLY_SCALED):
        return None
    if start.dtype is torch.float32 and _may_overflow(number) and not abs(number) <= _LARGEST_FLOAT:
        return None
    if (made := _as_tensor(number, start, False)) is None:
        return None
    return (start, end, made) if weight == "weight" else (start, number.facts.reader.uncounted(lambda: end * made))


def _may_overflow(number: Number) -> bool:
    """Whether the number may be too large for ``float32``."""
    origin = number.facts.origin
    return isinstance(number, float) and (origin is None or origin.meta["val"].dtype is torch.float64)


def _as_tensor(number: Number, beside: Tensor, exactly: bool) -> Tensor | None:
    """The number as a tensor that gives the same result in an operator with ``beside``; None if there is none.

    ``exactly``: the tensor must have exactly the number's value.
    """
    facts = number.facts
    if facts.reader.closed or ((drawn := _drawing(number)) is not None and drawn.is_plain):
        return None
    dtype = torch.result_type(beside, facts.value)
    if dtype in (torch.float16, torch.bfloat16) and beside.dim():
        dtype = torch.float32  # operators on half precision convert a number to this dtype
    if dtype not in (torch.float32, torch.float64, torch.int64):
        return None
    origin = facts.origin
    if origin is not None and origin.meta["val"].dtype is dtype:
        return facts.reader.tensor(origin)
    if facts.node.meta["val"].dtype is dtype:
        return facts.reader.tensor(facts.node)
    if exactly:
        return None
    return facts.reader.tensor(facts.reader.emit(aten._to_copy.default, facts.node, dtype=dtype))
