"""Recipes of pooling over small windows, as elementwise operators with one load for each tap of the window.

    max_pool2d(x, 2)[b, c, y, x]   =   maximum(maximum(maximum(x[b, c, 2y, 2x], x[b, c, 2y, 2x + 1]), ...), ...)

A pool joins the kernel of its readers, and of cheap operators before it. Overlapping windows read tensors in memory
only, because they would compute their operands several times. Positions of the maxima, larger windows and divisors that
differ at the border are left to PyTorch.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fuse.kernel.arithmetic.dtypes import register
from fuse.kernel.arithmetic.expressions import fn
from fuse.kernel.arithmetic.extents import pinned
from fuse.kernel.arithmetic.index import Index
from fuse.kernel.recipes.convolutions import Window
from fuse.kernel.recipes.registry import Call, Unsupported, apply, convert, recipe
from fuse.kernel.values import Input, Pad, Reindex, Value

MOST_TAPS = 16
"""Most taps of a window; each is a load in the source."""


@dataclass(frozen=True)
class _Pool(Window):
    """A pooling window over the last dimensions, with its taps and the number of results in each of them.

    ``ceil_mode``: the last window may end behind the padding.
    """

    taps: tuple[int, ...]
    output_size: tuple[int, ...]
    ceil_mode: bool = False

    def reach(self, space: Sequence[int]) -> tuple[int, ...]:
        """Elements that an input of this size spans in each dimension, with its padding and all windows."""
        padded = tuple(n + 2 * p for n, p in zip(space, self.padding, strict=True))
        if not self.ceil_mode:  # a comparison would hold for some remainders of sizes only
            return padded
        steps = zip(padded, self.output_size, self.stride, self.taps, self.dilation, strict=True)
        return tuple(max(n, (p - 1) * s + (t - 1) * d + 1) for n, p, s, t, d in steps)

    def overlaps(self) -> bool:
        return any((t - 1) * d >= s for t, d, s in zip(self.taps, self.dilation, self.stride, strict=True))


@recipe("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool(call: Call) -> tuple[Value | None, ...]:
    """The maxima, NaN for a window with a NaN; the positions of the maxima have no kernel."""
    x = call.tensor("self")
    lowest = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    pool = _pool(call, tuple(call.result[0].shape), call["dilation"])
    result, *others = _read(x, pool, lowest)
    for other in others:
        result = apply(fn.maximum, [result, other], x.dtype, result.shape)
    return result, None


@recipe("avg_pool2d", "avg_pool3d")
def average_pool(call: Call) -> Value:
    """Means of windows that all have the same divisor."""
    x = call.tensor("self")
    pool = _pool(call, call.shape, 1)
    space = x.shape[len(x.shape) - len(pool.taps) :]
    inside = all(r <= n + 2 * p for r, n, p in zip(pool.reach(space), space, pool.padding, strict=True))
    if call["divisor_override"] is not None:
        return _mean(call, pool, call["divisor_override"])
    if not inside or (any(pool.padding) and not call["count_include_pad"]):
        raise Unsupported("the average pool divides by another number at the border")
    return _mean(call, pool, math.prod(pool.taps))


@recipe("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def adaptive_average_pool(call: Call) -> Value:
    """Means of adjacent windows that all have one size."""
    x = call.tensor("self")
    sizes = tuple(call["output_size"])
    space = x.shape[len(x.shape) - len(sizes) :]
    if 0 in sizes or any(extent % size for extent, size in zip(space, sizes, strict=True)):
        raise Unsupported("the adaptive pool has windows of several sizes")
    taps = tuple(extent // size for extent, size in zip(space, sizes, strict=True))
    return _mean(call, _Pool(taps, (0,) * len(taps), (1,) * len(taps), taps, sizes), math.prod(taps))


def _pool(call: Call, shape: Sequence[int], dilation: int | Sequence[int]) -> _Pool:
    taps: Sequence[int] = call["kernel_size"]
    rank = int(call.op._schema.name.partition("_pool")[2][0])

    def each(given: int | Sequence[int]) -> tuple[int, ...]:
        numbers = (given,) if isinstance(given, int) else tuple(given)
        return numbers if len(numbers) == rank else (numbers[0],) * rank

    stride = call["stride"] or taps
    output_size = tuple(shape[-rank:])
    return _Pool(each(stride), each(call["padding"]), each(dilation), each(taps), output_size, call["ceil_mode"])


def _mean(call: Call, pool: _Pool, count: int) -> Value:
    x = call.tensor("self")
    if not x.dtype.is_floating_point:
        raise Unsupported(f"the pool takes means of {x.dtype}")
    wide = register(x.dtype)
    result, *others = (convert(tap, wide) for tap in _read(x, pool, 0))
    for other in others:
        result = apply(operator.add, [result, other], wide, result.shape)
    return convert(apply(operator.truediv, [result, float(count)], wide, result.shape), call.dtype)


def _read(x: Value, pool: _Pool, fill: int | float) -> list[Value]:
    """For each tap, in order, the elements that it reads, in the shape of the result; ``fill`` in the padding.

    Raises:
        Unsupported: a large window, or overlapping windows over a value that the kernel computes.
    """
    if math.prod(pool.taps) > MOST_TAPS:
        raise Unsupported(f"the pool has windows of more than {MOST_TAPS} elements")
    if pool.overlaps() and not isinstance(x, Input):
        raise Unsupported("overlapping windows would compute their inputs several times")
    front = x.shape[: len(x.shape) - len(pool.taps)]
    space = x.shape[len(front) :]
    size = pool.reach(space)
    padded = x if size == space else Pad((*front, *size), x.dtype, x, (*(0 for _ in front), *pool.padding), fill)
    shape = (*front, *pool.output_size)

    def read(tap: Sequence[int]) -> Value:
        def where(index: Index, extents: Mapping[str, int]) -> Index:
            return (*index[: len(front)], *pool.input_index(index[len(front) :], tap))

        return Reindex(shape, x.dtype, padded, where)

    return [read(tap) for tap in itertools.product(*(range(pinned(taps)) for taps in pool.taps))]
