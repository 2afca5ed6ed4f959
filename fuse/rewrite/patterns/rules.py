"""The named rules that give each operator's term one canonical spelling.

    name                  spellings that become one
    scaled_sums           x - y,  x + (-1) * y,  rsub(y, x),  add(x, y, alpha=-1);  x - (-y) and x + y
    quotients             x / c and x * (1 / c);  x / y and x * reciprocal(y)
    powers                x * x, x ** 2 and square(x);  1 / sqrt(x), rsqrt(x) and x ** -0.5
    products              mm + add, addmm and linear;  mm, bmm and matmul of any rank
    composed              silu(x) and x * sigmoid(x);  glu;  addcmul and addcdiv
    bounds                relu, clamp_min(0) and clamp(min=0);  hardtanh and clamp
    choices               masked_fill, index_put by a mask and where;  x > y and y < x
    fills                 zeros_like, new_zeros, full and scalar_tensor
    averages              mean and sum * (1 / n);  keepdim and unsqueeze
    pieces                stack and cat of unsqueezed;  select, narrow, split and slices, of split dimensions too
    views                 transpose, t and permute;  view, reshape, flatten, squeeze and unsqueeze
    copies                clone, contiguous, copy, slice_scatter of everything and the tensor itself

All rules hold for every value of every element, except that ``quotients`` and ``averages`` may differ in the last bit.
If an operator converts operands before it computes, its term does, too. Intermediate values of one float16 operator are
float32: as separate operators, they could overflow. Terms are only compared; the graph keeps its operators.

A rule decomposes its own operator. It never examines the operands' operators, except views and negations, because a
term must not depend on where the graph is cut. The index follows both (``GraphIndex.source``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fuse.rewrite.patterns import views
from fuse.rewrite.patterns.terms import NUMBER, TensorType, Term, Terms, shortest

OperatorArguments = dict[str, Any]
"""An operator's arguments by the names of its schema, with terms in place of tensors."""

Rule = Callable[[Terms, OperatorArguments, TensorType], Term | None]
"""``rule(terms, arguments, result type)``: the term, or None if the rule does not apply."""

_RULES: dict[str, Rule] = {}
_MAKES: dict[str, frozenset[str]] = {}


def rule(name: str, *operators: str, makes: str = "") -> Callable[[Rule], Rule]:
    """Register a rule called ``name`` for ATen operators, with all overloads. ``makes``: the terms it may make."""

    def register(function: Rule) -> Rule:
        for operator in operators:
            _RULES[operator] = function
            _MAKES[operator] = frozenset(makes.split())
        NAMES.setdefault(name, []).extend(operators)
        return function

    return register


NAMES: dict[str, list[str]] = {}
"""Name of a rule -> its operators."""


def rule_for(operator: str) -> Rule | None:
    """The rule of an ATen operator (``"add"``), or None."""
    return _RULES.get(operator)


def made_by_rule(operator: str) -> frozenset[str]:
    """The names of the computing terms that the operator's rule may make."""
    return _MAKES.get(operator, frozenset())


# ---- arithmetic ----------------------------------------------------------------------------------------------------


def operand(terms: Terms, value: Any, beside: Term) -> Term:
    """The term of an operand: a tensor's term, or a number's term beside ``beside``."""
    return value if isinstance(value, Term) else terms.number(value, beside)


def add(terms: Terms, x: Term, y: Term, result: TensorType) -> Term:
    return views.pointwise(terms, "add", [x, y], result, commutative=True)


def mul(terms: Terms, x: Term, y: Term, result: TensorType) -> Term:
    """``x * y``. A factor of 1 is left out; ``x * x`` is a power."""
    for one, other in ((x, y), (y, x)):
        if one.name == NUMBER and one.value == 1 and other.type == result:
            return other
    if x is y:
        return power(terms, x, terms.number(2, x), result)
    x, y = (_rounded(terms, term, result) if term.name == NUMBER else term for term in (x, y))
    return views.pointwise(terms, "mul", [x, y], result, commutative=True)


def _rounded(terms: Terms, number: Term, result: TensorType) -> Term:
    """A factor without its last digits, in which c and 1 / (1 / c) may differ; rounded to float32 for float32."""
    value = number.value
    if not isinstance(value, float):
        return number
    fine = result.dtype in (torch.float64, torch.complex128)
    rounded = float(f"{value:.15g}") if fine else shortest(value)
    return terms.make(NUMBER, (), number.type, [("value", value)], known_as=(("value", rounded),))


