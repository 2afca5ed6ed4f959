"""Scalar expressions: typed, comparable, readable, and the same in C++ as evaluated."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuse.kernel.arithmetic import expressions
from fuse.kernel.arithmetic.expressions import (
    Expression,
    Operation,
    Parameter,
    Variable,
    applied,
    both,
    converted,
    fn,
    select,
)
from fuse.kernel.arithmetic.scalar_operators import COSTS, DEFINITIONS, MEANINGS, RELATIONS
from fuse.kernel.cpu.cpp_types import register as type_name
from fuse.kernel.cpu.prelude import prelude
from fuse.kernel.cpu.printer import text
from fuse.runtime.cpu.compiler import build
from tests.kernel.expression_values import evaluate

X, Y = (Parameter(torch.float32, i) for i in (0, 1))
INF, NAN = float("inf"), float("nan")
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.1, -2.5, 1e-40, -1e-45, 3e38, INF, -INF, NAN]
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def numbers(dtype: torch.dtype) -> Tensor:
    """Special values and extremes of a dtype."""
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        return torch.tensor(SPECIAL, dtype=dtype)
    limits = torch.iinfo(dtype)
    return torch.tensor([limits.min, limits.max, 0, 1, limits.min + 1, 7, 100], dtype=dtype)


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    first, second = zip(*itertools.product(numbers(dtype), repeat=2), strict=True)
    return torch.stack(first), torch.stack(second)


def cases() -> dict[str, Expression]:
    """Every operator that has eager's very bits, in every dtype that it takes."""
    found: dict[str, Expression] = {}
    for dtype in (torch.float32, torch.float64, *INTEGERS, torch.bool):
        x, y = Parameter(dtype, 0), Parameter(dtype, 1)
        made = {"add": x + y, "multiply": x * y, "equal": fn.equal(x, y), "unequal": fn.unequal(x, y)}
        made |= {"less": x < y, "at most": x <= y, "select": select(x > y, x, y), "at least": x >= y}
        made |= {"maximum": fn.maximum(x, y), "minimum": fn.minimum(x, y), "larger": fn.larger(x, y)}
        if dtype is not torch.bool:
            made |= {
                "subtract": x - y,
                "formula": x * (1 - y * y) - (x - (y - x)),
                "0 - x": 0 - x,
                "clamp": fn.clamp(x, 0, 6),
            }
        if not dtype.is_floating_point:
            made |= {"bits": (x & y) | (x ^ ~y)}
        else:
            made |= {
                "divide": x / y,
                "negate": -x * -y,
                "floor": fn.floor(x),
                "round": fn.round(x),
                "trunc": fn.trunc(x),
            }
            made |= {"abs": fn.abs(x), "copysign": fn.copysign(x, y), "relu": fn.relu(x)}
            made |= {"fmax": fn.fmax(x, y), "fmin": fn.fmin(x, y), "isnan": fn.isnan(x), "isfinite": fn.isfinite(x)}
            made |= {"both": both(x < y, y < 1), "leaky": fn.leaky_relu(x, 0.1), "isinf": fn.isinf(x)}
            made |= {"reciprocal": fn.reciprocal(x), "hardswish": fn.hardswish(x)}
        for target in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool):
            made[f"to {target}"] = converted(x, dtype, target)
        found |= {f"{name} {dtype}": expression for name, expression in made.items()}
    return found


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """One function an expression, over arrays."""
    source = [prelude()]
    for number, expression in enumerate(cases().values()):
        given = next(p.dtype for p in expressions.parts(expression) if isinstance(p, Parameter))
        formula = text(applied(expression, [Variable(given, "a[i]"), Variable(given, "b[i]")]))
        of, out = type_name(given), type_name(expression.dtype)
        source.append(
            f'extern "C" void case_{number}(const {of} *a, const {of} *b, {out} *out, int64_t n) '
            f"{{ for (int64_t i = 0; i < n; ++i) out[i] = {formula}; }}"
        )
    return build("\n".join(source))


