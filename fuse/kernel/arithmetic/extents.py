"""Extents: symbolic integers for sizes that are passed to a kernel in each call.

    rows = Extent 5, a size that varies    rows * 64         Extent 320, written "64 * rows"
                                           rows * 64 > 63    True, decided: a size that varies is at least 1
                                           rows > 16         False, recorded: the source holds for sizes up to 16

Lowering runs with extents in place of the sizes of the current call. An extent is an ``int`` with that size as its
value, so that recipes, nests and schedules treat it like any number. It also carries a polynomial in the sizes, and
prints as the polynomial. A comparison whose outcome depends on a size is recorded as a *condition*. The source of a
kernel depends on its region and on these outcomes only, so that it serves every call whose sizes meet all conditions.

Some uses need the number itself: conversion to a float, a shift, a format. They *pin* the extent: they record the
condition that it equals its value. Decisions by cost use :func:`estimate`, which records nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from fuse.kernel.arithmetic.polynomials import Terms, product_of, quotient_of, sum_of

LEAST = 1
"""The least value of a size that varies; empty tensors are lowered separately."""
LEAST_LOWERED = 2
"""The least size at which kernels for varying sizes are lowered: a size of one broadcasts, and so hides its uses."""


@dataclass
class Conditions:
    """The sizes of one kernel, and the conditions that lowering recorded about them.

    Attributes:
        sizes: their names.
        values: their values in the current call.
        usual: the values with which costs are estimated.
        noted: recorded comparisons, as Python expressions over the names, with their outcomes.
        quotients: factors of polynomials that are divisions, remainders or minima: their text in the kernel (a call
            of a function that the target defines), and the same as a Python expression.
        functions: compiled Python expressions, by their text.
        computed: the polynomials of all extents that are made, with their values. If None, which nobody asks for, a
            quotient pins what it is computed from, unless ``of_text``.
        of_text: whether an extent prints as its polynomial; otherwise printing or hashing an extent pins it.
        told: is called for each comparison, with its text, the polynomial that is compared with zero, its value, and
            the comparison's symbol.
    """

    sizes: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()
    usual: tuple[Any, ...] = ()
    noted: dict[str, bool] = field(default_factory=dict)
    quotients: dict[str, str] = field(default_factory=dict)
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict, repr=False, compare=False)
    computed: dict[Terms, int] | None = None
    of_text: bool = True
    told: Callable[[str, Terms, int, str], None] | None = field(default=None, compare=False)

    def size(self, name: str, value: int, usual: int | None = None) -> Extent:
        """A new size, ``name`` in kernels and conditions; costs are estimated with ``usual`` (default: ``value``)."""
        assert value >= LEAST
        self.sizes += (name,)
        self.usual += (value if usual is None else usual,)
        self.noted[f"{name} >= {LEAST}"] = True
        self.values += (value,)
        return self.extent(name)

    def real(self, name: str, value: float) -> Real:
        """A new float called ``name`` that varies from call to call."""
        self.sizes += (name,)
        self.values += (value,)
        self.usual += (value,)
        return Real(value, name, self)

    def reals(self) -> list[str]:
        """The names of the floats among ``sizes``."""
        return [name for name, value in zip(self.sizes, self.values, strict=True) if isinstance(value, float)]

    def extent(self, name: str) -> Extent:
        """The size with this name."""
        return Extent(self.values[self.sizes.index(name)], (((name,), 1),), self)

    def note(self, apart: Extent, symbol: str, outcome: bool) -> None:
        """Record a comparison with zero."""
        text = f"{self.python(apart.terms)} {symbol} 0"
        self.noted[text] = outcome
        if self.told is not None:
            self.told(text, apart.terms, plain(apart), symbol)

    def python(self, terms: Terms) -> str:
        """A polynomial as a Python expression."""
        products = ("*".join([f"({c})", *(self.quotients.get(f, f) for f in factors)]) for factors, c in terms)
        return "(" + ("+".join(products) or "0") + ")"

    def function(self, expression: str) -> Callable[..., Any]:
        """A Python expression over the sizes, compiled to a function of the sizes in their order."""
        if expression not in self.functions:
            self.functions[expression] = eval(
                f"lambda {', '.join(self.sizes)}: {expression}", {"__builtins__": {"min": min}}
            )
        return self.functions[expression]

    def evaluator(self, numbers: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
        """A function of the sizes that computes several numbers, each a polynomial, an extent or a constant.

        >>> Conditions(("n",)).evaluator([((("n",), 64),), 8])(5)
        (320, 8)
        """
        terms = (number if isinstance(number, tuple) else getattr(number, "terms", None) for number in numbers)
        texts = (repr(number) if of is None else self.python(of) for number, of in zip(numbers, terms, strict=True))
        return self.function(f"({''.join(f'{text}, ' for text in texts)})")

    def value(self, number: int, sizes: tuple[int, ...]) -> int:
        """The value of ``number``, an extent of these conditions or a constant, at other sizes."""
        value: int = self.function(self.python(terms_of(number)))(*sizes)
        return value

    def met(self) -> Callable[..., bool]:
        """A function of sizes: whether every recorded comparison has the recorded outcome."""
        tests = (text if outcome else f"not {text}" for text, outcome in self.noted.items())
        return self.function(" and ".join(tests) or "True")


class NeedsNumber(Exception):
    """A use of a size that cannot be written symbolically; the kernel has to be lowered for its value."""


class Extent(int):
    """An integer with its value in the current call, and a polynomial in the sizes.

    >>> conditions = Conditions()
    >>> rows = conditions.size("rows", 5)
    >>> flat = rows * 64
    >>> flat, f"{flat + 1}", flat // 64, flat > 63, conditions.noted
    ((64 * rows), '(64 * rows + 1)', rows, True, {'rows >= 1': True})
    >>> rows > 16, conditions.noted
    (False, {'rows >= 1': True, '((-16)+(1)*rows) > 0': False})
    >>> conditions.met()(12), conditions.met()(20)
    (True, False)
    """

    terms: Terms
    conditions: Conditions

    def __new__(cls, value: int, terms: Terms, conditions: Conditions) -> Extent:
        made = super().__new__(cls, value)
        made.terms = terms
        made.conditions = conditions
        if conditions.computed is not None:
            conditions.computed[terms] = value
        return made

    def _made(self, value: int, terms: Terms) -> int:
        return Extent(value, terms, self.conditions) if any(m for m, _ in terms) else value

    # ---- arithmetic ----------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, int):
            return pinned(self) + other
        return self._made(plain(self) + plain(other), sum_of(self.terms, terms_of(other)))

    __radd__ = __add__

    def __neg__(self) -> int:
        return self._made(-plain(self), tuple((m, -c) for m, c in self.terms))

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, (list, tuple)) and not self.conditions.of_text:
            numbers = any(isinstance(one, (int, float, str, bytes)) for one in other)
            return (pinned(self) if numbers else plain(self)) * other  # without numbers, its uses tell its length
        if not isinstance(other, int):
            return pinned(self) * other
        return self._made(plain(self) * plain(other), product_of(self.terms, terms_of(other)))

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> int:
        return divided(self, other)

    def __rfloordiv__(self, other: int) -> int:
        return divided(other, self)

    def __mod__(self, other: int) -> int:
        return remaining(self, other)

    def __rmod__(self, other: int) -> int:
        return remaining(other, self)

    def __divmod__(self, other: int) -> tuple[int, int]:
        return divided(self, other), remaining(self, other)

    def __rdivmod__(self, other: int) -> tuple[int, int]:
        return divided(other, self), remaining(other, self)

    # ---- comparison ----------------------------------------------------------------------------------------------

    def _compared(self, other: object, symbol: str) -> Any:
        if type(other) is not int and hasattr(other, "compares_with_extents"):
            return NotImplemented
        if not isinstance(other, int):
            return NotImplemented if not isinstance(other, float) else _COMPARED[symbol](pinned(self), other)
        apart = self + -other
        outcome = outcome_of(symbol, plain(apart))
        if not isinstance(apart, Extent):
            return outcome
        lowest, highest = least(apart), -least(-apart)
        if (
            lowest > 0
            or highest < 0
            or (lowest == 0 and symbol in ("<", ">="))
            or (highest == 0 and symbol in (">", "<="))
        ):
            return outcome
        self.conditions.note(apart, symbol, outcome)
        return outcome

    def __eq__(self, other: object) -> Any:
        return (isinstance(other, Extent) and other.terms == self.terms) or self._compared(other, "==")

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __hash__(self) -> int:
        if not self.conditions.of_text:
            return hash(pinned(self))
        return _HASH  # the same for all extents, so that sets and dictionaries compare them

    # ---- text ----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        if not self.conditions.of_text:
            return str(pinned(self))
        return self.spelled()

    def spelled(self) -> str:
        """The polynomial as a text; nothing is pinned."""
        parts = [" * ".join([*([str(c)] if c != 1 or not m else []), *m]) for m, c in reversed(self.terms)]
        text = " + ".join(parts).replace("+ -", "- ")
        is_single = len(parts) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1
        return text if is_single else f"({text})"

    __repr__ = __str__

    def __format__(self, form: str) -> str:
        return str(self) if not form else format(pinned(self), form)

    # ---- uses of the number itself -------------------------------------------------------------------------------

    def __abs__(self) -> int:
        return self if self >= 0 else -self

    def __ceil__(self) -> int:
        return self

    def __floor__(self) -> int:
        return self

    def __round__(self, digits: Any = None) -> int:
        return self if digits is None or digits >= 0 else round(pinned(self), digits)

    __trunc__ = conjugate = __floor__

    @property
    def real(self) -> int:
        return self

    numerator = real

    def _pins(self, *others: object) -> NoReturn:
        if not self.conditions.of_text:
            pinned(self)  # a caller that catches the exception goes on with the value
        raise NeedsNumber("a size is used in a bitwise operation, a shift or a power")

    __pow__ = __rpow__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _pins
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _pins


class Real(float):
    """A float passed to the kernel in each call, like ``1 / length``. Kernels refer to it by name; other uses pin it.

    >>> conditions = Conditions()
    >>> mean = conditions.real("r0", 0.25)
    >>> mean.name, mean * 2, conditions.noted
    ('r0', 0.5, {'r0 == 0.25': True})
    """

    name: str
    conditions: Conditions

    def __new__(cls, value: float, name: str, conditions: Conditions) -> Real:
        made = super().__new__(cls, value)
        made.name = name
        made.conditions = conditions
        return made

    __hash__ = float.__hash__


def _pinning(name: str, of: type) -> Callable[..., Any]:
    """The method ``name`` of class ``of``, applied to the pinned value."""
    own = getattr(of, name)
    return lambda self, *others, **named: own(pinned(self), *others, **named)


def _comparing(symbol: str) -> Callable[..., Any]:
    return lambda self, other: self._compared(other, symbol)


_PINNING = """
    abs add bool ceil divmod eq float floor floordiv format ge gt int le lt mod mul ne neg pos pow radd rdivmod repr
    rfloordiv rmod rmul round rpow rsub rtruediv str sub truediv trunc
