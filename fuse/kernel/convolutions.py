"""Convolutions: as products, and, where they are short and each channel is on its own, as elementwise work.

    conv2d(x, w)[b, o, (y, x)]   =   w[o, (i, v, u)] @ patches(x)[b, (i, v, u), (y, x)]

No matrix of patches is ever in memory (:mod:`fuse.kernel.cpu.windows`), and the weight is read as it lies. Images and
results lie as PyTorch makes them by default: places side by side. A group is an image of its own, with its own weight.

    conv2d(x, w)[b, o, (y, x)]   =   patches(x)[b, (y, x), (v, u, i)] @ w[(v, u, i), o]

where the channels of the result lie side by side (``torch.channels_last``, :mod:`fuse.kernel.cpu.channels_last`): then
the weight is what is read a vector at a time.

    conv1d(x, w, bias, groups=channels)[b, c, t]   =   bias[c] + x[b, c, t] w[c, 0] + x[b, c, t + 1] w[c, 1] + ...

where there are few taps. These stand in front of state-space models and linear attention, and join the kernel of what
follows; a library would first bring the input into a layout of its own.

    conv2d(x, w)[b, o, y, x]   =   patches[b, y, x, (i, u, v)] @ w[o, (i, u, v)]

in the steps of a loop, where ``patches`` is a value like any other: it reads the padded input once for every tap.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fuse.kernel.expressions import fn
from fuse.kernel.extents import pinned
from fuse.kernel.index import Affine, Index
from fuse.kernel.recipes import Call, Number, Unsupported, apply, convert, recipe
from fuse.kernel.values import Correlation, Pad, Patches, PatchRows, Product, Reindex, Value, permute, view

MOST_TAPS = 4
"""Places of a window that elementwise work reads each."""


@dataclass(frozen=True)
class Window:
    """How a kernel moves over each spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @staticmethod
    def of(arguments: Mapping[str, object], dimensions: int) -> Window:
        """The window of a call of ``aten.convolution``; one number stands for all dimensions.

        Raises:
            Unsupported: a transposed convolution.
        """
        if arguments["transposed"]:
            raise Unsupported("a transposed convolution")

        def each(name: str) -> tuple[int, ...]:
            given: Sequence[int] = arguments[name]  # type: ignore[assignment]  # as the schema says
            return tuple(given) if len(given) == dimensions else (given[0],) * dimensions

        return Window(each("stride"), each("padding"), each("dilation"))

    def flat(self) -> Window:
        """The same over an image of one row."""
        return Window((1, *self.stride), (0, *self.padding), (1, *self.dilation))

    def padded(self, x: Value) -> Value:
        """``x`` with zeros around its space."""
        around = (0, 0, *self.padding)
        size = tuple(extent + 2 * p for extent, p in zip(x.shape, around, strict=True))
        return Pad(size, x.dtype, x, around, 0) if any(around) else x

    def place(self, result: Index, tap: Sequence[Affine | int]) -> Index:
        """Where one tap reads the padded image, for a place of the result."""
        return tuple(p * s + t * d for p, s, t, d in zip(result, self.stride, tap, self.dilation, strict=True))


@recipe("convolution")
def convolution(call: Call) -> Value:
    x, weight = call.tensor("input"), call.tensor("weight")
    alone = len(x.shape) == 3 and tuple(weight.shape[:2]) == (x.shape[1], 1) and call["groups"] == x.shape[1]
    if alone and weight.shape[2] <= MOST_TAPS and call.dtype.is_floating_point:
        return _short(call, x, weight)
    return _dense(call, x, weight)


def _short(call: Call, x: Value, weight: Value) -> Value:
    """A few products an element."""
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
    """Elements that one tap reads, for every element of the result."""
    return Reindex(shape, x.dtype, x, lambda index, extents: (*index[:2], *window.place(index[2:], (tap,))))


def _factor(weight: Value, tap: int) -> Value:
    """The weight of one tap, a number for each channel."""
    shape = (1, weight.shape[0], 1)
    return Reindex(shape, weight.dtype, weight, lambda index, extents: (index[1], index[0], index[2] + tap))