@pytest.mark.parametrize("name", list(cases()))
def test_cpp_and_the_evaluation_have_the_same_bits(library: ctypes.CDLL, name: str) -> None:
    expression = cases()[name]
    given = next(p.dtype for p in expressions.parts(expression) if isinstance(p, Parameter))
    first, second = pairs(given)
    out = torch.empty(first.shape, dtype=expression.dtype)
    function = getattr(library, f"case_{list(cases()).index(name)}")
    function(*(ctypes.c_void_p(t.data_ptr()) for t in (first, second, out)), ctypes.c_int64(len(first)))
    expected = evaluate(expression, [first, second])
    assert expected.dtype == out.dtype
    assert torch.equal(bits(out), bits(expected))


def bits(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value
    value = torch.where(value.isnan(), NAN, value)
    return value.view(torch.int32 if value.dtype is torch.float32 else torch.int64)


def test_equal_trees_are_equal_and_print_alike() -> None:
    def formula(g: Expression, y: Expression) -> Operation:
        return g * (1 - y * y)

    assert formula(X, Y) == formula(X, Y)
    assert hash(formula(X, Y)) == hash(formula(X, Y))
    assert formula(X, Y) != formula(Y, X)
    assert formula(X, Y) != formula(Parameter(torch.float64, 0), Parameter(torch.float64, 1))
    assert str(formula(X, Y)) == "x0 * (1.0 - x1 * x1)"
    assert text(applied(formula(X, Y), [Variable(torch.float32, n) for n in "gy"])) == "g * (1.0f - y * y)"


@pytest.mark.parametrize(
    "mixed",
    [
        lambda: X + Parameter(torch.float64, 1),
        lambda: fn.maximum(X, Parameter(torch.int64, 1)),
        lambda: select(X, X, Y),
        lambda: select(X < Y, X, Parameter(torch.bfloat16, 1)),
    ],
)
def test_nothing_is_promoted_inside_of_a_tree(mixed: object) -> None:
    with pytest.raises(TypeError):
        mixed()  # type: ignore[operator]


def test_an_operator_that_does_not_exist_is_not_built() -> None:
    with pytest.raises(AttributeError, match="no scalar operator sine"):
        fn.sine(X)


def test_every_operator_has_a_meaning() -> None:
    assert not MEANINGS.keys() & DEFINITIONS.keys()
    assert (COSTS.keys() | RELATIONS) <= MEANINGS.keys() | DEFINITIONS.keys()


@pytest.mark.parametrize("name", list(DEFINITIONS))
def test_a_formula_costs_what_its_operator_does(name: str) -> None:
    definition = DEFINITIONS[name]
    formula = definition(fn, *(X for _ in range(definition.__code__.co_argcount - 1)))
    own = expressions.cost(fn.__getattr__(name)(X))
    assert (expressions.cost(formula) >= 8) == (own >= 8)  # whether a result is worth keeping


LEAVES = st.sampled_from([X, Y]) | st.floats(-4, 4, width=32).map(lambda x: expressions.Literal(torch.float32, x))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        *(st.builds(f, inner, inner) for f in (lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b)),
        st.builds(lambda a: -a, inner),
        st.builds(lambda a, b, c: select(a < b, c, a), inner, inner, inner),
        st.builds(lambda a, b, c: select(both(a <= b, ~(b > c)), b, c), inner, inner, inner),
    ),
    max_leaves=12,
)  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(TREES)
def test_parentheses_keep_the_tree(tree: Expression) -> None:
    """Read back by Python, whose symbols bind alike, the text says what the tree does."""
    notation = expressions.Notation(
        lambda leaf: f"({float(leaf.number)!r})" if isinstance(leaf, expressions.Literal) else f"x{leaf.position}",  # type: ignore[attr-defined]
        lambda whole: PYTHON.get(whole.operator) or expressions.SYMBOLS[whole.operator],
    )
    values = {"x0": 1.5, "x1": -0.75}
    arguments = [torch.tensor(v, dtype=torch.float64) for v in values.values()]
    read = eval(expressions.render(tree, notation), {}, values)
    assert read == evaluate(tree, arguments, widened=True).item()


PYTHON = {
    "select": expressions.Template("({1} if {0} else {2})", expressions.CALL, (0, 0, 0)),
    "and": expressions.Template("({} and {})", expressions.CALL, (0, 0)),
    "invert": expressions.Template("(not ({}))", expressions.CALL, (0,)),
}
