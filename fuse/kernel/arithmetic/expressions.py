"""Typed scalar expressions: what a kernel computes between a load and a store.

    lambda g, y: g * (1 - y * y)     of two float32     ->     multiply(g, subtract(1.0, multiply(y, y)))

An expression is a frozen tree of operations, each with the dtype that it computes in. Leaves are numbers, arguments of
a formula, variables and affine indices. There is no type promotion: Python numbers take the dtype of the other operand,
every other conversion is an explicit ``convert``. bfloat16 and float16 are computed in float32, with explicit
``round_bfloat16`` and ``round_float16``. Integers wrap around; ``+`` of bools is *or*, ``*`` is *and*.

:mod:`fuse.kernel.arithmetic.scalar_operators` defines the operators. A :class:`Notation` is how a target writes them.
Expressions are equal if their structure is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fuse.graph.describing import dtype_name
from fuse.kernel.arithmetic.dtypes import HALVES, register
from fuse.kernel.arithmetic.index import Affine
from fuse.kernel.arithmetic.scalar_operators import COSTS, DEFINITIONS, MEANINGS, RELATIONS

Scalar = bool | int | float


@dataclass(frozen=True)
class Expression:
    """A scalar of type ``dtype``."""

    dtype: torch.dtype

    def __add__(self, other: Operand) -> Operation:
        return operation("add", self, other)

    def __radd__(self, other: Operand) -> Operation:
        return operation("add", other, self)

    def __sub__(self, other: Operand) -> Operation:
        return operation("subtract", self, other)

    def __rsub__(self, other: Operand) -> Operation:
        return operation("subtract", other, self)

    def __mul__(self, other: Operand) -> Operation:
        return operation("multiply", self, other)

    def __rmul__(self, other: Operand) -> Operation:
        return operation("multiply", other, self)

    def __truediv__(self, other: Operand) -> Operation:
        return operation("divide", self, other)

    def __rtruediv__(self, other: Operand) -> Operation:
        return operation("divide", other, self)

    def __floordiv__(self, other: Operand) -> Operation:
        """The quotient of two integers, rounded towards zero; the divisor is neither 0 nor -1."""
        return operation("quotient", self, other)

    def __mod__(self, other: Operand) -> Operation:
        """The remainder of two non-negative integers."""
        return operation("modulo", self, other)

    def __neg__(self) -> Operation:
        return operation("negate", self)

    def __invert__(self) -> Operation:
        """The bitwise complement; for a bool, *not*."""
        return operation("invert", self)

    def __and__(self, other: Operand) -> Operation:
        return operation("bit_and", self, other)

    def __or__(self, other: Operand) -> Operation:
        return operation("bit_or", self, other)

    def __xor__(self, other: Operand) -> Operation:
        return operation("bit_xor", self, other)

    def __lt__(self, other: Operand) -> Operation:
        return operation("less", self, other)

    def __le__(self, other: Operand) -> Operation:
        return operation("at_most", self, other)

    def __gt__(self, other: Operand) -> Operation:
        return operation("greater", self, other)

    def __ge__(self, other: Operand) -> Operation:
        return operation("at_least", self, other)

    def __str__(self) -> str:
        return render(self, PLAIN)


Operand = Expression | bool | int | float


@dataclass(frozen=True)
class Literal(Expression):
    """A number."""

    number: Scalar


@dataclass(frozen=True)
class Parameter(Expression):
    """Argument ``position`` of a formula."""

    position: int


@dataclass(frozen=True)
class Variable(Expression):
    """A value named by an earlier statement."""

    name: str


@dataclass(frozen=True)
class Position(Expression):
    """An index: affine in loop variables, and in sizes that are known in the call only."""

    index: Affine


@dataclass(frozen=True)
class Operation(Expression):
    """``operator`` of :mod:`fuse.kernel.arithmetic.scalar_operators` on ``operands``, computed in their dtype."""

    operator: str
    operands: tuple[Expression, ...]


# ---- building --------------------------------------------------------------------------------------------------------


def operation(operator: str, *operands: Operand) -> Operation:
    """``operator`` on operands of one dtype; Python numbers take the dtype of the other operands.

    >>> x = Parameter(torch.float32, 0)
    >>> str(operation("maximum", x, 0)), operation("less", x, 1).dtype
    ('maximum(x0, 0.0)', torch.bool)
    """
    typed = _typed(operator, operands)
    return Operation(torch.bool if operator in RELATIONS else typed[0].dtype, operator, typed)


def _typed(operator: str, operands: Sequence[Operand]) -> tuple[Expression, ...]:
    """The operands as expressions of one dtype; an integer next to an index becomes an index.

    Raises:
        TypeError: there is no expression among them, or their dtypes differ.
    """
    like = next((operand for operand in operands if isinstance(operand, Expression)), None)
    if like is None:
        raise TypeError(f"{operator} of numbers: one operand has to be an expression, which gives the dtype")
    typed = tuple(operand if isinstance(operand, Expression) else number_like(like, operand) for operand in operands)
    if any(operand.dtype != like.dtype for operand in typed):
        raise TypeError(f"{operator} of {', '.join(str(operand.dtype) for operand in typed)}")
    return typed


def number_like(like: Expression, number: Scalar) -> Literal | Position:
    return position(number) if isinstance(like, Position) and isinstance(number, int) else Literal(like.dtype, number)


class Functions:
    """Operators as Python functions: ``fn.exp(x)``.

    >>> str(fn.exp(-fn.abs(Parameter(torch.float32, 0))))
    'exp(-abs(x0))'
    """

    def __getattr__(self, operator: str) -> Callable[..., Operation]:
        if operator not in MEANINGS and operator not in DEFINITIONS:
            raise AttributeError(f"there is no scalar operator {operator}")
        return lambda *operands: operation(operator, *operands)

    def select(self, condition: Expression, yes: Operand, no: Operand) -> Operation:
        return select(condition, yes, no)


fn = Functions()


def both(first: Expression, second: Expression) -> Operation:
    return operation("and", first, second)


def either(first: Expression, second: Expression) -> Operation:
    return operation("or", first, second)


def select(condition: Expression, yes: Operand, no: Operand) -> Operation:
    """``yes`` where ``condition`` holds, ``no`` elsewhere; one of them gives the dtype."""
    branches = _typed("select", (yes, no))
    if condition.dtype != torch.bool:
        raise TypeError(f"select by {condition.dtype}")
    return Operation(branches[0].dtype, "select", (condition, *branches))


def squared(x: Expression) -> Operation:
    return x * x


def converted(value: Expression, source: torch.dtype, target: torch.dtype) -> Expression:
    """``value`` of dtype ``source`` converted to ``target``; to bfloat16 and float16 as a rounded float32.

    >>> x = Parameter(torch.float64, 0)
    >>> str(converted(x, torch.float64, torch.bfloat16)), str(converted(x, torch.float64, torch.float64))
    ('round_bfloat16(to_float32(x0))', 'x0')
    """
    if source == target:
        return value
    if register(source) != register(target):
        value = Operation(register(target), "convert", (value,))
    return Operation(value.dtype, "round_" + dtype_name(target), (value,)) if target in HALVES else value


def position(where: Affine | str | int) -> Position:
    """An index, a loop variable or a whole number as an expression."""
    if not isinstance(where, Affine):
        where = Affine.of(where) if isinstance(where, str) else Affine((), where)
    return Position(torch.int64, where)


# ---- reading ---------------------------------------------------------------------------------------------------------


def parts(expression: Expression) -> Iterator[Expression]:
    """The expression and all of its subexpressions, parents first."""
    yield expression
    if isinstance(expression, Operation):
        for operand in expression.operands:
            yield from parts(operand)


def names_in(expression: Expression) -> set[str]:
    """The names of variables, loop variables and sizes in an expression.

    >>> sorted(names_in(Variable(torch.int64, "row") + position(Affine.of("i") * 4)))
    ['i', 'row']
    """
    found: set[str] = set()
    for part in parts(expression):
        if isinstance(part, Variable):
            found.add(part.name)
        elif isinstance(part, Position):
            found.update(part.index.atoms(), (size for size, _ in part.index.sized))
    return found


def applied(expression: Expression, arguments: Sequence[Expression]) -> Expression:
    """The formula with ``arguments`` for its parameters.

    >>> x = Parameter(torch.float32, 0)
    >>> str(applied(1 - x * x, [Variable(torch.float32, "tanh")]))
    '1.0 - tanh * tanh'
    """
    match expression:
        case Parameter():
            return arguments[expression.position]
        case Operation():
            operands = tuple(applied(operand, arguments) for operand in expression.operands)
            return Operation(expression.dtype, expression.operator, operands)
        case _:
            return expression


def cost(expression: Expression) -> int:
    """The cost of an expression: 0 for a leaf, 1 for any arithmetic of a few cycles, more for functions (``COSTS``).

    >>> x = Parameter(torch.float32, 0)
    >>> cost(x), cost(1 - x * x), cost(fn.tanh(x) + 1)
    (0, 1, 10)
    """
    operators = [part.operator for part in parts(expression) if isinstance(part, Operation)]
    return max(sum(COSTS.get(operator, 0) for operator in operators), min(len(operators), 1))


# ---- text ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Template:
    """How an operation is written.

    ``text`` is a format string with a field for each operand. ``level`` is the operation's precedence, ``operands`` the
    least precedence that each operand needs to stand without parentheses.
    """

    text: str
    level: int
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Notation:
    """How a target writes expressions: the text of a leaf, and the template of an operation."""

    leaf: Callable[[Expression], str]
    template: Callable[[Operation], Template]


CALL = 100
"""The precedence of an expression that needs no parentheses anywhere."""
UNARY, PRODUCT, SUM, ORDER, EQUALITY, BIT_AND, BIT_XOR, BIT_OR, AND, OR, CHOICE = range(90, 79, -1)


def binary(symbol: str, level: int) -> Template:
    """The template of a left-associative operator between two operands."""
    return Template(f"{{}} {symbol} {{}}", level, (level, level + 1))


def called(name: str, count: int) -> Template:
    """The template ``name(operand, ...)``."""
    return Template(f"{name}({', '.join(['{}'] * count)})", CALL, (0,) * count)


SYMBOLS: Mapping[str, Template] = {
    "add": binary("+", SUM),
    "subtract": binary("-", SUM),
    "multiply": binary("*", PRODUCT),
    "divide": binary("/", PRODUCT),
    "quotient": binary("/", PRODUCT),
    "modulo": binary("%", PRODUCT),
    "negate": Template("-{}", UNARY, (UNARY + 1,)),
    "invert": Template("~{}", UNARY, (UNARY,)),
    "less": binary("<", ORDER),
    "at_most": binary("<=", ORDER),
    "greater": binary(">", ORDER),
    "at_least": binary(">=", ORDER),
    "equal": binary("==", EQUALITY),
    "unequal": binary("!=", EQUALITY),
    "bit_and": binary("&", BIT_AND),
    "bit_xor": binary("^", BIT_XOR),
    "bit_or": binary("|", BIT_OR),
    "and": binary("&&", AND),
    "or": binary("||", OR),
    "select": Template("{} ? {} : {}", CHOICE, (CHOICE + 1, 0, CHOICE)),
}
"""Templates of the operators that have symbols in C, with C's precedences."""