"""
for _name in (*(f"__{_name}__" for _name in _PINNING.split()), "is_integer", "as_integer_ratio", "hex"):
    setattr(Real, _name, _pinning(_name, float))
for _name in ("__int__", "__float__", "__truediv__", "__rtruediv__", "bit_length", "bit_count", "to_bytes"):
    setattr(Extent, _name, _pinning(_name, int))

_HASH = 0x5EED
_COMPARED: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
for _symbol, _compare in _COMPARED.items():
    if _symbol != "==":  # which has a method of its own
        setattr(Extent, f"__{_compare.__name__}__", _comparing(_symbol))


def outcome_of(symbol: str, value: int) -> bool:
    """The outcome of a comparison with zero.

    >>> outcome_of(">=", 0), outcome_of("<", 5)
    (True, False)
    """
    return bool(_COMPARED[symbol](value, 0))


def plain(number: int) -> int:
    """The value in the current call. Nothing is recorded, so that no kernel source may depend on it."""
    return int.__int__(number) if isinstance(number, Extent) else number


def estimate(number: int) -> int:
    """The value for decisions by cost. Nothing is recorded, so that every outcome must be correct for every size."""
    return number.conditions.value(number, number.conditions.usual) if isinstance(number, Extent) else number


def smaller(one: int, other: int) -> int:
    """The smaller number; the kernel computes it in the call if it depends on sizes."""
    if not varies(one - other):
        return min(one, other)
    return _computed(
        f"fuse_size_minimum({_spelled(one)}, {_spelled(other)})",
        "min({0}, {1})",
        min(plain(one), plain(other)),
        one,
        other,
    )


def larger(one: int, other: int) -> int:
    """The larger number; the kernel computes it in the call if it depends on sizes."""
    return -smaller(-one, -other)


def unless_below(number: int, bound: int, otherwise: int, chosen: int) -> int:
    """``otherwise`` if ``number < bound``, else ``chosen``; the kernel decides in the call if ``number`` varies."""
    if not varies(number):
        return otherwise if number < bound else chosen
    value = otherwise if plain(number) < bound else chosen
    return _computed(
        f"({number} < {bound} ? {otherwise} : {chosen})",
        "({2} if {0} < {1} else {3})",
        plain(value),
        number,
        bound,
        otherwise,
        chosen,
    )


def pinned(number: Any) -> Any:
    """The value of an extent or real as a plain number; records the condition that it has this value."""
    if isinstance(number, Real):
        value = float.__float__(number)
        number.conditions.noted[f"{number.name} == {value!r}"] = True
        return value
    if not isinstance(number, Extent):
        return number
    assert number == plain(number)
    return plain(number)


def varies(number: object) -> bool:
    """Whether a number is known in the call only."""
    return isinstance(number, Extent)


def is_one(number: int) -> bool:
    """Whether a size is one in every call. False for every size that varies; nothing is recorded.

    Code for a size that varies is right for one too: its loop runs once, its index is 0.

    >>> rows = Conditions().size("rows", 8)
    >>> is_one(rows), is_one(1), is_one(8)
    (False, True, False)
    """
    return not isinstance(number, Extent) and number == 1


def always_equal(one: int, other: int) -> bool:
    """Whether two numbers are equal for all sizes. Nothing is recorded, so that False must be right for equal ones too.

    Code for any number of elements is right for none, for instance: its loop never runs.

    >>> rows = Conditions().size("rows", 1)
    >>> always_equal(rows * 64, 64), always_equal(rows * 64, rows * 60 + rows * 4), always_equal(rows - rows, 0)
    (False, True, True)
    """
    return terms_of(one) == terms_of(other)


def is_multiple(number: int, divisor: int) -> bool:
    """Whether ``number`` is a multiple of ``divisor`` for all sizes, as a polynomial. Unlike ``%``, records nothing.

    >>> rows = Conditions().size("rows", 1)
    >>> is_multiple(rows * 64, rows * 8), is_multiple(rows * 64, 16), is_multiple(64, rows), is_multiple(8, 4)
    (True, True, False, True)
    """
    if not isinstance(number, Extent) and not isinstance(divisor, Extent):
        return number % divisor == 0
    found = _exact(number, divisor)
    return found is not None and always_equal(found * divisor, number)


def alike(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes are equal in every call; a size that varies is unlike a constant one (:func:`is_one`).

    >>> rows = Conditions().size("rows", 8)
    >>> alike((rows, 64), (1, 64)), alike((rows, 64), (rows, 64)), rows.conditions.noted
    (False, True, {'rows >= 1': True})
    """
    return len(one) == len(other) and all(is_one(a) == is_one(b) and a == b for a, b in zip(one, other, strict=True))


