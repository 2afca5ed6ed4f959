"""Recipes of elementwise operators: one line of C++ each.

Types follow eager: an operator is computed in the dtype of its result (comparisons in the promoted dtype of their
arguments), halves in float with one rounding after it, integers wrap around. ``+ - * /`` and comparisons give eager's
very bits.
"""

from __future__ import annotations

import torch

from fuse import ops
from fuse.kernel import ctypes
from fuse.kernel.recipes import Call, Number, Recipe, Unsupported, apply, convert, recipe, rounded
from fuse.kernel.values import Constant, Map, Value, expand

TRANSCENDENTAL = ops.TRANSCENDENTAL_WEIGHT

_UNARY = {  # ATen name: template. Computed in the result's dtype.
    "abs": "fuse_abs({0})",
    "ceil": "fuse_ceil({0})",
    "floor": "fuse_floor({0})",
    "hardsigmoid": "fuse_hardsigmoid({0})",
    "hardswish": "fuse_hardswish({0})",
    "reciprocal": "fuse_reciprocal({0})",
    "relu": "fuse_relu({0})",
    "relu6": "fuse_clamp({0}, 0, 6)",
    "round.default": "fuse_round({0})",
    "sgn": "fuse_sign({0})",
    "sign": "fuse_sign({0})",
    "sqrt": "fuse_sqrt({0})",
    "rsqrt": "fuse_rsqrt({0})",
    "trunc": "fuse_trunc({0})",
    "frac": "fuse_frac({0})",
}
_TRANSCENDENTAL = """
    acos acosh asin asinh atan atanh cos cosh erf erfc exp exp2 expm1 log log10 log1p log2 mish sigmoid silu sin sinh
    tan tanh
"""
_TESTS = {"isnan": "fuse_isnan({0})", "isinf": "fuse_isinf({0})", "isfinite": "fuse_isfinite({0})"}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BITWISE = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
_LOGICAL = {"logical_and": "&&", "logical_or": "||", "logical_xor": "!="}
_BINARY = {
    "maximum": "fuse_maximum({0}, {1})",
    "minimum": "fuse_minimum({0}, {1})",
    "fmax": "fuse_fmax({0}, {1})",
    "fmin": "fuse_fmin({0}, {1})",
    "copysign": "fuse_copysign({0}, {1})",
    "atan2": "fuse_atan2({0}, {1})",
    "hypot": "__builtin_hypot({0}, {1})",
}


def _unary(template: str, cost: int = 1) -> Recipe:
    return lambda call: call.map(template, "self", cost=cost)


def _binary(template: str) -> Recipe:
    return lambda call: call.map(template, "self", "other")


def _comparison(symbol: str) -> Recipe:
    return lambda call: _compare(call, f"({{0}} {symbol} {{1}})")


def _compare(call: Call, template: str) -> Value:
    compute = _promoted(call["self"], call["other"])
    return apply_test(template, [call["self"], call["other"]], compute, call.shape)


def apply_test(template: str, args: list[Value | Number], compute: torch.dtype, shape: tuple[int, ...]) -> Value:
    """A map whose arguments have dtype ``compute`` and whose result is bool.

    Here numbers are rounded to a half too: eager finds a half equal to 0.1 when it is the half nearest to 0.1.
    """
    wide = torch.float32 if compute in ctypes.HALVES else compute
    operands = [convert(a, compute) if isinstance(a, Value) else rounded(a, compute) for a in args]
    value = apply(template, operands, wide, shape)
    assert isinstance(value, Map)
    return Map(shape, torch.bool, template, value.args)


def _promoted(*args: Value | Number) -> torch.dtype:
    """torch's promotion of tensors and Python numbers (a 0-dimensional tensor counts less than a larger one)."""
    stand_ins = [
        torch.empty((1,) * len(a.shape), dtype=a.dtype, device="meta") if isinstance(a, Value) else a for a in args
    ]
    dtype = torch.result_type(stand_ins[0], stand_ins[1])
    for extra in stand_ins[2:]:
        dtype = torch.result_type(torch.empty((1,), dtype=dtype, device="meta"), extra)
    return dtype


