"""Record the gradient of a convolution's bias as a separate sum, if a kernel computes the gradient of its weight.

    convolution_backward(g, x, w), of weight and bias    ->    dw = convolution_backward(g, x, w), of the weight alone
                                                               db = sum of g over images and positions

This applies to convolutions whose image needs no gradient, such as the first one of a model. The sum joins the kernel
that computes ``g``. The gradient of the weight is a kernel, too (``fuse/kernel/recipes/convolutions.py``), which starts
faster than the library's operator. Declined if the library is faster, and for images that are not contiguous.

The gradient of a larger weight is a matrix product if no two windows overlap and none is padded:

    windows of one pixel              dw[o, i]           = sum of g[b, o, (y, x)] @ x[b, i, (y, x)]^T over images
    windows next to each other        dw[o, (i, v, u)]   = g[o, (b, y, x)] @ patches[(b, y, x), (i, v, u)]

Each pixel is in one patch, so that the matrix of patches is a permutation of the image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten

MOST_SUMS = 9216
"""The most elements of a weight's gradient (outputs times taps of all input channels of a group) for a kernel. Training
steps of transposed convolutions took 0.90 and 0.97 of the time with the library at 9216 and 8192 with AVX-512, 0.96 and
0.98 with AVX2 (one thread)."""
MOST_PRODUCTS = 1024
"""The same for windows of one tap, which are matrix products: at 4096 the kernel took 1.2 times as long as the library
with AVX-512, 2.1 times with AVX2 (one thread)."""

FEWEST_IN_ROW = 8
"""Fewest taps in a row of a patch for a matrix of patches."""
FEWEST_OUTPUTS = 32
"""Fewest outputs for a matrix of patches: each pixel is copied once, and multiplied once for each output."""
SHARE_OF_SUMS = 8
"""Times that the sums of an image must be in what they are summed from: they are stored and read again for each image.
Of 2048 x 512 sums over 49 pixels, half of the time was that."""


def is_small(weight: Sequence[int], groups: int) -> bool:
    """Whether a kernel computes the gradient of a weight of this shape faster than the library.

    >>> is_small((32, 8, 3, 3), 4), is_small((64, 64, 1, 1), 1)
    (True, False)
    """
    outputs, channels, *taps = weight
    return outputs // groups * channels * math.prod(taps) <= (MOST_SUMS if math.prod(taps) > 1 else MOST_PRODUCTS)


def formula(op: OpOverload, args: Sequence[Any]) -> Callable[..., Any] | None:
    """The function that replaces ``op`` in the record, to be called with ``args``; None to record ``op`` itself."""
    if op is not aten.convolution_backward.default:
        return None
    gradient, image, weight, _, _, _, _, _, _, groups, mask = args
    dtypes = {tensor.dtype for tensor in (gradient, image, weight)}
    whole = image.dim() == weight.dim() in (3, 4) and image.is_contiguous() and weight.is_contiguous()
    known = dtypes in ({torch.float32}, {torch.float64}) and image.numel() > 0 and gradient.numel() > 0
    if not (mask[1] and not mask[0] and known and whole):
        return None
    if is_small(weight.shape, groups):
        return _apart if mask[2] else None
    return _of_product(args)


def _of_product(args: Sequence[Any]) -> Callable[..., Any] | None:
    gradient, image, weight, _, stride, padding, dilation, transposed, _, groups, _ = args
    outputs, channels, *taps = weight.shape
    spatial = zip(image.shape[2:], gradient.shape[2:], taps, strict=True)
    whole = all(extent == places * tap for extent, places, tap in spatial)
    if transposed or groups > 1 or {*padding} != {0} or {*dilation} != {1} or list(stride) != taps or not whole:
        return None
    if math.prod(taps) > 1:
        return _of_patches if taps[-1] >= FEWEST_IN_ROW and outputs >= FEWEST_OUTPUTS else None
    sums, read = outputs * channels, gradient[0, 0].numel() * (outputs + channels)
    return _of_pixels if sums * SHARE_OF_SUMS <= read else None


def _of_pixels(gradient: Tensor, image: Tensor, weight: Tensor, *others: Any) -> tuple[None, Tensor, Tensor | None]:
    pixels, of_outputs = image.flatten(2).transpose(1, 2), gradient.flatten(2)
    made = of_outputs[0].mm(pixels[0]) if len(image) == 1 else of_outputs.bmm(pixels).sum(0)
    return None, made.view(weight.shape), _of_bias(gradient, others)


def _of_patches(gradient: Tensor, image: Tensor, weight: Tensor, *others: Any) -> tuple[None, Tensor, Tensor | None]:
    rank, (images, channels, *_) = image.dim() - 2, image.shape
    each = zip(gradient.shape[2:], weight.shape[2:], strict=True)
    apart = image.view(images, channels, *(extent for pair in each for extent in pair))
    places, taps = range(2, 2 + 2 * rank, 2), range(3, 3 + 2 * rank, 2)
    patches = apart.permute(0, *places, 1, *taps).reshape(-1, math.prod(weight.shape[1:]))
    made = gradient.transpose(0, 1).flatten(1).mm(patches)
    return None, made.view(weight.shape), _of_bias(gradient, others)


def _of_bias(gradient: Tensor, others: Sequence[Any]) -> Tensor | None:
    return gradient.sum([0, *range(2, gradient.dim())]) if others[-1][2] else None


def _apart(gradient: Tensor, image: Tensor, weight: Tensor, _: Any, *others: Any) -> tuple[None, Tensor, Tensor]:
    *window, mask = others
    made = aten.convolution_backward(gradient, image, weight, None, *window, [False, mask[1], False])
    return None, made[1], gradient.sum([0, *range(2, gradient.dim())])
