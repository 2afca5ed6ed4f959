"""Recipe of short convolutions along one dimension, each channel on its own: a few products an element.

    conv1d(x, w, bias, groups=channels)[b, c, t]   =   bias[c] + x[b, c, t] w[c, 0] + x[b, c, t + 1] w[c, 1] + ...

They stand in front of state-space models and linear attention. As elementwise work they join the kernel of what
follows; a library would first bring the input into a layout of its own. All others are products
(:mod:`fuse.kernel.dense_convolutions`), or stay library calls.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fuse.kernel.convolutions import Window
from fuse.kernel.dense_convolutions import dense
from fuse.kernel.expressions import fn
from fuse.kernel.extents import pinned
from fuse.kernel.index import Index
from fuse.kernel.recipes import Call, Number, apply, convert, recipe
from fuse.kernel.values import Pad, Reindex, Value, view

MOST_TAPS = 4


@recipe("convolution")
def convolution(call: Call) -> Value:
    x, weight, bias = call.tensor("input"), call.tensor("weight"), call["bias"]
    alone = len(x.shape) == 3 and tuple(weight.shape[:2]) == (x.shape[1], 1) and call["groups"] == x.shape[1]
    if not alone or weight.shape[2] > MOST_TAPS or not call.dtype.is_floating_point:
        return dense(call)
    window = Window.of(call.arguments, 1)
    (padding,) = window.padding
    padded = Pad((*x.shape[:2], x.shape[2] + 2 * padding), x.dtype, x, (0, 0, padding), 0) if padding else x
    wide = torch.float64 if call.dtype == torch.float64 else torch.float32
    result: Value | Number = 0 if bias is None else convert(view(bias, (1, x.shape[1], 1)), wide)
    for tap in range(pinned(weight.shape[2])):
        operands = [_moved(padded, call.shape, window, tap), _factor(weight, tap)]
        result = apply(fn.fma, [*(convert(o, wide) for o in operands), result], wide, call.shape)
    assert isinstance(result, Value)
    return convert(result, call.dtype)


def _moved(x: Value, shape: tuple[int, ...], window: Window, tap: int) -> Value:
    """Elements that one tap reads, for every element of the result."""
    (stride,), (dilation,) = window.stride, window.dilation

    def where(index: Index, extents: Mapping[str, int]) -> Index:
        return (index[0], index[1], index[2] * stride + tap * dilation)

    return Reindex(shape, x.dtype, x, where)


def _factor(weight: Value, tap: int) -> Value:
    """The weight of one tap, a number for each channel."""

    def where(index: Index, extents: Mapping[str, int]) -> Index:
        return (index[1], index[0], index[2] + tap)

    return Reindex((1, weight.shape[0], 1), weight.dtype, weight, where)