for _name, _template in _UNARY.items():
    recipe(_name)(_unary(_template))
for _name in _TRANSCENDENTAL.split():
    recipe(_name)(_unary(f"fuse_{_name}({{0}})", TRANSCENDENTAL))
for _name, _template in _BINARY.items():
    recipe(_name)(_binary(_template))
for _name, _symbol in _COMPARISONS.items():
    recipe(_name)(_comparison(_symbol))
for _name, _symbol in _BITWISE.items():
    recipe(_name)(_binary(f"({{0}} {_symbol} {{1}})"))
for _name, _symbol in _LOGICAL.items():
    recipe(_name)(lambda call, s=_symbol: call.map(f"({{0}} {s} {{1}})", "self", "other", compute=torch.bool))
for _name, _template in _TESTS.items():
    recipe(_name)(lambda call, t=_template: apply_test(t, [call["self"]], call["self"].dtype, call.shape))


def arithmetic(symbol: str, dtype: torch.dtype) -> str:
    """``+``, ``-`` or ``*``; integers wrap around (through unsigned, since signed overflow is undefined in C++)."""
    if dtype is torch.bool:
        return {"+": "({0} || {1})", "*": "({0} && {1})"}[symbol]
    if dtype.is_floating_point:
        return f"({{0}} {symbol} {{1}})"
    ctype = ctypes.register(dtype)
    return f"{ctype}(uint64_t({{0}}) {symbol} uint64_t({{1}}))"


def _sum(call: Call, symbol: str, first: str, second: str) -> Value:
    """``first + alpha * second`` (or ``-``); of float and double with one rounding, as eager has it."""
    alpha = call["alpha"]
    if alpha == 1:
        return call.map(arithmetic(symbol, call.dtype), first, second)
    if call.dtype.is_floating_point:
        factor = rounded(alpha if symbol == "+" else -alpha, call.dtype)
        template = "({0} + {2} * {1})" if call.dtype in ctypes.HALVES else "fuse_fma({1}, {2}, {0})"
        return call.map(template, first, second, factor)
    scaled = apply(arithmetic("*", call.dtype), [call[second], alpha], call.dtype, call.shape)
    return call.map(arithmetic(symbol, call.dtype), first, scaled)


@recipe("logaddexp")
def logaddexp(call: Call) -> Value:
    return call.map("fuse_logaddexp({0}, {1})", "self", "other", cost=2 * TRANSCENDENTAL)


@recipe("add")
def add(call: Call) -> Value:
    return _sum(call, "+", "self", "other")


@recipe("sub")
def sub(call: Call) -> Value:
    return _sum(call, "-", "self", "other")


@recipe("rsub")
def rsub(call: Call) -> Value:
    return _sum(call, "-", "other", "self")


@recipe("mul")
def mul(call: Call) -> Value:
    return call.map(arithmetic("*", call.dtype), "self", call["other"])


@recipe("div")
def div(call: Call) -> Value:
    mode = call.arguments.get("rounding_mode")
    if not call.dtype.is_floating_point:
        raise Unsupported("integer division may trap")
    if mode is None:
        return call.map("({0} / {1})", "self", call["other"])
    return call.map({"floor": "fuse_floor_divide({0}, {1})", "trunc": "fuse_trunc({0} / {1})"}[mode], "self", "other")


@recipe("floor_divide", "remainder.Tensor", "remainder.Scalar", "fmod")
def divide_by_rounding(call: Call) -> Value:
    name = call.op._schema.name.split("::")[1]
    divisor = call["other"]
    if not call.dtype.is_floating_point and (isinstance(divisor, Value) or divisor in (0, -1)):
        raise Unsupported("integer division may trap")
    return call.map(f"fuse_{name}({{0}}, {{1}})", "self", "other")


