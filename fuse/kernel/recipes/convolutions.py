"""Convolutions as matrix products (im2col); short depthwise convolutions as elementwise operators.

Contiguous results (``torch.contiguous_format``):

    conv2d(x, w)[b, o, (y, x)]   =   w[o, (i, v, u)] @ patches(x)[b, (i, v, u), (y, x)]

The matrix of patches is never in memory (:mod:`fuse.kernel.cpu.windows`), and the weight is not packed. Each group is
treated as an image with its own weight.

Windows next to each other, as in the patch embedding of a vision transformer, are rows of the left operand, which are
read in place:

    conv2d(x, w, stride=taps)[b, o, (y, x)]   =   patches(x)[b, (y, x), (i, v, u)] @ w[o, (i, v, u)]^T

Channels-last results (``torch.channels_last``, :mod:`fuse.kernel.cpu.channels_last`), with packed weights that are read
a vector at a time:

    conv2d(x, w)[b, o, (y, x)]   =   patches(x)[b, (y, x), (v, u, i)] @ w[(v, u, i), o]

Depthwise convolutions over time with few taps, as before state-space models and linear attention. They join the kernel
of their readers, where a library would first reorder the input:

    conv1d(x, w, bias, groups=channels)[b, c, t]   =   bias[c] + x[b, c, t] w[c, 0] + x[b, c, t + 1] w[c, 1] + ...

Transposed convolutions, whose taps read an image with zeros between its pixels. The kernel multiplies no zeros
(:mod:`fuse.kernel.cpu.transposed`):

    conv_transpose2d(x, w)[b, o, (y, x)]   =   w[(i, v, u), o]^T @ patches(spread x)[b, (i, v, u), (y, x)]

Convolutions in the step of a loop, where ``patches`` is a value like any other, which reads the padded input once for
every tap:

    conv2d(x, w)[b, o, y, x]   =   patches[b, y, x, (i, u, v)] @ w[o, (i, u, v)]
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fuse.kernel.arithmetic.expressions import fn
from fuse.kernel.arithmetic.extents import estimate, pinned
from fuse.kernel.arithmetic.index import Affine, Index
from fuse.kernel.placement import placement
from fuse.kernel.recipes.registry import Call, Number, Unsupported, apply, convert, recipe
from fuse.kernel.values import (
    Correlation,
    Pad,
    Patches,
    PatchRows,
    Product,
    Reindex,
    SpreadPatches,
    Value,
    permute,
    view,
)

MOST_TAPS = 4
"""Most taps of a convolution that is computed elementwise: each tap is a load and a multiplication of every element."""


Pair = tuple[int, int]
"""A number for ``y`` and one for ``x``."""

FEWEST_IN_ROW = 4
"""Fewest taps in a row of a window for patches that are read in place: each row is a stretch of its own."""
LARGEST_WEIGHT = 256 * 1024
"""Most bytes of any weight of a transposed convolution with a kernel. The kernel packs the weight in each call, and
reads it again for each band of an image; it stays in the L2 cache of one core."""
WEIGHTS_FOR_A_PIXEL = 512
"""Most elements of a larger weight for each pixel of an image. At 334 and 668 the kernel took 0.6 to 0.9 of the
library's time, at 512 the same, at 1152 1.0 to 1.2 times as long (AVX-512 and AVX2, one thread)."""
FEWEST_OUTPUTS = 32
"""Fewest outputs for these patches: outputs are the columns of a tile."""