def _dense(call: Call, x: Value, weight: Value) -> Value:
    """All channels of a group at once, in one or two dimensions.

    Raises:
        Unsupported: any other.
    """
    groups = call["groups"]
    if len(x.shape) != len(weight.shape) or len(x.shape) not in (3, 4):
        raise Unsupported("only convolutions of batches in one or two dimensions have a kernel")
    if call.dtype not in (torch.float32, torch.float64):
        raise Unsupported(f"convolutions of {call.dtype} are left to the library")
    window = Window.of(call.arguments, len(x.shape) - 2)
    if not call.result.is_contiguous():
        return _added(call, _channels_last(call, x, weight, window))
    batch, outputs, *places = call.shape
    taps = weight.shape[2:]
    if len(places) == 1:
        x = view(x, (*x.shape[:2], 1, x.shape[2]))
        taps, places, window = (1, *taps), [1, *places], window.flat()
    each, depth = outputs // groups, math.prod(weight.shape[1:])
    flat = view(weight, (outputs, depth))
    if groups > 1:
        x = view(x, (batch * groups, weight.shape[1], *x.shape[2:]))
        flat = view(weight, (groups, each, depth))
    shape = (batch * groups, depth, math.prod(places))
    right = Patches(shape, x.dtype, x, *_numbers(taps, places, window))
    return _added(call, view(Product((batch * groups, each, shape[2]), call.dtype, flat, right), call.shape))


def _channels_last(call: Call, x: Value, weight: Value, window: Window) -> Value:
    """The value of a convolution, but for its bias, whose result's channels lie side by side.

    Raises:
        Unsupported: groups, and results laid out in any other way.
    """
    if call["groups"] > 1:
        raise Unsupported("grouped convolutions in channels-last layout are left to the library")
    if len(x.shape) != 4 or not call.result.is_contiguous(memory_format=torch.channels_last):
        raise Unsupported("the result of a convolution has unusual strides")
    (batch, _, *_), (outputs, channels, *taps), places = x.shape, weight.shape, call.shape[2:]
    depth = math.prod(taps) * channels
    shape = (batch, math.prod(places), depth)
    left = PatchRows(shape, x.dtype, x, *_numbers(taps, places, window))
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
    """The gradient of the weight alone.

    Raises:
        Unsupported: more is asked for, or it has no kernel.
    """
    if list(call["output_mask"]) != [False, True, False]:
        raise Unsupported("the gradients of an image and a bias are left to the library")
    gradient, image, weight = (call.tensor(name) for name in ("grad_output", "input", "weight"))
    if len(image.shape) != len(weight.shape) or len(image.shape) not in (3, 4):
        raise Unsupported("only convolutions of batches in one or two dimensions have a kernel")
    if weight.dtype not in (torch.float32, torch.float64):
        raise Unsupported(f"convolutions of {weight.dtype} are left to the library")
    window = Window.of({**call.arguments, "transposed": False}, len(image.shape) - 2)
    if call["transposed"]:  # the image is what the taps spread, its gradient what they see
        gradient, image = image, gradient
    groups, (batch, outputs, *places), taps = call["groups"], gradient.shape, weight.shape[2:]
    if len(places) == 1:
        image = view(image, (*image.shape[:2], 1, image.shape[2]))
        taps, places, window = (1, *taps), [1, *places], window.flat()
    images, depth = batch * groups, math.prod(weight.shape[1:])
    image = view(image, (images, image.shape[1] // groups, *image.shape[2:]))
    left = view(gradient, (images, outputs // groups, math.prod(places)))
    right = Patches((images, depth, math.prod(places)), weight.dtype, image, *_numbers(taps, places, window))
    return None, view(Correlation((groups, outputs // groups, depth), weight.dtype, left, right), weight.shape), None


def _numbers(taps: Sequence[int], places: Sequence[int], window: Window) -> list[tuple[int, int]]:
    """Tap, place, stride, padding and dilation of a window, each along ``y`` and ``x``."""
    return [(y, x) for y, x in (taps, places, window.stride, window.padding, window.dilation)]


def patches(x: Value, window: Window, taps: Sequence[int], places: Sequence[int], groups: int) -> Value:
    """``[groups, batch * places, channels of a group * taps]`` of ``x`` ``[batch, channels, *space]``."""
    batch, channels, *space = x.shape
    each, rank = channels // groups, len(space)

    def where(index: Index, extents: Mapping[str, int]) -> Index:
        group, sample, *rest = index
        return (sample, group * each + rest[rank], *window.place(tuple(rest[:rank]), rest[rank + 1 :]))

    cut = Reindex((groups, batch, *places, each, *taps), x.dtype, window.padded(x), where)
    return view(cut, (groups, batch * math.prod(places), each * math.prod(taps)))


def weights(weight: Value, groups: int) -> Value:
    """``[groups, channels of a group * taps, outputs of a group]`` of ``[outputs, channels of a group, *taps]``."""
    outputs = weight.shape[0]
    return permute(view(weight, (groups, outputs // groups, math.prod(weight.shape[1:]))), (0, 2, 1))


def as_image(product: Value, batch: int, places: Sequence[int]) -> Value:
    """``[batch, outputs, *places]`` of ``[groups, batch * places, outputs of a group]``."""
    groups, _, outputs = product.shape
    rank = len(places)
    apart = view(product, (groups, batch, *places, outputs))
    in_order = permute(apart, (1, 0, rank + 2, *range(2, rank + 2)))
    return view(in_order, (batch, groups * outputs, *places))