@recipe("neg")
def neg(call: Call) -> Value:
    return call.map("(-{0})" if call.dtype.is_floating_point else arithmetic("-", call.dtype), *_negated(call))


def _negated(call: Call) -> tuple[str | Number, ...]:
    return ("self",) if call.dtype.is_floating_point else (0, "self")


@recipe("square")
def square(call: Call) -> Value:
    return call.map(arithmetic("*", call.dtype), "self", "self")


@recipe("pow.Tensor_Scalar")
def power(call: Call) -> Value:
    """Eager's own special cases (none in float16) keep its bits; other exponents call ``pow``."""
    exponent = float(call["exponent"])
    if not call.dtype.is_floating_point:
        if exponent != 2:
            raise Unsupported("an integer power")
        return square(call)
    if call.dtype is torch.float16:
        return call.map("fuse_pow({0}, {1})", "self", exponent, cost=TRANSCENDENTAL)
    simple = {0.5: "fuse_sqrt({0})", 2.0: "({0} * {0})", 3.0: "({0} * {0} * {0})", -0.5: "fuse_rsqrt({0})"}
    simple |= {-1.0: "fuse_reciprocal({0})", -2.0: "fuse_reciprocal({0} * {0})"}
    if template := simple.get(exponent):
        return call.map(template, "self")
    return call.map("fuse_pow({0}, {1})", "self", exponent, cost=TRANSCENDENTAL)


@recipe("pow.Tensor_Tensor", "pow.Scalar")
def power_of_tensors(call: Call) -> Value:
    if not call.dtype.is_floating_point:
        raise Unsupported("an integer power")
    return call.map("fuse_pow({0}, {1})", "self", "exponent", cost=TRANSCENDENTAL)


@recipe("bitwise_not")
def bitwise_not(call: Call) -> Value:
    return call.map("!{0}" if call.dtype is torch.bool else "~{0}", "self")


@recipe("logical_not")
def logical_not(call: Call) -> Value:
    return call.map("!{0}", "self", compute=torch.bool)


