"""Replace transposed convolutions with a stride of one by ordinary ones.

    convolution(x, w, transposed, stride 1)     ->     convolution(x, w')       w' = w flipped, inputs for outputs

The kernel of an ordinary convolution includes the operators that follow. A transposed convolution with a larger stride
has a kernel of its own (``fuse/kernel/cpu/transposed.py``).

Declined where the image grows by much: a convolution would mostly multiply zeros. Declined where the weight is larger
than the image: its copy would cost more than is gained. Declined for dtypes other than float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse.devices import is_host
from fuse.rewrite import surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten

MOST_GROWTH = 1.5
"""Limit on the positions of the result, as a multiple of the image's: a convolution computes all taps for each."""


@register_pass(stage="clean", after="channels_last", before_gradients=False)  # gradients are eager's
def transposed_convolutions(graph: GraphModule) -> Iterator[Verdict]:
    """Replace transposed convolutions with a stride of one by ordinary ones."""
    turned: dict[object, Node] = {}
    for node in graph.graph.find_nodes(op="call_function", target=aten.convolution.default):
        if not node.args[6] or any(step != 1 for step in each(node, 3)):
            continue
        if reason := obstacle(node) or misfit(node):
            yield declined(node, reason)
        else:
            yield rewrite(node, as_convolution, node, turned)


def values_of(node: Node) -> tuple[Tensor, Tensor, Tensor]:
    """Image, weight and result."""
    image, weight, *_ = node.args
    assert isinstance(image, Node)
    assert isinstance(weight, Node)
    return image.meta["val"], weight.meta["val"], node.meta["val"]


def obstacle(node: Node) -> str | None:
    """Why the convolution stays as it is, whatever its padding, or None."""
    image, weight, result = values_of(node)
    if not is_host(result):
        return f"on device {result.device.type} this may be slower"
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
    """Why its taps or padding do not make an ordinary convolution, or None."""
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