def render(expression: Expression, notation: Notation) -> str:
    """The text of an expression, with parentheses where they are needed."""
    return _rendered(expression, notation, 0)


def _rendered(expression: Expression, notation: Notation, least: int) -> str:
    if not isinstance(expression, Operation):
        text = notation.leaf(expression)
        return f"({text})" if least > SUM and isinstance(expression, Position) and " " in text else text
    template = notation.template(expression)
    operands = zip(expression.operands, template.operands, strict=True)
    text = template.text.format(*(_rendered(operand, notation, level) for operand, level in operands))
    return f"({text})" if template.level < least else text


def _plain_leaf(leaf: Expression) -> str:
    match leaf:
        case Literal():
            return str(float(leaf.number) if leaf.dtype.is_floating_point else leaf.number)
        case Parameter():
            return f"x{leaf.position}"
        case Variable():
            return leaf.name
        case Position():
            return str(leaf.index)
    raise TypeError(f"{type(leaf).__name__} is not a leaf")


def _plain_template(whole: Operation) -> Template:
    name = f"to_{dtype_name(whole.dtype)}" if whole.operator == "convert" else whole.operator
    return SYMBOLS.get(whole.operator) or called(name, len(whole.operands))


PLAIN = Notation(_plain_leaf, _plain_template)
"""The notation of ``str`` and of the IR's text."""
