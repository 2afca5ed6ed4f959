"""The gradient of a small convolution's weight as matrix products of its windows, which kernels and libraries hold.

    convolution_backward(g, x, w)    ->    dw = sum over images of g @ t(windows(x))         g: outputs by places
                                           db = sum of g over images and places              windows: taps by places

For a convolution whose image needs no gradient, as the first one of a model. The operator of the library takes longer
to begin than such products take as a whole. It stays where there is so much to multiply
that it is faster, with groups or gaps between taps, transposed, and for images that do not lie in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten

MOST_WORK = 2**20
"""Multiplications up to which the gradient is made of products. Training steps of ``relu(convolution(x))`` with 3 by 3
taps took 0.78, 0.65, 0.83 and 0.92 of the time with the library at 2**15.8, 2**18.8, 2**20.8 and 2**22.8
multiplications, with single taps 0.81, 1.02 and 1.15 at 2**14.6, 2**20.6 and 2**22.6."""


def formula(op: OpOverload, args: Sequence[Any]) -> Callable[..., Any] | None:
    """How to compute what ``op`` does, called with ``args``; None where it is called as it is."""
    if op is not aten.convolution_backward.default:
        return None
    gradient, image, weight, _, stride, padding, dilation, transposed, _, groups, mask = args
    dtypes = {tensor.dtype for tensor in (gradient, image, weight)}
    plain = not transposed and groups == 1 and set(dilation) == {1} and dtypes in ({torch.float32}, {torch.float64})
    whole = image.dim() == weight.dim() == len(stride) + 2 == len(padding) + 2
    in_order = image.is_contiguous() and weight.is_contiguous()
    wanted = mask[1] and not mask[0]
    return _gradients if plain and whole and in_order and wanted and 0 < _work(gradient, weight) <= MOST_WORK else None


def _work(gradient: Tensor, weight: Tensor) -> int:
    return gradient.numel() * weight[0].numel()


def _gradients(*args: Any) -> tuple[None, Tensor, Tensor | None]:
    gradient, image, weight, _, stride, padding, _, _, _, _, mask = args
    places, taps = range(2, image.dim()), range(image.dim(), 2 * image.dim() - 2)
    if any(padding):
        image = aten.constant_pad_nd(image, [p for side in reversed(padding) for p in (side, side)], 0.0)
    for dim, count, step in zip(places, weight.shape[2:], stride, strict=True):
        image = image.unfold(dim, count, step)
    windows = image.permute(0, 1, *taps, *places).reshape(image.shape[0], weight[0].numel(), -1)
    rows = gradient.reshape(*gradient.shape[:2], -1)
    of_images = torch.bmm(rows, windows.transpose(1, 2))
    of_weight = of_images.sum(0) if image.shape[0] > 1 else of_images
    return None, of_weight.view(weight.shape), gradient.sum([0, *places]) if mask[2] else None
