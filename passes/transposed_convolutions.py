"""Replace transposed convolutions by ordinary ones, or store their weights channels-last.

    convolution(x, w, transposed, stride 1)     ->     convolution(x, w')       w' = w flipped, inputs for outputs

With a stride of one it is an ordinary convolution, whose kernel includes the operators that follow.

    y = convolution(x, w, transposed, stride 2) ->     y = clone(convolution(x, clone(w, channels_last)), contiguous)

With a larger stride it stays a call of oneDNN, which is slow in the default layout: 3 x 3 taps at a stride of 2 took 3
to 12 times as long as in channels-last layout (one thread, 16 to 64 channels). Where the stride divides the taps, it
took 1.1 to 1.6 times as long, with an activation behind it, and 1.04 to 1.8 times with a batch norm that is not
trained; there, what follows must be elementwise.

Declined where the image grows by much or the weight is larger than the image, so that a convolution multiplies mostly
zeros or the weight's copy costs more than is gained; for few output channels, or few in a group without AVX-512; and
for other dtypes than float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.devices import has_wide_vectors, is_host
from fuse.rewrite import surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten

NORM = aten._native_batch_norm_legit_no_training.default

MOST_GROWTH = 1.5
"""Limit on the positions of the result, as a multiple of the image's: a convolution computes all taps for each."""
FEWEST_CHANNELS = 8
"""The fewest output channels for which channels-last layout pays."""

FEWEST_OF_A_GROUP = 16
"""The fewest channels of a group for which channels-last layout pays without AVX-512: 3 x 3 taps at a stride of 2 took
0.96 of the time with 16 (AVX2, one thread, copies included), 1.3 to 1.6 times with 4 and 8. With AVX-512, groups of 4
took a quarter of it."""

FEWEST_ELEMENTS = 20480
"""PyTorch may not use oneDNN for a single image of at most so many elements."""


@register_pass(stage="clean", after="channels_last", before_gradients=False)  # gradients are eager's
def transposed_convolutions(graph: GraphModule) -> Iterator[Verdict]:
    """Replace transposed convolutions by ordinary ones, or store their weights channels-last."""
    turned: dict[object, Node] = {}
    for node in graph.graph.find_nodes(op="call_function", target=aten.convolution.default):
        if not node.args[6]:
            continue
        if reason := obstacle(node):
            yield declined(node, reason)
        elif all(step == 1 for step in each(node, 3)):
            yield declined(node, reason) if (reason := misfit(node)) else rewrite(node, as_convolution, node, turned)
        elif reason := no_gain(node):
            yield declined(node, reason)
        else:
            yield rewrite(node, channels_last, node)


def values_of(node: Node) -> tuple[Tensor, Tensor, Tensor]:
    """Image, weight and result."""
    image, weight, *_ = node.args
    assert isinstance(image, Node)
    assert isinstance(weight, Node)
    return image.meta["val"], weight.meta["val"], node.meta["val"]


def obstacle(node: Node) -> str | None:
    """Why the convolution stays as it is for any stride, or None."""
    image, weight, result = values_of(node)
    if not is_host(result):
        return f"device {result.device.type} is not known to gain"
    if result.dtype is not torch.float32:
        return f"convolutions of {result.dtype} are left to the library"
    if image.dim() != weight.dim() or not result.is_contiguous() or not image.is_contiguous():
        return "an image is unbatched or not contiguous"
    if result.numel() == 0:
        return "a tensor has no elements"
    if not weight.is_contiguous():
        return "the weight is not contiguous"
    return "the weight is larger than the image" if weight.numel() > image.numel() else None


def misfit(node: Node) -> str | None:
    """Why a transposed convolution with a stride of one stays as it is, or None."""
    image, _, result = values_of(node)
    if image.dim() not in (3, 4):
        return "only convolutions in one or two dimensions have a kernel"
    if any(padding < 0 for padding in paddings(node)):
        return "its padding crops more than the taps reach"
    if any(each(node, 7)):
        return "it has an output padding"
    if math.prod(result.shape[2:]) > MOST_GROWTH * math.prod(image.shape[2:]):
        return "a convolution would mostly multiply zeros"
    return None