def power(terms: Terms, x: Term, exponent: Term, result: TensorType) -> Term:
    """``x ** exponent``; an inverse square root becomes the inverse of a square root, as most models write it."""
    if exponent.name == NUMBER:
        if exponent.value == 1 and x.type == result:
            return x
        if exponent.value == -0.5:
            root = power(terms, x, terms.number(0.5, x), result)
            return power(terms, root, terms.number(-1.0, root), result)
    return views.pointwise(terms, "pow", [x, exponent], result)


def scaled(terms: Terms, x: Term, factor: Any) -> Term:
    """``x`` times a Python number."""
    if x.name == NUMBER:
        return terms.make(NUMBER, (), x.type, [("value", x.value * factor)])
    if factor == -1 and (other := negated(x)) is not None:
        return other
    return x if factor == 1 else mul(terms, x, terms.number(factor, x), x.type)


def negated(x: Term) -> Term | None:
    """The operand of the negation ``x``; None if ``x`` is none."""
    if x.name != "mul" or len(x.operands) != 2:
        return None
    for number, other in (x.operands, x.operands[::-1]):
        if number.name == NUMBER and number.value == -1 and other.type == x.type:
            return other
    return None


def inner(result: TensorType) -> torch.dtype:
    """The dtype in which one operator computes: float32 for float16, because intermediate values may be larger."""
    assert result.dtype is not None
    return torch.float32 if result.dtype == torch.float16 else result.dtype


def cast(terms: Terms, x: Term, dtype: torch.dtype) -> Term:
    """``x`` as read by an operator that computes in ``dtype``; a number has no dtype."""
    return x if x.name == NUMBER else views.cast(terms, x, dtype)


def scaled_sum(terms: Terms, x: Term, y: Term, factor: Any, result: TensorType) -> Term:
    """``x + factor * y`` by one operator, which converts ``y`` first: for uint8, ``x - y`` is not ``x + (-y)``."""
    if factor == 1:
        return add(terms, x, y, result)
    if factor == -1 and (y.name == NUMBER or y.dtype.is_floating_point):  # a negation is exact in any dtype
        return add(terms, x, scaled(terms, y, factor), result)
    dtype = inner(result)
    x = x if dtype == result.dtype else cast(terms, x, dtype)
    whole = add(terms, x, scaled(terms, cast(terms, y, dtype), factor), replace(result, dtype=dtype))
    return views.cast(terms, whole, result.dtype)  # type: ignore[arg-type]  # a result has one


