"""Lay the results of ``max_pool1d`` out as eager does where no gradient is taken.

    max_pool1d(x.transpose(1, 2), 2)    without gradients, eager's kernel gives rows that are contiguous in memory;
                                        with gradients, it is a max_pool2d, which keeps the order of its operand

Under a dispatch mode, torch takes the second way for both. The height that it adds to a transposed operand has the
stride of an image in channels-last order. Added behind the columns and moved before them, it has a stride with which
no image is in that order, and the result is contiguous.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuse.graph.patches.patched import in_this_thread, patched


@contextlib.contextmanager
def pools_of_eager() -> Iterator[None]:
    """A context in which ``max_pool1d`` of this thread gives eager's strides under a dispatch mode, too."""
    original: Callable[..., Tensor] = torch.max_pool1d

    def pool(
        input: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> Tensor:
        needs_gradients = input.requires_grad and torch.is_grad_enabled()
        if input.ndim != 3 or needs_gradients or input.is_contiguous():
            return original(input, kernel_size, stride, padding, dilation, ceil_mode)
        image = input.unsqueeze(-1).transpose(-1, -2)
        wide = [_of_image(size, beside) for size, beside in ((kernel_size, 1), (padding, 0), (dilation, 1))]
        strides = _of_image(stride, 1) if stride not in ((), [], None) else wide[0]
        return F.max_pool2d(image, wide[0], strides, wide[1], wide[2], ceil_mode).squeeze(-2)

    with patched(torch, {"max_pool1d": in_this_thread(pool, original)}):
        yield


def _of_image(size: int | list[int] | tuple[int, ...], beside: int) -> list[int]:
    """A size along a row as the sizes of an image that is ``beside`` high.

    >>> _of_image(3, 1), _of_image((3,), 0)
    ([1, 3], [0, 3])
    """
    return [beside, *([size] if isinstance(size, int) else size)]