def no_gain(node: Node) -> str | None:
    """Why a transposed convolution with a larger stride keeps its layout, or None."""
    image, weight, result = values_of(node)
    if result.dim() != 4 or weight.shape[1] == 1 or math.prod(weight.shape[2:]) == 1:
        return "its weight is not two-dimensional, or the same in both layouts"
    if not torch.backends.mkldnn.is_available() or (len(image) == 1 and image.numel() <= FEWEST_ELEMENTS):
        return "PyTorch does not compute it with oneDNN"
    groups = cast(int, node.args[8])
    smallest = min(image.shape[1], result.shape[1]) // groups
    if groups > 1 and smallest < FEWEST_OF_A_GROUP and not has_wide_vectors():
        return f"groups of fewer than {FEWEST_OF_A_GROUP} channels gain with AVX-512 alone"
    stride = each(node, 3)
    divides = all(taps % step == 0 for taps, step in zip(weight.shape[2:], stride, strict=True))
    if divides and not all(ops.is_pointwise(user.target) or user.target is NORM for user in node.users):
        return "the stride divides the taps, and a reader is not elementwise: copying the result back costs too much"
    return f"fewer than {FEWEST_CHANNELS} output channels" if result.shape[1] < FEWEST_CHANNELS else None


def each(node: Node, position: int) -> tuple[int, ...]:
    """An argument that has a number for each dimension, or one for all."""
    given, dimensions = cast(Sequence[int], node.args[position]), node.meta["val"].dim() - 2
    return tuple(given) if len(given) == dimensions else (given[0],) * dimensions


def paddings(node: Node) -> list[int]:
    """The convolution's zero padding in each dimension, which replaces the transposed one's cropping."""
    _, weight, _ = values_of(node)
    taps = weight.shape[2:]
    return [d * (k - 1) - p for k, p, d in zip(taps, each(node, 4), each(node, 5), strict=True)]


def as_convolution(node: Node, turned: dict[object, Node]) -> None:
    """Replace ``node`` by a convolution; ``turned`` has the weights flipped so far."""
    arguments: Any = node.args
    image, weight, bias, stride, _, dilation, _, none, groups = arguments
    key = weight, groups
    if key not in turned:
        turned[key] = turned_round(node, weight, groups)
    padding = paddings(node)
    others = stride, padding, dilation, False, none, groups
    surgery.replace(node, surgery.insert(node, aten.convolution.default, image, turned[key], bias, *others))


def turned_round(node: Node, weight: Node, groups: int) -> Node:
    """``[outputs, inputs of a group, *taps]`` of ``[inputs, outputs of a group, *taps]``, last taps first."""
    inputs, outputs, *taps = weight.meta["val"].shape
    before = node if weight.op == "call_function" else node.graph.find_nodes(op="placeholder")[-1].next
    parted = [groups, inputs // groups, outputs, *taps]
    made = surgery.insert(before, aten.view.default, weight, parted, like=node)
    made = surgery.insert(before, aten.flip.default, made, list(range(3, 3 + len(taps))), like=node)
    made = surgery.insert(before, aten.transpose.int, made, 1, 2, like=node)
    made = surgery.insert(before, aten.clone.default, made, like=node, memory_format=torch.contiguous_format)
    return surgery.insert(before, aten.view.default, made, [groups * outputs, inputs // groups, *taps], like=node)


def channels_last(node: Node) -> None:
    """Replace ``node`` by the same convolution with a channels-last weight, and copy its result back."""
    image, weight, *others = node.args
    laid = surgery.insert(node, aten.clone.default, weight, memory_format=torch.channels_last)
    made = surgery.insert(node, aten.convolution.default, image, laid, *others)
    back = surgery.insert(node, aten.clone.default, made, memory_format=torch.contiguous_format)
    surgery.replace(node, back)