@rule("scaled_sums", "add", makes="add mul pow")
def _add(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    return scaled_sum(terms, a["self"], operand(terms, a["other"], a["self"]), a["alpha"], result)


@rule("scaled_sums", "sub", makes="add mul pow")
def _sub(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    return scaled_sum(terms, a["self"], operand(terms, a["other"], a["self"]), -a["alpha"], result)


@rule("scaled_sums", "rsub", makes="add mul")
def _rsub(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    return scaled_sum(terms, operand(terms, a["other"], a["self"]), a["self"], -a["alpha"], result)


@rule("scaled_sums", "neg", makes="mul")
def _neg(terms: Terms, a: OperatorArguments, _result: TensorType) -> Term:
    return scaled(terms, a["self"], -1)


@rule("quotients", "mul", makes="mul pow")
def _mul(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    return mul(terms, a["self"], operand(terms, a["other"], a["self"]), result)


@rule("quotients", "div", makes="mul pow")
def _div(terms: Terms, a: OperatorArguments, result: TensorType) -> Term | None:
    if a.get("rounding_mode") is not None or not result.dtype.is_floating_point:  # type: ignore[union-attr]  # a result has one
        return None
    other = a["other"]
    if isinstance(other, Term):
        return mul(terms, a["self"], inverse_of(terms, other, result), result)
    if not other or not math.isfinite(inverse := 1 / other):
        return None
    return mul(terms, a["self"], terms.number(inverse, a["self"]), result)


def inverse_of(terms: Terms, x: Term, result: TensorType) -> Term:
    """``1 / x`` within a division with the result type ``result``: the divisor is converted first."""
    if x.name == NUMBER:
        return power(terms, x, terms.number(-1.0, x), replace(result, shape=()))
    if x.dtype.is_floating_point:
        x = views.cast(terms, x, result.dtype)  # type: ignore[arg-type]  # a result has one
    return power(terms, x, terms.number(-1.0, x), replace(x.type, dtype=result.dtype))


@rule("powers", "reciprocal", makes="pow")
def _reciprocal(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    return power(terms, a["self"], terms.number(-1.0, a["self"]), result)


@rule("powers", "sqrt", makes="pow")
def _sqrt(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    return power(terms, a["self"], terms.number(0.5, a["self"]), result)


@rule("powers", "rsqrt", makes="pow")
def _rsqrt(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    return power(terms, a["self"], terms.number(-0.5, a["self"]), result)


@rule("powers", "pow", makes="pow")
def _pow(terms: Terms, a: OperatorArguments, result: TensorType) -> Term | None:
    if not isinstance(a["self"], Term):
        return None
    return power(terms, a["self"], operand(terms, a["exponent"], a["self"]), result)


# ---- products ------------------------------------------------------------------------------------------------------


@rule("products", "mm", "bmm", makes="matmul")
def _matmul(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    return views.matmul(terms, a["self"], a.get("mat2"), result.dtype)  # type: ignore[arg-type]  # a result has one


@rule("products", "addmm", makes="add mul matmul")
def _addmm(terms: Terms, a: OperatorArguments, result: TensorType) -> Term | None:
    return _biased(terms, a, a["mat1"], a["mat2"], result)


@rule("products", "baddbmm", makes="add mul matmul")
def _baddbmm(terms: Terms, a: OperatorArguments, result: TensorType) -> Term | None:
    return _biased(terms, a, a["batch1"], a["batch2"], result)


def _biased(terms: Terms, a: OperatorArguments, left: Term, right: Term, result: TensorType) -> Term | None:
    if a["beta"] == 0:  # the bias is not read
        return None
    plain = a["alpha"] == a["beta"] == 1
    dtype = left.dtype if plain else inner(result)
    product = scaled(terms, views.matmul(terms, left, right, dtype), a["alpha"])
    bias = a["self"] if plain else cast(terms, a["self"], dtype)
    whole = add(terms, scaled(terms, bias, a["beta"]), product, replace(result, dtype=dtype))
    return views.cast(terms, whole, result.dtype)  # type: ignore[arg-type]  # a result has one


# ---- composed elementwise operators --------------------------------------------------------------------------------


def sigmoid(terms: Terms, x: Term) -> Term:
    return views.pointwise(terms, "sigmoid", [x], x.type)


@rule("composed", "silu", makes="mul sigmoid pow")
def _silu(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    return mul(terms, a["self"], sigmoid(terms, a["self"]), result)


@rule("composed", "glu", makes="mul sigmoid")
def _glu(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    x: Term = a["self"]
    dim = a["dim"] % len(x.shape)
    half = x.shape[dim] // 2
    first, second = views.cut(terms, x, dim, 0, half), views.cut(terms, x, dim, half, 2 * half)
    return mul(terms, first, sigmoid(terms, second), result)


@rule("composed", "addcmul", makes="add mul pow")
def _addcmul(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    return _with_product(terms, a, a["tensor2"], result)


@rule("composed", "addcdiv", makes="add mul pow")
def _addcdiv(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    return _with_product(terms, a, inverse_of(terms, a["tensor2"], replace(result, dtype=inner(result))), result)


def _with_product(terms: Terms, a: OperatorArguments, y: Term, result: TensorType) -> Term:
    """``self + value * tensor1 * y`` by one operator, which converts all operands first."""
    dtype = inner(result)
    z, x, y = (cast(terms, one, dtype) for one in (a["self"], a["tensor1"], y))
    product = mul(terms, x, y, replace(result, shape=tuple(torch.broadcast_shapes(x.shape, y.shape)), dtype=dtype))
    whole = add(terms, z, scaled(terms, product, a["value"]), replace(result, dtype=dtype))
    return views.cast(terms, whole, result.dtype)  # type: ignore[arg-type]  # a result has one


@rule("bounds", "relu", "clamp", "clamp_min", "clamp_max", "hardtanh", makes="relu clamp clamp_min clamp_max")
def _clamp(terms: Terms, a: OperatorArguments, result: TensorType) -> Term | None:
    x: Term = a["self"]
    least = a.get("min", a.get("min_val", 0 if set(a) == {"self"} else None))
    most = a.get("max", a.get("max_val"))
    if isinstance(least, Term) or isinstance(most, Term):
        return None
    least, most = (None if bound is None else terms.number(bound, x).value for bound in (least, most))
    if least == 0 and most is None:
        return views.pointwise(terms, "relu", [x], result)
    return views.pointwise(terms, "clamp", [x], result, [("min", least), ("max", most)])


@rule("choices", "masked_fill", makes="where")
def _masked_fill(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    value = operand(terms, a["value"], a["self"])
    return views.pointwise(terms, "where", [a["mask"], value, a["self"]], result)


@rule("choices", "index_put", makes="where index_put")
def _index_put(terms: Terms, a: OperatorArguments, result: TensorType) -> Term | None:
    """A ``where``, if one value or one row is written to all elements that a mask chooses."""
    (mask, *more), values = a["indices"], a["values"]
    if a["accumulate"] or more or not isinstance(mask, Term) or mask.dtype != torch.bool or not mask.shape:
        return None
    inner_rank = len(result.shape) - len(mask.shape)
    if len(values.shape) > inner_rank:
        return None
    mask = views.reshape(terms, mask, (*mask.shape, *[1] * inner_rank))
    return views.pointwise(terms, "where", [mask, values, a["self"]], result)


@rule("choices", "gt", makes="lt")
def _gt(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    return views.pointwise(terms, "lt", [operand(terms, a["other"], a["self"]), a["self"]], result)


@rule("choices", "ge", makes="le")
def _ge(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    return views.pointwise(terms, "le", [operand(terms, a["other"], a["self"]), a["self"]], result)


# ---- tensors of equal elements -------------------------------------------------------------------------------------


@rule("fills", "scalar_tensor", "full", "full_like", "new_full")
def _full(terms: Terms, a: OperatorArguments, result: TensorType) -> Term | None:
    value = a.get("s", a.get("fill_value"))
    return None if isinstance(value, Term) else terms.fill(value, result)


@rule("fills", "zeros", "zeros_like", "new_zeros")
def _zeros(terms: Terms, _a: OperatorArguments, result: TensorType) -> Term:
    return terms.fill(0, result)


@rule("fills", "ones", "ones_like", "new_ones")
def _ones(terms: Terms, _a: OperatorArguments, result: TensorType) -> Term:
    return terms.fill(1, result)


# ---- reductions ----------------------------------------------------------------------------------------------------


@rule("averages", "sum", makes="sum")
def _sum(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    return _reduced(terms, "sum", a, result)


@rule("averages", "mean", makes="sum mul")
def _mean(terms: Terms, a: OperatorArguments, result: TensorType) -> Term | None:
    x: Term = a["self"]
    count = math.prod(x.shape[dim] for dim in _dims(a, x))
    if not count:
        return None
    wide = {**a, "dtype": inner(result)} if inner(result) != result.dtype else a
    whole = scaled(terms, _reduced(terms, "sum", wide, replace(result, dtype=inner(result))), 1 / count)
    return views.cast(terms, whole, result.dtype)  # type: ignore[arg-type]  # a result has one


@rule("averages", "amax", makes="amax")
def _amax(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    return _reduced(terms, "amax", a, result)


@rule("averages", "amin", makes="amin")
def _amin(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    return _reduced(terms, "amin", a, result)


def _reduced(terms: Terms, name: str, a: OperatorArguments, result: TensorType) -> Term:
    """A reduction without its dimensions, and a reshape if they are kept."""
    x: Term = a["self"]
    dims = _dims(a, x)
    if a.get("dtype") is not None:
        x = views.cast(terms, x, a["dtype"])
    left = tuple(size for dim, size in enumerate(x.shape) if dim not in dims)
    return views.reshape(terms, terms.make(name, [x], replace(result, shape=left), [("dim", dims)]), result.shape)


def _dims(a: OperatorArguments, x: Term) -> tuple[int, ...]:
    rank = len(x.shape)
    dims: Sequence[int] | int | None = a.get("dim")
    if dims is None or dims == []:
        return tuple(range(rank))
    return tuple(sorted(dim % max(rank, 1) for dim in ([dims] if isinstance(dims, int) else dims)))


# ---- movement and views --------------------------------------------------------------------------------------------


@rule("pieces", "stack", makes="cat")
def _stack(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    pieces: list[Term] = a["tensors"]
    dim = a["dim"] % len(result.shape)
    shape = (*result.shape[:dim], 1, *result.shape[dim + 1 :])
    return terms.make("cat", [views.reshape(terms, piece, shape) for piece in pieces], result, [("dim", dim)])


@rule("pieces", "cat", makes="cat")
def _cat(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    pieces: list[Term] = a["tensors"]
    return terms.make("cat", pieces, result, [("dim", a["dim"] % max(len(result.shape), 1))])


@rule("pieces", "select")
def _select(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    x: Term = a["self"]
    index = a["index"] % x.shape[a["dim"]]
    return views.reshape(terms, views.cut(terms, x, a["dim"], index, index + 1), result.shape)


@rule("pieces", "slice")
def _slice(terms: Terms, a: OperatorArguments, _result: TensorType) -> Term:
    return views.cut(terms, a["self"], a["dim"], a["start"], a["end"], a["step"])


@rule("views", "t")
def _t(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    return views.permute(terms, a["self"], range(len(result.shape))[::-1])


@rule("views", "transpose")
def _transpose(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    order = list(range(len(result.shape)))
    if order:
        order[a["dim0"]], order[a["dim1"]] = order[a["dim1"]], order[a["dim0"]]
    return views.permute(terms, a["self"], order)


@rule("views", "permute")
def _permute(terms: Terms, a: OperatorArguments, _result: TensorType) -> Term:
    return views.permute(terms, a["self"], a["dims"])


@rule("views", "view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze")
def _reshape(terms: Terms, a: OperatorArguments, result: TensorType) -> Term | None:
    if a["self"].dtype != result.dtype:  # a view of the bytes as another dtype
        return None
    return views.reshape(terms, a["self"], result.shape)


@rule("views", "expand")
def _expand(terms: Terms, a: OperatorArguments, result: TensorType) -> Term:
    return views.expand(terms, a["self"], result.shape)


@rule("copies", "clone", "alias", "detach", "lift_fresh_copy")
def _same(_terms: Terms, a: OperatorArguments, _result: TensorType) -> Term:
    x: Term = a["self"]
    return x


@rule("copies", "repeat", makes="repeat")
def _repeat(terms: Terms, a: OperatorArguments, result: TensorType) -> Term | None:
    return views.reshape(terms, a["self"], result.shape) if all(count == 1 for count in a["repeats"]) else None


@rule("copies", "copy")
def _copy(terms: Terms, a: OperatorArguments, result: TensorType) -> Term | None:
    return _written(terms, a["src"], result)


@rule("copies", "slice_scatter", makes="slice_scatter")
def _slice_scatter(terms: Terms, a: OperatorArguments, result: TensorType) -> Term | None:
    size, step = result.shape[a["dim"]], a["step"]
    start, end, _ = slice(a["start"], a["end"]).indices(size)
    return _written(terms, a["src"], result) if (start, end, step) == (0, size, 1) else None


@rule("copies", "flip", makes="flip")
def _flip(_terms: Terms, a: OperatorArguments, result: TensorType) -> Term | None:
    x: Term = a["self"]
    return x if all(result.shape[dim] == 1 for dim in a["dims"]) else None


def _written(terms: Terms, source: Term, result: TensorType) -> Term | None:
    """The value of a tensor of type ``result`` after ``source`` was copied into it."""
    if source.type.device != result.device:
        return None
    return views.expand(terms, views.cast(terms, source, result.dtype), result.shape)  # type: ignore[arg-type]  # a result has one


@rule("copies", "_to_copy")
def _to_copy(terms: Terms, a: OperatorArguments, result: TensorType) -> Term | None:
    x: Term = a["self"]
    return views.cast(terms, x, result.dtype) if x.type.device == result.device else None  # type: ignore[arg-type]  # a result has one