@dataclass(frozen=True)
class Window:
    """Stride, padding and dilation of a convolution or pool, one number for each spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @staticmethod
    def of(arguments: Mapping[str, object], dimensions: int) -> Window:
        """The window of a call of ``aten.convolution``; a list of one number holds for all ``dimensions``."""

        def each(name: str) -> tuple[int, ...]:
            given: Sequence[int] = arguments[name]  # type: ignore[assignment]  # as the schema says
            return tuple(given) if len(given) == dimensions else (given[0],) * dimensions

        return Window(each("stride"), each("padding"), each("dilation"))

    def flat(self) -> Window:
        """The same window over a one-dimensional image viewed as one of a single row."""
        return Window((1, *self.stride), (0, *self.padding), (1, *self.dilation))

    def padded(self, x: Value) -> Value:
        """``x`` ``[batch, channels, *space]`` with zeros around its spatial dimensions."""
        around = (0, 0, *self.padding)
        size = tuple(extent + 2 * p for extent, p in zip(x.shape, around, strict=True))
        return Pad(size, x.dtype, x, around, 0) if any(around) else x

    def input_index(self, result: Index, tap: Sequence[Affine | int]) -> Index:
        """The spatial index into the padded image that one tap reads for the result at spatial index ``result``."""
        return tuple(p * s + t * d for p, s, t, d in zip(result, self.stride, tap, self.dilation, strict=True))


@recipe("convolution")
def convolution(call: Call) -> Value:
    x, weight = call.tensor("input"), call.tensor("weight")
    if call["transposed"]:
        return _transposed(call, x, weight)
    alone = len(x.shape) == 3 and tuple(weight.shape[:2]) == (x.shape[1], 1) and call["groups"] == x.shape[1]
    if alone and weight.shape[2] <= MOST_TAPS and call.dtype.is_floating_point:
        return _short(call, x, weight)
    return _dense(call, x, weight)


def _short(call: Call, x: Value, weight: Value) -> Value:
    """A depthwise convolution over one dimension: a multiply-add for each tap and element."""
    window, bias = Window.of(call.arguments, 1), call["bias"]
    padded = window.padded(x)
    wide = torch.float64 if call.dtype == torch.float64 else torch.float32
    result: Value | Number = 0 if bias is None else convert(view(bias, (1, x.shape[1], 1)), wide)
    for tap in range(pinned(weight.shape[2])):
        operands = [_moved(padded, call.shape, window, tap), _factor(weight, tap)]
        result = apply(fn.fma, [*(convert(o, wide) for o in operands), result], wide, call.shape)
    assert isinstance(result, Value)
    return convert(result, call.dtype)


def _moved(x: Value, shape: tuple[int, ...], window: Window, tap: int) -> Value:
    """The elements of the padded input ``x`` that one tap reads, in the shape of the result."""
    return Reindex(shape, x.dtype, x, lambda index, extents: (*index[:2], *window.input_index(index[2:], (tap,))))


def _factor(weight: Value, tap: int) -> Value:
    """The weight of one tap, ``[1, channels, 1]``."""
    shape = (1, weight.shape[0], 1)
    return Reindex(shape, weight.dtype, weight, lambda index, extents: (index[1], index[0], index[2] + tap))


def _dense(call: Call, x: Value, weight: Value) -> Value:
    """A convolution over one or two dimensions as a matrix product for each image and group.

    Raises:
        Unsupported: other ranks and dtypes, or an unusual layout of the result.
    """
    groups = call["groups"]
    _check(call, x, weight)
    window = Window.of(call.arguments, len(x.shape) - 2)
    if not call.result.is_contiguous():
        return _added(call, _channels_last(call, x, weight, window))
    batch, outputs, *output_size = call.shape
    taps = weight.shape[2:]
    if len(output_size) == 1:
        x = view(x, (*x.shape[:2], 1, x.shape[2]))
        taps, output_size, window = (1, *taps), [1, *output_size], window.flat()
    each, depth = outputs // groups, math.prod(weight.shape[1:])
    flat = view(weight, (outputs, depth))
    if groups > 1:
        x = view(x, (batch * groups, weight.shape[1], *x.shape[2:]))
        flat = view(weight, (groups, each, depth))
    if groups == 1 and _are_apart(x, taps, window) and outputs >= FEWEST_OUTPUTS:
        left = PatchRows((batch, math.prod(output_size), depth), x.dtype, x, *_numbers(taps, output_size, window), True)
        rows = Product((*left.shape[:2], outputs), call.dtype, left, permute(flat, (1, 0)))
        return _added(call, view(permute(rows, (0, 2, 1)), call.shape))
    shape = (batch * groups, depth, math.prod(output_size))
    right = Patches(shape, x.dtype, x, *_numbers(taps, output_size, window))
    return _added(call, view(Product((batch * groups, each, shape[2]), call.dtype, flat, right), call.shape))


def _check(call: Call, x: Value, weight: Value) -> None:
    """Raise Unsupported for ranks and dtypes without a kernel."""
    if len(x.shape) != len(weight.shape) or len(x.shape) not in (3, 4):
        raise Unsupported("only convolutions of batches in one or two dimensions have a kernel")
    if call.dtype not in (torch.float32, torch.float64):
        raise Unsupported(f"convolutions of {call.dtype} are left to the library")


def _transposed(call: Call, x: Value, weight: Value) -> Value:
    """A transposed convolution over one or two dimensions as a matrix product for each image and group.

    Raises:
        Unsupported: other ranks and dtypes, or a result that is not contiguous.
    """
    _check(call, x, weight)
    if not call.result.is_contiguous():
        raise Unsupported("the result of a transposed convolution is not contiguous")
    numbers, pixels = math.prod(weight.shape), estimate(math.prod(x.shape[2:]))
    if numbers * weight.dtype.itemsize > LARGEST_WEIGHT and numbers > WEIGHTS_FOR_A_PIXEL * pixels:
        raise Unsupported("the weight of a transposed convolution is large, and its image small")
    groups, window, (batch, outputs, *output_size) = (
        call["groups"],
        Window.of(call.arguments, len(x.shape) - 2),
        call.shape,
    )
    channels, taps = weight.shape[0] // groups, weight.shape[2:]
    if len(output_size) == 1:
        x = view(x, (*x.shape[:2], 1, x.shape[2]))
        taps, output_size, window = (1, *taps), [1, *output_size], window.flat()
    x, depth = view(x, (batch * groups, channels, *x.shape[2:])), channels * math.prod(taps)
    apart = view(weight, (groups, channels, outputs // groups, math.prod(taps)))
    left = view(permute(apart, (0, 2, 1, 3)), (groups, outputs // groups, depth))
    shape = (batch * groups, depth, math.prod(output_size))
    right = SpreadPatches(shape, x.dtype, x, *_numbers(taps, output_size, window))
    return _added(
        call, view(Product((batch * groups, outputs // groups, shape[2]), call.dtype, left, right), call.shape)
    )


def _are_apart(x: Value, taps: Sequence[int], window: Window) -> bool:
    """Whether the windows of a convolution do not overlap, and the taps of a row are contiguous and many."""
    at, rank = placement(x), len(window.stride)
    contiguous = at is not None and at.strides[-1].is_always(Affine((), 1))
    plain = not any(window.padding) and {*window.dilation} == {1} and (*window.stride,) == tuple(taps[-rank:])
    return contiguous and plain and taps[-1] >= FEWEST_IN_ROW


def _channels_last(call: Call, x: Value, weight: Value, window: Window) -> Value:
    """A convolution without its bias, for a result in channels-last layout.

    Raises:
        Unsupported: groups, or a result in another layout.
    """
    if call["groups"] > 1:
        raise Unsupported("grouped convolutions in channels-last layout are left to the library")
    if len(x.shape) != 4 or not call.result.is_contiguous(memory_format=torch.channels_last):
        raise Unsupported("the result of a convolution has unusual strides")
    (batch, _, *_), (outputs, channels, *taps), output_size = x.shape, weight.shape, call.shape[2:]
    depth = math.prod(taps) * channels
    shape = (batch, math.prod(output_size), depth)
    left = PatchRows(shape, x.dtype, x, *_numbers(taps, output_size, window))
    right = view(permute(weight, (2, 3, 1, 0)), (depth, outputs))
    product = Product((batch, shape[1], outputs), call.dtype, left, right)
    return view(permute(product, (0, 2, 1)), call.shape)


def _added(call: Call, result: Value) -> Value:
    """``result`` plus the bias of the convolution, if it has one."""
    if (bias := call["bias"]) is None:
        return result
    column = convert(view(bias, (*bias.shape, *(1 for _ in call.shape[2:]))), call.dtype)
    return apply(operator.add, [result, column], call.dtype, call.shape)


@recipe("convolution_backward")
def convolution_backward(call: Call) -> tuple[Value | None, ...]:
    """The gradient of the weight of a convolution, or of a transposed convolution.

    Raises:
        Unsupported: other gradients are asked for, or the rank or dtype has no kernel.
    """
    if list(call["output_mask"]) != [False, True, False]:
        raise Unsupported("the gradients of an image and a bias are left to the library")
    gradient, image, weight = (call.tensor(name) for name in ("grad_output", "input", "weight"))
    if len(image.shape) != len(weight.shape) or len(image.shape) not in (3, 4):
        raise Unsupported("only convolutions of batches in one or two dimensions have a kernel")
    if weight.dtype not in (torch.float32, torch.float64):
        raise Unsupported(f"convolutions of {weight.dtype} are left to the library")
    window = Window.of(call.arguments, len(image.shape) - 2)
    if call["transposed"]:  # the image and the gradient swap roles: taps read the gradient
        gradient, image = image, gradient
    groups, (batch, outputs, *output_size), taps = call["groups"], gradient.shape, weight.shape[2:]
    if len(output_size) == 1:
        image = view(image, (*image.shape[:2], 1, image.shape[2]))
        taps, output_size, window = (1, *taps), [1, *output_size], window.flat()
    images, depth = batch * groups, math.prod(weight.shape[1:])
    image = view(image, (images, image.shape[1] // groups, *image.shape[2:]))
    left = view(gradient, (images, outputs // groups, math.prod(output_size)))
    right = Patches((images, depth, math.prod(output_size)), weight.dtype, image, *_numbers(taps, output_size, window))
    return None, view(Correlation((groups, outputs // groups, depth), weight.dtype, left, right), weight.shape), None


def _numbers(taps: Sequence[int], output_size: Sequence[int], window: Window) -> tuple[Pair, Pair, Pair, Pair, Pair]:
    """The arguments of ``Patches``: taps, output size, stride, padding and dilation, each along ``y`` and ``x``."""

    def pair(numbers: Sequence[int]) -> Pair:
        return numbers[0], numbers[1]

    return pair(taps), pair(output_size), pair(window.stride), pair(window.padding), pair(window.dilation)


def patches(x: Value, window: Window, taps: Sequence[int], output_size: Sequence[int], groups: int) -> Value:
    """Patches of ``x`` ``[batch, channels, *space]`` as ``[groups, batch * pixels, channels of a group * taps]``.

    ``pixels`` and ``taps`` are the products of ``output_size`` and of ``taps``.
    """
    batch, channels, *space = x.shape
    each, rank = channels // groups, len(space)

    def where(index: Index, extents: Mapping[str, int]) -> Index:
        group, sample, *rest = index
        return (sample, group * each + rest[rank], *window.input_index(tuple(rest[:rank]), rest[rank + 1 :]))

    cut = Reindex((groups, batch, *output_size, each, *taps), x.dtype, window.padded(x), where)
    return view(cut, (groups, batch * math.prod(output_size), each * math.prod(taps)))


def weights(weight: Value, groups: int) -> Value:
    """A weight ``[outputs, channels of a group, *taps]`` as ``[groups, channels of a group * taps, outputs of a
    group]``."""
    outputs = weight.shape[0]
    return permute(view(weight, (groups, outputs // groups, math.prod(weight.shape[1:]))), (0, 2, 1))


def as_image(product: Value, batch: int, output_size: Sequence[int]) -> Value:
    """A product ``[groups, batch * pixels, outputs of a group]`` as an image ``[batch, outputs, *output_size]``."""
    groups, _, outputs = product.shape
    rank = len(output_size)
    apart = view(product, (groups, batch, *output_size, outputs))
    in_order = permute(apart, (1, 0, rank + 2, *range(2, rank + 2)))
    return view(in_order, (batch, groups * outputs, *output_size))