def reaches(number: int, bound: int) -> bool:
    """Whether ``number >= bound``, for callers that are correct with True at every size.

    If the inequality holds for all sizes from 2 on, this is True, and nothing is recorded for sizes of one.

    >>> rows = Conditions().size("rows", 8)
    >>> reaches(rows * rows - 1, rows), reaches(3, 4), rows.conditions.noted
    (True, False, {'rows >= 1': True})
    """
    apart = number - bound
    if isinstance(apart, Extent) and not any("(" in factor for factors, _ in apart.terms for factor in factors):
        # substitute n = LEAST_LOWERED + m: a polynomial in m without negative coefficients is never negative
        moved = (
            product_of(*((((), LEAST_LOWERED), ((factor,), 1)) for factor in factors), (((), coefficient),))
            for factors, coefficient in apart.terms
        )
        if all(coefficient >= 0 for _, coefficient in sum_of(*moved)):
            return True
    return number >= bound


def may_reach(number: float, bound: float) -> bool:
    """Whether ``number >= bound`` at some size, for callers that are correct with True at every size.

    Nothing is recorded. Either number may be infinite.

    >>> rows = Conditions().size("rows", 8)
    >>> may_reach(rows, 20), may_reach(-rows, 0), may_reach(3, 4), may_reach(math.inf, rows), rows.conditions.noted
    (True, False, False, True, {'rows >= 1': True})
    """
    if isinstance(number, float):
        return number == math.inf
    if isinstance(bound, float):
        return bound == -math.inf
    apart = number - bound
    return -least(-apart) >= 0 if isinstance(apart, Extent) else apart >= 0