@recipe("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(call: Call) -> Value:
    return choose(call, call.tensor("condition"), call["self"], call["other"])


@recipe("masked_fill")
def masked_fill(call: Call) -> Value:
    return choose(call, call.tensor("mask"), call["value"], call["self"])


def choose(call: Call, condition: Value, yes: Value | Number, no: Value | Number) -> Value:
    """``condition ? yes : no`` in the result's dtype."""
    dtype, shape = call.dtype, call.shape
    branches = [
        expand(convert(v, dtype), shape) if isinstance(v, Value) else convert(Constant(shape, _wide(dtype), v), dtype)
        for v in (yes, no)
    ]
    return Map(shape, dtype, "({0} ? {1} : {2})", (expand(convert(condition, torch.bool), shape), *branches))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in ctypes.HALVES else dtype


_AT_LEAST = "fuse_maximum({1}, {0})"  # of two equal numbers the second is taken: self, whatever the sign of its zero
_AT_MOST = "fuse_minimum({1}, {0})"


@recipe("clamp", "clip", "hardtanh")
def clamp(call: Call) -> Value:
    low = call["min"] if "min" in call.arguments else call["min_val"]
    high = call["max"] if "max" in call.arguments else call["max_val"]
    if low is None and high is None:
        return call.map("{0}", "self")
    if low is None:
        return call.map(_AT_MOST, "self", high)
    if high is None:
        return call.map(_AT_LEAST, "self", low)
    return call.map("fuse_clamp({0}, {1}, {2})", "self", low, high)


@recipe("clamp_min")
def clamp_min(call: Call) -> Value:
    return call.map(_AT_LEAST, "self", "min")


@recipe("clamp_max")
def clamp_max(call: Call) -> Value:
    return call.map(_AT_MOST, "self", "max")


@recipe("gelu")
def gelu(call: Call) -> Value:
    name = "fuse_gelu_tanh" if call["approximate"] == "tanh" else "fuse_gelu"
    return call.map(f"{name}({{0}})", "self", cost=TRANSCENDENTAL)


@recipe("leaky_relu")
def leaky_relu(call: Call) -> Value:
    return call.map("fuse_leaky_relu({0}, {1})", "self", "negative_slope")


@recipe("elu")
def elu(call: Call) -> Value:
    return call.map("fuse_elu({0}, {1}, {2}, {3})", "self", "alpha", "scale", "input_scale", cost=TRANSCENDENTAL)


@recipe("celu")
def celu(call: Call) -> Value:
    return call.map("fuse_elu({0}, {1}, 1, {2})", "self", call["alpha"], 1 / call["alpha"], cost=TRANSCENDENTAL)


@recipe("softplus")
def softplus(call: Call) -> Value:
    return call.map("fuse_softplus({0}, {1}, {2})", "self", "beta", "threshold", cost=TRANSCENDENTAL)


@recipe("log_sigmoid_forward")
def log_sigmoid(call: Call) -> tuple[Value, Value]:
    """The second result is what eager keeps for the gradient."""
    kept = call.map("fuse_exp(-fuse_abs({0}))", "self", cost=TRANSCENDENTAL)
    return call.map("fuse_logsigmoid({0})", "self", cost=TRANSCENDENTAL), kept


@recipe("threshold")
def threshold(call: Call) -> Value:
    return call.map("({0} <= {1} ? {2} : {0})", "self", "threshold", "value")


@recipe("sigmoid_backward")
def sigmoid_backward(call: Call) -> Value:
    return call.map("({0} * (1 - {1}) * {1})", "grad_output", "output")


@recipe("tanh_backward")
def tanh_backward(call: Call) -> Value:
    return call.map("({0} * (1 - {1} * {1}))", "grad_output", "output")


@recipe("threshold_backward")
def threshold_backward(call: Call) -> Value:
    return call.map("({1} <= {2} ? 0 : {0})", "grad_output", "self", "threshold")


@recipe("addcmul")
def addcmul(call: Call) -> Value:
    return call.map("({0} + {1} * {2} * {3})", "self", "value", "tensor1", "tensor2")


@recipe("addcdiv")
def addcdiv(call: Call) -> Value:
    if not call.dtype.is_floating_point:
        raise Unsupported("integer division may trap")
    return call.map("({0} + {1} * {2} / {3})", "self", "value", "tensor1", "tensor2")


@recipe("lerp")
def lerp(call: Call) -> Value:
    template = "(fuse_abs({2}) < 0.5f ? {0} + {2} * ({1} - {0}) : {1} - ({1} - {0}) * (1 - {2}))"
    return call.map(template, "self", "end", "weight")


@recipe("nan_to_num")
def nan_to_num(call: Call) -> Value:
    if not call.dtype.is_floating_point:
        return call.map("{0}", "self")
    limits = torch.finfo(call.dtype)
    nan = call["nan"] if call["nan"] is not None else 0.0
    high = call["posinf"] if call["posinf"] is not None else limits.max
    low = call["neginf"] if call["neginf"] is not None else limits.min
    template = "(fuse_isnan({0}) ? {1} : fuse_isinf({0}) ? ({0} > 0 ? {2} : {3}) : {0})"
    return call.map(template, "self", nan, high, low)


@recipe("_to_copy", "clone", "alias_copy", "detach_copy", "lift_fresh_copy")
def to_copy(call: Call) -> Value:
    """A copy in another dtype or layout; the layout is the business of the store."""
    value = call.tensor("self")
    copied = convert(value, call.dtype)
    return copied if copied is not value else apply_identity(value)


@recipe("copy")
def copy(call: Call) -> Value:
    """``self.copy_(src)`` as a value: ``src`` in the dtype, shape and layout of ``self``."""
    return expand(convert(call.tensor("src"), call.dtype), call.shape)


def apply_identity(value: Value) -> Value:
    return Map(value.shape, value.dtype, "{0}", (value,), 0)
