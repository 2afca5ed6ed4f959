"""Recipes of reductions, and of the operators made of them (softmax, norms).

Floats are summed in float64, whatever the element type, and variances are computed in two passes, so that results are
at least as accurate as eager's cascaded sums. Few positive float32 numbers are summed in float32, which is as accurate
as eager, and faster.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch

from fuse.kernel.arithmetic.dtypes import register
from fuse.kernel.arithmetic.expressions import Expression, Operation, fn, select, squared
from fuse.kernel.recipes.registry import Call, Unsupported, apply, convert, recipe
from fuse.kernel.values import Reduce, ReduceOp, Value, expand, view

SUM_DTYPE = torch.float64
FEW = 64
"""Most positive terms that one float32 accumulator adds: the error is a few units in the last place, as in eager."""
FEWEST_LANES = 8
"""Accumulators of a vector loop along the last dimension, each of which adds an eighth of the terms."""


def _dims(value: Value, dims: int | Sequence[int] | None) -> tuple[int, ...]:
    rank = len(value.shape)
    if dims is None or dims == []:
        return tuple(range(rank))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return tuple(sorted(d % rank for d in listed)) if rank else ()


def reduce(value: Value, dims: Sequence[int], op: ReduceOp, dtype: torch.dtype | None = None) -> Value:
    """``op`` over ``dims``, which keep extent 1; the result has ``dtype`` (default: that of ``value``)."""
    dtype = dtype or value.dtype
    if math.prod(value.shape) == 0:
        raise Unsupported("a reduction has no elements")
    shape = tuple(1 if d in dims else extent for d, extent in enumerate(value.shape))
    return Reduce(shape, dtype, value, tuple(dims), op)


def total(value: Value, dims: Sequence[int]) -> Value:
    """The sum in float64 (of floats) or int64 (of integers and bools)."""
    wide = SUM_DTYPE if value.dtype.is_floating_point else torch.int64
    return reduce(convert(value, wide), dims, "sum", wide)


def total_of_positive(value: Value, dims: Sequence[int]) -> Value:
    """The sum of positive floats (NaN and infinity may be among them): in their own dtype if few, else in float64."""
    lanes = FEWEST_LANES if tuple(dims) == (len(value.shape) - 1,) else 1
    few = math.prod(value.shape[d] for d in dims) <= FEW * lanes
    return reduce(value, dims, "sum", value.dtype) if few else total(value, dims)


def mean_of(value: Value, dims: Sequence[int]) -> Value:
    count = math.prod(value.shape[d] for d in dims)
    summed = total(value, dims)
    return apply(operator.truediv, [summed, count], SUM_DTYPE, summed.shape)


def variance_of(value: Value, dims: Sequence[int], mean: Value, correction: float) -> Value:
    """The sum of squared distances from ``mean``, divided by ``n - correction``; the second pass over ``value``."""
    correction = int(correction) if float(correction).is_integer() else correction
    count = math.prod(value.shape[d] for d in dims)
    apart = apply(operator.sub, [convert(value, SUM_DTYPE), mean], SUM_DTYPE, value.shape)
    squares = reduce(apply(squared, [apart], SUM_DTYPE, value.shape), dims, "sum", SUM_DTYPE)
    return apply(operator.truediv, [squares, max(count - correction, 0)], SUM_DTYPE, squares.shape)


def _finished(call: Call, value: Value, part: int = 0) -> Value:
    """``value`` in the dtype and shape of result ``part`` of the call; drops reduced dimensions if the call does."""
    result = call.result[part] if isinstance(call.result, (tuple, list)) else call.result
    return view(convert(value, result.dtype), tuple(result.shape))


@recipe("sum")
def sum_(call: Call) -> Value:
    value = convert(call.tensor("self"), call.dtype)
    dims = _dims(value, call.arguments.get("dim"))
    return _finished(call, reduce(value, dims, "any") if call.dtype is torch.bool else total(value, dims))


@recipe("mean")
def mean(call: Call) -> Value:
    value = convert(call.tensor("self"), call.dtype)
    return _finished(call, mean_of(value, _dims(value, call.arguments.get("dim"))))


@recipe("prod")
def prod(call: Call) -> Value:
    value = convert(call.tensor("self"), call.dtype)
    wide = register(value.dtype)
    return _finished(call, reduce(convert(value, wide), _dims(value, call.arguments.get("dim")), "prod", wide))


@recipe("amax", "amin", "max.default", "min.default", "max", "min")
def extreme(call: Call) -> Value:
    if call.op._overloadname not in ("default", ""):
        raise Unsupported(f"{call.op} has no kernel")
    value = call.tensor("self")
    op: ReduceOp = "max" if "max" in call.op._schema.name else "min"
    return _finished(call, reduce(value, _dims(value, call.arguments.get("dim")), op))


@recipe("max.dim", "min.dim")
def extreme_and_position(call: Call) -> tuple[Value, Value]:
    value = call.tensor("self")
    dims = _dims(value, call["dim"])
    name = "max" if "max" in call.op._schema.name else "min"
    best = reduce(value, dims, "max" if name == "max" else "min")
    position = reduce(value, dims, "argmax" if name == "max" else "argmin", torch.int64)
    return _finished(call, best), _finished(call, position, 1)


@recipe("argmax", "argmin")
def position_of_extreme(call: Call) -> Value:
    value = call.tensor("self")
    op: ReduceOp = "argmax" if "argmax" in call.op._schema.name else "argmin"
    if call["dim"] is None:
        value = view(value, (math.prod(value.shape),))
        return _finished(call, reduce(value, (0,), op, torch.int64))
    if not value.shape:
        raise Unsupported("argmax or argmin is taken of a tensor without dimensions")
    return _finished(call, reduce(value, _dims(value, call["dim"]), op, torch.int64))


@recipe("any", "all")
def truth(call: Call) -> Value:
    value = convert(call.tensor("self"), torch.bool)
    op: ReduceOp = "any" if "any" in call.op._schema.name else "all"
    dim = call.arguments.get("dim")
    dims = () if dim == [] else _dims(value, dim)  # unlike in a sum, an empty list reduces nothing
    return _finished(call, reduce(value, dims, op))


@recipe("var.correction", "var_mean.correction", "std.correction", "std_mean.correction")
def variance(call: Call) -> Value | tuple[Value, Value]:
    value = call.tensor("self")
    dims = _dims(value, call["dim"])
    correction = 1.0 if call["correction"] is None else float(call["correction"])
    mean = mean_of(value, dims)
    spread = variance_of(value, dims, mean, correction)
    name = call.op._schema.name
    if "std" in name:
        spread = apply(fn.sqrt, [spread], SUM_DTYPE, spread.shape)
    if "_mean" in name:
        return _finished(call, spread), _finished(call, mean, 1)
    return _finished(call, spread)


@recipe("linalg_vector_norm", "norm.ScalarOpt_dim", "norm.Scalar")
def vector_norm(call: Call) -> Value:
    value = call.tensor("self")
    order = call.arguments.get("ord", call.arguments.get("p"))
    order = 2.0 if order is None else float(order)
    value = convert(value, call.dtype)
    dims = _dims(value, call.arguments.get("dim"))
    magnitude = apply(fn.abs, [value], value.dtype, value.shape)
    if order == math.inf:
        return _finished(call, reduce(magnitude, dims, "max"))
    if order == 1.0:
        return _finished(call, total(magnitude, dims))
    if order != 2.0:
        raise Unsupported(f"the norm is of order {order:g}")
    squares = apply(squared, [convert(value, SUM_DTYPE)], SUM_DTYPE, value.shape)
    norm = total(squares, dims)
    return _finished(call, apply(fn.sqrt, [norm], SUM_DTYPE, norm.shape))


@recipe("_softmax")
def softmax(call: Call) -> Value:
    value = call.tensor("self")
    _, exponentials, summed = _exponentials(value, call["dim"])
    wide = exponentials.dtype
    return convert(apply(operator.truediv, [exponentials, convert(summed, wide)], wide, value.shape), call.dtype)


@recipe("_safe_softmax")
def safe_softmax(call: Call) -> Value:
    return convert(softmax_or_zeros(call.tensor("self"), call["dim"]), call.dtype)


def softmax_or_zeros(value: Value, dim: int, fewest_for_nan: int = 0) -> Value:
    """A softmax that is zero where all elements are ``-inf``; float32, or float64 for float64.

    Over fewer elements than ``fewest_for_nan``, it is also zero where all are NaN.
    """
    wide = register(value.dtype)
    value, dims = convert(value, wide), _dims(value, dim)
    best = reduce(value, dims, "largest")  # where there is a NaN, the sum is NaN
    shift = apply(lambda x: select(fn.equal(x, -math.inf), 0, x), [best], wide, best.shape)
    exponentials = apply(_exponential, [value, shift], wide, value.shape)
    if fewest_for_nan:
        count = math.prod(value.shape[d] for d in dims)
        exponentials = apply(
            lambda e, best, count: select(fn.equal(best, -math.inf) & (count < fewest_for_nan), 0, e),
            [exponentials, best, count],
            wide,
            value.shape,
        )
    summed = convert(total_of_positive(exponentials, dims), wide)
    return apply(lambda e, total: e / select(fn.equal(total, 0), 1, total), [exponentials, summed], wide, value.shape)


def _exponential(x: Expression, shift: Expression) -> Operation:
    return fn.exp(x - shift)


def _exponentials(value: Value, dim: int) -> tuple[Value, Value, Value]:
    """The maximum over ``dim``, ``exp(x - max)`` and its sum."""
    wide = register(value.dtype)
    value = convert(value, wide)
    dims = _dims(value, dim)
    best = reduce(value, dims, "largest")  # where there is a NaN, the sum is NaN
    exponentials = apply(_exponential, [value, best], wide, value.shape)
    return best, exponentials, total_of_positive(exponentials, dims)


@recipe("_log_softmax")
def log_softmax(call: Call) -> Value:
    value = convert(call.tensor("self"), register(call.tensor("self").dtype))
    best, _, summed = _exponentials(value, call["dim"])
    logarithm = apply(fn.log, [convert(summed, value.dtype)], value.dtype, summed.shape)
    shifted = apply(lambda x, best, log: x - best - log, [value, best, logarithm], value.dtype, value.shape)
    return convert(shifted, call.dtype)


@recipe("logsumexp")
def logsumexp(call: Call) -> Value:
    wide = register(call.dtype)
    value = convert(call.tensor("self"), wide)
    dims = _dims(value, call["dim"])
    best = reduce(value, dims, "largest")  # where there is a NaN, the sum is NaN
    shift = apply(lambda x: select(fn.isinf(x), 0, x), [best], wide, best.shape)
    terms = apply(_exponential, [value, shift], wide, value.shape)
    summed = convert(total_of_positive(terms, dims), wide)
    return _finished(call, apply(lambda x, shift: fn.log(x) + shift, [summed, shift], wide, summed.shape))


def _normalised(value: Value, mean: Value, reciprocal: Value, weight: Value | None, bias: Value | None) -> Value:
    """``(x - mean) * rstd * weight + bias`` in the dtype that kernels compute in; statistics are rounded to it
    first."""
    wide = register(value.dtype)
    result = apply(
        lambda x, mean, reciprocal: (x - mean) * reciprocal,
        [convert(value, wide), convert(mean, wide), convert(reciprocal, wide)],
        wide,
        value.shape,
    )
    if weight is not None:
        result = apply(operator.mul, [result, convert(weight, wide)], wide, value.shape)
    if bias is not None:
        result = apply(operator.add, [result, convert(bias, wide)], wide, value.shape)
    return result


def _statistics(value: Value, dims: Sequence[int], epsilon: float) -> tuple[Value, Value]:
    """Mean and ``1 / sqrt(var + epsilon)``, in float64."""
    mean = mean_of(value, dims)
    spread = variance_of(value, dims, mean, 0)
    reciprocal = apply(_reciprocal_root, [spread, epsilon], SUM_DTYPE, spread.shape)
    return mean, reciprocal


def _reciprocal_root(variance: Expression, epsilon: Expression) -> Operation:
    return 1 / fn.sqrt(variance + epsilon)


@recipe("native_layer_norm")
def layer_norm(call: Call) -> tuple[Value, Value, Value]:
    value = call.tensor("input")
    dims = range(len(value.shape) - len(call["normalized_shape"]), len(value.shape))
    mean, reciprocal = _statistics(value, tuple(dims), call["eps"])
    result = _normalised(value, mean, reciprocal, call["weight"], call["bias"])
    return convert(result, call.dtype), _finished(call, mean, 1), _finished(call, reciprocal, 2)


@recipe("_fused_rms_norm")
def rms_norm(call: Call) -> tuple[Value, Value]:
    value = call.tensor("input")
    dims = tuple(range(len(value.shape) - len(call["normalized_shape"]), len(value.shape)))
    epsilon = call["eps"] if call["eps"] is not None else torch.finfo(value.dtype).eps
    squares = apply(squared, [convert(value, SUM_DTYPE)], SUM_DTYPE, value.shape)
    mean = mean_of(squares, dims)
    reciprocal = apply(_reciprocal_root, [mean, epsilon], SUM_DTYPE, mean.shape)
    wide = register(value.dtype)
    result = apply(operator.mul, [convert(value, wide), convert(reciprocal, wide)], wide, value.shape)
    if call["weight"] is not None:
        result = apply(operator.mul, [result, convert(call["weight"], wide)], wide, value.shape)
    return convert(result, call.dtype), _finished(call, reciprocal, 1)


@recipe("native_group_norm")
def group_norm(call: Call) -> tuple[Value, Value, Value]:
    value, groups = call.tensor("input"), call["group"]
    batch, channels, *space = value.shape
    grouped = view(value, (batch, groups, math.prod((channels // groups, *space))))
    mean, reciprocal = _statistics(grouped, (2,), call["eps"])
    normalised = view(_normalised(grouped, mean, reciprocal, None, None), value.shape)
    for name, formula in (("weight", operator.mul), ("bias", operator.add)):
        if call[name] is not None:
            per_channel = expand(view(call[name], (channels, *(1 for _ in space))), value.shape)
            normalised = apply(
                formula, [normalised, convert(per_channel, normalised.dtype)], normalised.dtype, value.shape
            )
    return convert(normalised, call.dtype), _finished(call, mean, 1), _finished(call, reciprocal, 2)


@recipe("_native_batch_norm_legit.no_stats", "_native_batch_norm_legit_functional")
def batch_norm_in_training(call: Call) -> tuple[Value, ...]:
    """Batch norm by the mean and variance of each channel of the batch; updates the running ones by ``momentum``."""
    if not call["training"]:
        raise Unsupported("this batch norm uses running statistics, and its operator is the one for training")
    value = call.tensor("input")
    dims = tuple(d for d in range(len(value.shape)) if d != 1)
    mean = mean_of(value, dims)
    spread = variance_of(value, dims, mean, 0)
    reciprocal = apply(_reciprocal_root, [spread, call["eps"]], SUM_DTYPE, spread.shape)
    channels = (value.shape[1],)
    result = _scaled(call, view(mean, channels), view(reciprocal, channels))
    saved = (result, _finished(call, mean, 1), _finished(call, reciprocal, 2))
    if len(call.result) == len(saved):
        return saved
    count = math.prod(value.shape[d] for d in dims)
    unbiased = apply(lambda x, n, less: x * n / less, [spread, count, count - 1], SUM_DTYPE, spread.shape)
    moved = []
    for part, (name, now) in enumerate((("running_mean", mean), ("running_var", unbiased)), len(saved)):
        before = view(convert(call[name], SUM_DTYPE), now.shape)
        args = [now, call["momentum"], before, 1 - call["momentum"]]
        moved.append(_finished(call, apply(_weighted, args, SUM_DTYPE, now.shape), part))
    return (*saved, *moved)


def _weighted(a: Expression, of_a: Expression, b: Expression, of_b: Expression) -> Operation:
    return a * of_a + b * of_b


@recipe("_native_batch_norm_legit_no_training", "native_batch_norm", "_native_batch_norm_legit")
def batch_norm_in_eval(call: Call) -> tuple[Value | None, ...]:
    """Batch norm by the running mean and variance of each channel, in eager's order of operations."""
    if call.arguments.get("training") or call["running_mean"] is None:
        raise Unsupported("this batch norm uses the statistics of the batch, and its operator is the one for inference")
    value = call.tensor("input")
    wide, channels = register(value.dtype), (value.shape[1],)
    reciprocal = apply(_reciprocal_root, [convert(call["running_var"], wide), call["eps"]], wide, channels)
    return _scaled(call, call["running_mean"], reciprocal), *(None for _ in call.result[1:])


def _scaled(call: Call, mean: Value, reciprocal: Value) -> Value:
    """``x * alpha + beta``, rounded once, with ``alpha = weight * reciprocal`` and ``beta = bias - mean * alpha``.

    Not ``(x - mean) * alpha``: where all elements have about the same size, the difference from ``mean`` is rounded by
    the same amount in all of them, which shifts the mean of the result.
    """
    value = call.tensor("input")
    wide, channels = register(value.dtype), (value.shape[1],)
    alpha = convert(reciprocal, wide)
    if call["weight"] is not None:
        alpha = apply(operator.mul, [alpha, convert(call["weight"], wide)], wide, channels)
    beta = apply(lambda mean, alpha: -mean * alpha, [convert(mean, wide), alpha], wide, channels)
    if call["bias"] is not None:
        beta = apply(operator.add, [convert(call["bias"], wide), beta], wide, channels)
    spread = (channels[0], *(1 for _ in value.shape[2:]))
    args = [convert(value, wide), view(alpha, spread), view(beta, spread)]
    return convert(apply(fn.fma, args, wide, value.shape), call.dtype)
