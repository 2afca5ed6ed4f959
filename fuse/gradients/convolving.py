"""The gradients of a convolution in a step of a loop, split so that a kernel can hold the step.

    y = convolution(h, w) + b     dh = convolution(dy, w flipped)          in the step, by a kernel
                                  dw = the weight's gradient of all images of all steps, once     behind the loop
                                  db = sum of dy

The library's backward operator computes all three at once, and has no loop kernel. With strides of one, the gradient of
the image is itself a convolution: the weight is flipped in each dimension of its window, and the input and output
channels of each group are exchanged. Large convolutions stay with the library, which computes them faster.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

aten = torch.ops.aten

MOST_WORK = 2**22
"""The most multiplications of an image's gradient in a step for a kernel to compute it. Training steps of a loop of 12
``tanh(convolution(h) + x)`` with 4, 16 and 32 channels (74 thousand, 2.4 and 9.4 million multiplications) took 0.13,
0.73 and 1.18 times as long as with the library."""


def formula(args: Sequence[Any]) -> Callable[..., Any] | None:
    """A function for the results of ``convolution_backward(*args)``; None if that operator itself is to run."""
    gradient, image, weight, _, stride, padding, dilation, transposed, _, _, mask = args
    plain = not transposed and {*stride} == {1} and image.dim() == weight.dim()
    inside = min(_around(weight, padding, dilation)) >= 0
    work = gradient.numel() * weight[0].numel()
    return _gradients if plain and inside and mask[0] and work <= MOST_WORK else None


def _gradients(*args: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    gradient, image, weight, _, stride, padding, dilation, _, output_padding, groups, mask = args
    spatial = list(range(2, image.dim()))
    by_group = weight.flip(spatial).unflatten(0, (groups, -1))
    turned = by_group.transpose(1, 2).flatten(0, 1).contiguous()
    around = _around(weight, padding, dilation)
    of_image = aten.convolution(gradient, turned, None, stride, around, dilation, False, output_padding, groups)
    of_weight = _of_weight(gradient, image, weight, stride, padding, dilation, groups) if mask[1] else None
    return of_image, of_weight, gradient.sum([0, *spatial]) if mask[2] else None


def _around(weight: Tensor, padding: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """How far the result's gradient is padded in each dimension, so that the image's gradient has the image's size."""
    return [d * (taps - 1) - p for taps, p, d in zip(weight.shape[2:], padding, dilation, strict=True)]


def _of_weight(
    gradient: Tensor,
    image: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    none, mask = [0] * len(stride), [False, True, False]
    backward = aten.convolution_backward
    made: Tensor = backward(gradient, image, weight, None, stride, padding, dilation, False, none, groups, mask)[1]
    return made


@dataclass(frozen=True)
class OfWeight:
    """The gradient of a convolution's weight for all steps at once: the images of all steps are one batch."""

    size: torch.Size
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def __call__(self, gradients: Tensor, images: Tensor) -> Tensor:
        like = gradients.new_empty(self.size)
        how = self.stride, self.padding, self.dilation, self.groups
        return _of_weight(gradients.flatten(0, 1), images.flatten(0, 1), like, *how)


def gradient_of_weight(node: Node) -> tuple[Node, Node, OfWeight] | None:
    """If ``node`` is the gradient of a convolution's weight: the result's gradient, the image, and the rule."""
    call = node.args[0] if node.target is operator.getitem and node.args[1] == 1 else None
    if not isinstance(call, Node) or call.target is not aten.convolution_backward.default:
        return None
    args: tuple[Any, ...] = call.args
    gradient, image, weight, _, stride, padding, dilation, transposed, _, groups, mask = args
    if list(mask) != [False, True, False] or transposed:
        return None
    how = OfWeight(weight.meta["val"].shape, tuple(stride), tuple(padding), tuple(dilation), groups)
    return gradient, image, how
