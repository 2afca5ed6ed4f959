"""Convolutions of all channels of a group at once, as products whose right operand is read from the image.

    conv2d(x, w)[b, o, (y, x)]   =   w[o, (i, v, u)] @ patches(x)[b, (i, v, u), (y, x)]

No matrix of patches is ever in memory (:mod:`fuse.kernel.windows`), and the weight is read as it lies. Images and
results lie as PyTorch makes them by default: places side by side. A group is an image of its own, with its own weight.
"""

from __future__ import annotations

import math

import torch

from fuse.kernel.convolutions import Window
from fuse.kernel.elementwise import arithmetic
from fuse.kernel.recipes import Call, Unsupported, apply, convert
from fuse.kernel.values import Patches, Product, Value, view


def dense(call: Call) -> Value:
    """The value of a convolution in one or two dimensions.

    Raises:
        Unsupported: any other.
    """
    x, weight, bias, groups = call.tensor("input"), call.tensor("weight"), call["bias"], call["groups"]
    if len(x.shape) != len(weight.shape) or len(x.shape) not in (3, 4):
        raise Unsupported("only convolutions of batches in one or two dimensions have a kernel")
    if call.dtype not in (torch.float32, torch.float64):
        raise Unsupported(f"convolutions of {call.dtype} are left to the library")
    if not call.result.is_contiguous():
        raise Unsupported("convolutions of images whose channels lie side by side are left to the library")
    window = Window.of(call.arguments, len(x.shape) - 2)
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
    result = view(Product((batch * groups, each, shape[2]), call.dtype, weights, right), call.shape)
    if bias is None:
        return result
    column = convert(view(bias, (outputs, *(1 for _ in call.shape[2:]))), call.dtype)
    return apply(arithmetic("+", call.dtype), [result, column], call.dtype, call.shape)


def _pair(numbers: tuple[int, ...]) -> tuple[int, int]:
    first, second = numbers
    return first, second