def common_divisor(one: int, other: int) -> int:
    """The greatest constant that divides both numbers for all sizes."""
    return math.gcd(*(c for n in (one, other) for _, c in terms_of(n)))


def terms_of(number: int) -> Terms:
    """A number as a polynomial."""
    if isinstance(number, Extent):
        return number.terms
    return (((), int(number)),) if number else ()


def divided(number: int, divisor: int) -> int:
    """``number // divisor``: a polynomial if ``divisor`` divides every monomial, else a factor computed in the call."""
    found = _exact(number, divisor)
    return _quotient("fuse_size_quotient", "//", number, divisor) if found is None else found


def remaining(number: int, divisor: int) -> int:
    """``number % divisor``: 0 if ``divisor`` divides every monomial, else a factor computed in the call."""
    found = _exact(number, divisor)
    return _quotient("fuse_size_remainder", "%", number, divisor) if found is None else number - found * divisor


def _exact(number: int, divisor: int) -> int | None:
    """``number // divisor`` if that is a polynomial with integer coefficients; else None."""
    if not isinstance(number, Extent) and number >= 0 and least(divisor) > number:
        return 0
    if not isinstance(number, Extent) and number < 0 and least(divisor) >= -number:
        return -1
    found = quotient_of(terms_of(number), terms_of(divisor))
    return None if found is None else _any(number, divisor)._made(plain(number) // plain(divisor), found)


def _quotient(function: str, symbol: str, number: int, divisor: int) -> int:
    """A quotient or remainder that is no polynomial, as a factor computed in the call."""
    value = plain(number) // plain(divisor) if symbol == "//" else plain(number) % plain(divisor)
    by = "{1}"
    if isinstance(divisor, Extent) and divisor.conditions.computed is not None:
        by = "({1} or 1)"
        if divisor == 0:
            raise ZeroDivisionError
    text = f"{function}({_spelled(number)}, {_spelled(divisor)})"
    return _computed(text, f"({{0}} {symbol} {by})", value, number, divisor)


def _spelled(number: int) -> str:
    """A number in the text of a factor; where all that are computed are kept, it need not be pinned."""
    if isinstance(number, Extent) and number.conditions.computed is not None:
        return number.spelled()
    return str(number)


def _computed(text: str, python: str, value: int, *of: int) -> Extent:
    """A number that the kernel computes in the call, as a factor of polynomials.

    ``text`` computes it in the kernel. ``python`` computes it from ``of``, which its fields ``{0}``, ``{1}`` refer to.
    """
    conditions = _any(*of).conditions
    conditions.quotients[text] = python.format(*(conditions.python(terms_of(number)) for number in of))
    return Extent(value, (((text,), 1),), conditions)


def _any(*numbers: int) -> Extent:
    return next(number for number in numbers if isinstance(number, Extent))


def least(number: int) -> float:
    """A lower bound of a number over all sizes; minus infinity if it has a negative coefficient or a computed
    factor."""
    terms = terms_of(number)
    if any(m and (c < 0 or any("(" in factor for factor in m)) for m, c in terms):
        return -math.inf
    return sum(c * math.prod([LEAST] * len(m)) for m, c in terms)
