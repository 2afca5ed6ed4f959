"""Record the gradient of a convolution's bias as a separate sum, if a kernel computes the gradient of its weight.

    convolution_backward(g, x, w), of weight and bias    ->    dw = convolution_backward(g, x, w), of the weight alone
                                                               db = sum of g over images and positions

This applies to convolutions whose image needs no gradient, such as the first one of a model. The sum joins the kernel
that computes ``g``. The gradient of the weight is a kernel, too (``fuse/kernel/convolutions.py``), which starts faster
than the library's operator. Declined if the library is faster, and for images that are not contiguous.
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
    taken = list(mask) == [False, True, True] and known and whole and is_small(weight.shape, groups)
    return _apart if taken else None


def _apart(gradient: Tensor, image: Tensor, weight: Tensor, _: Any, *others: Any) -> tuple[None, Tensor, Tensor]:
    *window, mask = others
    made = aten.convolution_backward(gradient, image, weight, None, *window, [False, mask[1], False])
    return None, made[1], gradient.sum([0, *range(2, image.dim())])
