"""Convolutions of all channels of a group at once, as products whose right operand is read from the image.

    conv2d(x, w)[b, o, (y, x)]   =   w[o, (i, v, u)] @ patches(x)[b, (i, v, u), (y, x)]

No matrix of patches is ever in memory (:mod:`fuse.kernel.cpu.windows`), and the weight is read as it lies. Images and
results lie as PyTorch makes them by default: places side by side. A group is an image of its own, with its own weight.

    conv2d(x, w)[b, o, (y, x)]   =   patches(x)[b, (y, x), (v, u, i)] @ w[(v, u, i), o]

where the channels of the result lie side by side (``torch.channels_last``, :mod:`fuse.kernel.cpu.channels_last`): then
the weight is what is read a vector at a time.
"""

from __future__ import annotations

import math
import operator

import torch

from fuse.kernel.convolutions import Window
from fuse.kernel.recipes import Call, Unsupported, apply, convert
from fuse.kernel.values import Patches, PatchRows, Product, Value, permute, view


def dense(call: Call) -> Value:
    """The value of a convolution in one or two dimensions.

    Raises:
        Unsupported: any other.
    """
    x, weight, groups = call.tensor("input"), call.tensor("weight"), call["groups"]
    if len(x.shape) != len(weight.shape) or len(x.shape) not in (3, 4):
        raise Unsupported("only convolutions of batches in one or two dimensions have a kernel")
    if call.dtype not in (torch.float32, torch.float64):
        raise Unsupported(f"convolutions of {call.dtype} are left to the library")
    window = Window.of(call.arguments, len(x.shape) - 2)
    if not call.result.is_contiguous():
        return added(call, channels_last(call, x, weight, window))
    batch, outputs, *places = call.shape
    taps = weight.shape[2:]
    stride, padding, dilation = window.stride, window.padding, window.dilation
    if len(places) == 1:
        x = view(x, (*x.shape[:2], 1, x.shape[2]))
        taps, places = (1, *taps), [1, *places]
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    each, depth = outputs // groups, math.prod(weight.shape[1:])
    weights = view(weight, (outputs, depth))
    if groups > 1:
        x = view(x, (batch * groups, weight.shape[1], *x.shape[2:]))
        weights = view(weight, (groups, each, depth))
    shape = (batch * groups, depth, math.prod(places))
    right = Patches(shape, x.dtype, x, *map(_pair, (taps, tuple(places), stride, padding, dilation)))
    return added(call, view(Product((batch * groups, each, shape[2]), call.dtype, weights, right), call.shape))


def channels_last(call: Call, x: Value, weight: Value, window: Window) -> Value:
    """The value of a convolution, but for its bias, whose result's channels lie side by side.

    Raises:
        Unsupported: groups, and results laid out in any other way.
    """
    if call["groups"] > 1:
        raise Unsupported("convolutions in groups whose channels lie side by side are left to the library")
    if len(x.shape) != 4 or not call.result.is_contiguous(memory_format=torch.channels_last):
        raise Unsupported("the result of a convolution lies in no usual order")
    (batch, _, *_), (outputs, channels, *taps), places = x.shape, weight.shape, call.shape[2:]
    depth = math.prod(taps) * channels
    shape = (batch, math.prod(places), depth)
    numbers = (tuple(taps), tuple(places), window.stride, window.padding, window.dilation)
    left = PatchRows(shape, x.dtype, x, *map(_pair, numbers))
    right = view(permute(weight, (2, 3, 1, 0)), (depth, outputs))
    product = Product((batch, shape[1], outputs), call.dtype, left, right)
    return view(permute(product, (0, 2, 1)), call.shape)


def added(call: Call, result: Value) -> Value:
    """``result`` plus the bias of the convolution, if it has one."""
    if (bias := call["bias"]) is None:
        return result
    column = convert(view(bias, (*bias.shape, *(1 for _ in call.shape[2:]))), call.dtype)
    return apply(operator.add, [result, column], call.dtype, call.shape)


def _pair(numbers: tuple[int, ...]) -> tuple[int, int]:
    first, second = numbers
    return first, second
