"""Recipes of elementwise operators: one line each.

Types follow eager: an operator is computed in the dtype of its result (comparisons in the promoted dtype of their
arguments). bfloat16 and float16 are computed in float32 and rounded once. Integers wrap around. ``+ - * /`` and
comparisons are bit-identical to eager.
"""

from __future__ import annotations

import operator

import torch

from fuse.kernel.arithmetic.dtypes import HALVES, register
from fuse.kernel.arithmetic.expressions import (
    Expression,
    Literal,
    Operation,
    Parameter,
    both,
    converted,
    fn,
    select,
    squared,
)
from fuse.kernel.recipes.registry import (
    Call,
    Formula,
    Number,
    Recipe,
    Unsupported,
    apply,
    choice,
    convert,
    recipe,
    rounded,
)
from fuse.kernel.values import Constant, Map, Value, expand

_UNARY = """
    abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc exp exp2 expm1 floor frac hardsigmoid hardswish log
    log10 log1p log2 mish reciprocal relu rsqrt sigmoid sign silu sin sinh sqrt tan tanh trunc
"""
_BINARY = "atan2 copysign fmax fmin hypot logaddexp maximum minimum"
_TESTS = "isfinite isinf isnan"
_COMPARISONS: dict[str, Formula] = {
    "eq": fn.equal,
    "ne": fn.unequal,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_BITWISE: dict[str, Formula] = {
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
}
_LOGICAL: dict[str, Formula] = {"logical_and": operator.and_, "logical_or": operator.or_, "logical_xor": fn.unequal}
"""Formulas on bools. Not ``&&`` and ``||``: compilers make them branches, and do not vectorise stores of their
result."""


def _unary(formula: Formula) -> Recipe:
    return lambda call: call.map(formula, "self")


def _binary(formula: Formula) -> Recipe:
    return lambda call: call.map(formula, "self", "other")


def _test(formula: Formula) -> Recipe:
    return lambda call: apply_test(formula, [call["self"]], call["self"].dtype, call.shape)


def _comparison(formula: Formula) -> Recipe:
    return lambda call: _compare(call, formula)


def _compare(call: Call, formula: Formula) -> Value:
    compute = _promoted(call["self"], call["other"])
    return apply_test(formula, [call["self"], call["other"]], compute, call.shape)


def apply_test(formula: Formula, args: list[Value | Number], compute: torch.dtype, shape: tuple[int, ...]) -> Value:
    """A map whose arguments have dtype ``compute`` and whose result is bool.

    Python numbers are rounded to bfloat16 or float16 too: eager finds a tensor element equal to 0.1 where it is the
    number of its dtype that is nearest to 0.1.
    """
    operands = [convert(a, compute) if isinstance(a, Value) else rounded(a, compute) for a in args]
    return apply(formula, operands, register(compute), shape)


def _promoted(*args: Value | Number) -> torch.dtype:
    """torch's promotion of tensors and Python numbers (a 0-dimensional tensor counts less than a larger one)."""
    stand_ins = [
        torch.empty((1,) * len(a.shape), dtype=a.dtype, device="meta") if isinstance(a, Value) else a for a in args
    ]
    dtype = torch.result_type(stand_ins[0], stand_ins[1])
    for extra in stand_ins[2:]:
        dtype = torch.result_type(torch.empty((1,), dtype=dtype, device="meta"), extra)
    return dtype


for _name in _UNARY.split():
    recipe(_name)(_unary(getattr(fn, _name)))
for _name in _BINARY.split():
    recipe(_name)(_binary(getattr(fn, _name)))
for _name, _formula in _COMPARISONS.items():
    recipe(_name)(_comparison(_formula))
for _name, _formula in _BITWISE.items():
    recipe(_name)(_binary(_formula))
for _name, _formula in _LOGICAL.items():
    recipe(_name)(lambda call, f=_formula: call.map(f, "self", "other", compute=torch.bool))
for _name in _TESTS.split():
    recipe(_name)(_test(getattr(fn, _name)))
recipe("sgn")(_unary(fn.sign))
recipe("relu6")(_unary(lambda x: fn.clamp(x, 0, 6)))
recipe("round.default")(_unary(fn.round))


def _sum(call: Call, sign: int, first: str, second: str) -> Value:
    """``first + alpha * second`` (or ``-``); float32 and float64 are rounded once, as in eager."""
    alpha, formula = call["alpha"], operator.add if sign > 0 else operator.sub
    if alpha == 1:
        return call.map(formula, first, second)
    if call.dtype in HALVES:
        return call.map(lambda x, y, factor: x + factor * y, first, second, rounded(sign * alpha, call.dtype))
    if call.dtype.is_floating_point:
        return call.map(lambda x, y, factor: fn.fma(y, factor, x), first, second, rounded(sign * alpha, call.dtype))
    scaled = apply(operator.mul, [call[second], alpha], call.dtype, call.shape)
    return call.map(formula, first, scaled)


recipe("add")(lambda call: _sum(call, 1, "self", "other"))
recipe("sub")(lambda call: _sum(call, -1, "self", "other"))
recipe("rsub")(lambda call: _sum(call, -1, "other", "self"))


@recipe("mul")
def mul(call: Call) -> Value:
    return call.map(operator.mul, "self", call.unrounded("other"))


@recipe("div")
def div(call: Call) -> Value:
    mode = call.arguments.get("rounding_mode")
    if not call.dtype.is_floating_point:
        _check_divisor(call)
    if mode is None:
        return call.map(operator.truediv, "self", call.unrounded("other"))
    if mode == "floor":
        return _floor_divide(call)
    if not call.dtype.is_floating_point:
        return call.map(operator.floordiv, "self", "other")  # of expressions, as in C: rounded towards zero
    if _by_number(call):
        return call.map(lambda x, y: fn.trunc(x / y), "self", call.unrounded("other"))
    return call.map(lambda x, y: fn.trunc(converted(x / y, x.dtype, call.dtype)), "self", "other")


@recipe("floor_divide", "remainder.Tensor", "remainder.Scalar", "fmod")
def divide_by_rounding(call: Call) -> Value:
    name = call.op._schema.name.split("::")[1]
    if not call.dtype.is_floating_point:
        _check_divisor(call)
    return _floor_divide(call) if name == "floor_divide" else call.map(getattr(fn, name), "self", "other")


def _check_divisor(call: Call) -> None:
    """Raise Unsupported for integers that are divided by anything but a number that is safe."""
    if isinstance(call["other"], Value) or call["other"] in (0, -1):
        raise Unsupported("an integer division by zero would end the process")


def _by_number(call: Call) -> bool:
    """Whether eager rounds a division once: for any divisor in float32 and wider, for a single number in half
    precision.

    Eager divides a half-precision tensor by another in steps, each rounded to the dtype.
    """
    divisor = call.unrounded("other")
    return call.dtype not in HALVES or not isinstance(divisor, Value) or divisor.shape == ()


def _floor_divide(call: Call) -> Value:
    """``x // y`` of floats as Python defines it: ``(x - x % y) / y``, rounded to a whole number."""
    if _by_number(call):
        return call.map(fn.floor_divide, "self", call.unrounded("other"))

    def rounded_each(x: Expression, y: Expression) -> Expression:
        def half(value: Expression) -> Expression:
            return converted(value, value.dtype, call.dtype)

        rest = half(fn.fmod(x, y))
        exact = half(half(x - rest) / y)
        lower = both(fn.unequal(rest, 0), fn.unequal(y < 0, rest < 0))
        quotient = select(lower, half(exact - 1), exact)
        whole = fn.floor(quotient)
        whole = select(half(quotient - whole) > 0.5, half(whole + 1), whole)
        whole = select(fn.equal(quotient, 0), fn.copysign(Literal(x.dtype, 0.0), x / y), whole)
        return select(fn.equal(y, 0), x / y, whole)

    return call.map(rounded_each, "self", "other")


@recipe("neg")
def neg(call: Call) -> Value:
    return call.map(operator.neg if call.dtype.is_floating_point else lambda x: 0 - x, "self")


@recipe("pow.Tensor_Scalar")
def power(call: Call) -> Value:
    """Exponents that eager computes without ``pow`` are computed as in eager (in float16 there are none)."""
    exponent = float(rounded(call["exponent"], call.dtype) if call.dtype in HALVES else call["exponent"])
    if not call.dtype.is_floating_point:
        if exponent != 2:
            raise Unsupported("integers are raised to a power")
        return call.map(squared, "self")
    simple = _POWERS.get(exponent)
    if simple is None or call.dtype is torch.float16:
        return call.map(fn.pow, "self", exponent)
    return call.map(simple, "self")


_POWERS: dict[float, Formula] = {
    0.5: fn.sqrt,
    2.0: squared,
    3.0: lambda x: x * x * x,
    -0.5: fn.rsqrt,
    -1.0: fn.reciprocal,
    -2.0: lambda x: fn.reciprocal(squared(x)),
}


@recipe("pow.Tensor_Tensor", "pow.Scalar")
def power_of_tensors(call: Call) -> Value:
    if not call.dtype.is_floating_point:
        raise Unsupported("integers are raised to a power")
    return call.map(fn.pow, "self", "exponent")


@recipe("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(call: Call) -> Value:
    return choose(call, call.tensor("condition"), call["self"], call["other"])


@recipe("masked_fill")
def masked_fill(call: Call) -> Value:
    return choose(call, call.tensor("mask"), call["value"], call["self"])


def choose(call: Call, condition: Value, yes: Value | Number, no: Value | Number) -> Value:
    """``condition ? yes : no`` in the result's dtype."""
    dtype, shape = call.dtype, call.shape
    given = (v if isinstance(v, Value) else Constant(shape, register(dtype), v) for v in (yes, no))
    branches = [expand(convert(v, dtype), shape) for v in given]
    return choice(expand(convert(condition, torch.bool), shape), *branches)


def _at_least(x: Expression, low: Expression) -> Operation:
    """``max(low, x)``; of two equal numbers ``maximum`` returns the second, so that ``x`` keeps the sign of its
    zero."""
    return fn.maximum(low, x)


def _at_most(x: Expression, high: Expression) -> Operation:
    return fn.minimum(high, x)


@recipe("clamp", "clip", "hardtanh")
def clamp(call: Call) -> Value:
    low = call["min"] if "min" in call.arguments else call["min_val"]
    high = call["max"] if "max" in call.arguments else call["max_val"]
    if low is None and high is None:
        return call.map(_same, "self")
    if low is None:
        return call.map(_at_most, "self", high)
    if high is None:
        return call.map(_at_least, "self", low)
    return call.map(fn.clamp, "self", low, high)


@recipe("gelu")
def gelu(call: Call) -> Value:
    return call.map(fn.gelu_tanh if call["approximate"] == "tanh" else fn.gelu, "self")


@recipe("celu")
def celu(call: Call) -> Value:
    return call.map(fn.elu, "self", call["alpha"], 1, 1 / call["alpha"])


@recipe("log_sigmoid_forward")
def log_sigmoid(call: Call) -> tuple[Value, Value]:
    """``log(sigmoid(x))``, and ``exp(-|x|)``, which eager saves for the gradient."""
    return call.map(fn.logsigmoid, "self"), call.map(lambda x: fn.exp(-fn.abs(x)), "self")


@recipe("addcdiv")
def addcdiv(call: Call) -> Value:
    if not call.dtype.is_floating_point:
        raise Unsupported("an integer division by zero would end the process")
    return call.map(lambda x, factor, a, b: x + factor * a / b, "self", "value", "tensor1", "tensor2")


def _between(first: Expression, last: Expression, weight: Expression) -> Operation:
    near, far = first + weight * (last - first), last - (last - first) * (1 - weight)
    return select(fn.abs(weight) < 0.5, near, far)


_OF_ARGUMENTS: dict[str, tuple[Formula, str]] = {
    "addcmul": (lambda x, factor, a, b: x + factor * a * b, "self value tensor1 tensor2"),
    "bitwise_not": (operator.invert, "self"),
    "clamp_max": (_at_most, "self max"),
    "clamp_min": (_at_least, "self min"),
    "elu": (fn.elu, "self alpha scale input_scale"),
    "leaky_relu": (fn.leaky_relu, "self negative_slope"),
    "lerp": (_between, "self end weight"),
    "sigmoid_backward": (lambda g, y: g * (1 - y) * y, "grad_output output"),
    "softplus": (fn.softplus, "self beta threshold"),
    "square": (squared, "self"),
    "tanh_backward": (lambda g, y: g * (1 - y * y), "grad_output output"),
    "threshold": (lambda x, bound, value: select(x <= bound, value, x), "self threshold value"),
    "threshold_backward": (lambda g, x, bound: select(x <= bound, 0, g), "grad_output self threshold"),
}
"""By operator: a formula, and the names of the arguments that it takes."""
for _name, (_formula, _arguments) in _OF_ARGUMENTS.items():
    recipe(_name)(lambda call, f=_formula, arguments=_arguments: call.map(f, *arguments.split()))
recipe("logical_not")(lambda call: call.map(operator.invert, "self", compute=torch.bool))


@recipe("nan_to_num")
def nan_to_num(call: Call) -> Value:
    if not call.dtype.is_floating_point:
        return call.map(_same, "self")
    limits = torch.finfo(call.dtype)
    nan = call["nan"] if call["nan"] is not None else 0.0
    high = call["posinf"] if call["posinf"] is not None else limits.max
    low = call["neginf"] if call["neginf"] is not None else limits.min
    return call.map(_finite, "self", nan, high, low)


def _finite(x: Expression, nan: Expression, high: Expression, low: Expression) -> Operation:
    return select(fn.isnan(x), nan, select(fn.isinf(x), select(x > 0, high, low), x))


@recipe("_to_copy", "clone", "alias_copy", "detach_copy", "lift_fresh_copy", "with_gradient_of")
def to_copy(call: Call) -> Value:
    """A copy in another dtype or layout; the layout shows only in the strides of the output."""
    value = call.tensor("self")
    copied = convert(value, call.dtype)
    return copied if copied is not value else apply_identity(value)


@recipe("copy")
def copy(call: Call) -> Value:
    """``self.copy_(src)`` as a value: ``src`` in the dtype, shape and layout of ``self``."""
    return expand(convert(call.tensor("src"), call.dtype), call.shape)


def apply_identity(value: Value) -> Value:
    return Map(value.shape, value.dtype, Parameter(register(value.dtype), 0), (value,))


def _same(x: Expression) -> Expression:
    return x
