"""Replace every operator that fills a tensor with one number by `full`, `zeros` or `ones`.

    z = zeros_like(x[:, 0])      ->      z = zeros([3, 20])

The result of ``zeros_like``, ``new_full`` and similar operators depends only on the shape of their operand, which is
known. In the plain form, passes that look for a loop's initial states see that all elements are equal. Declined where
the strides would change.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse.graph.strides import contiguous_strides
from fuse.rewrite import surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten

PLAIN = {
    aten.zeros_like.default: aten.zeros.default,
    aten.new_zeros.default: aten.zeros.default,
    aten.ones_like.default: aten.ones.default,
    aten.new_ones.default: aten.ones.default,
    aten.full_like.default: aten.full.default,
    aten.new_full.default: aten.full.default,
    aten.scalar_tensor.default: aten.full.default,
}
NUMBERS = {aten.full_like.default: 1, aten.new_full.default: 2, aten.scalar_tensor.default: 0}
"""The position of the number among the arguments."""


@register_pass(stage="clean", after="dead_code")
def plain_fills(graph: GraphModule) -> Iterator[Verdict]:
    """Replace every operator that fills a tensor with one number by `full`, `zeros` or `ones`."""
    for node in list(graph.graph.nodes):
        if node.target in PLAIN:
            if reason := obstacle(node):
                yield declined(node, reason)
            else:
                yield rewrite(node, write_plainly, node)


def obstacle(node: Node) -> str | None:
    """Why ``node`` cannot become a plain fill, or None."""
    value: Tensor = node.meta["val"]
    if value.layout != torch.strided:
        return "the tensor is sparse"
    if value.stride() != contiguous_strides(value.shape):
        return "the strides would change"
    if isinstance(_number(node), Node):
        return "the number is computed"
    return None


def write_plainly(node: Node) -> None:
    """Replace ``node`` by an operator that reads no tensor."""
    value: Tensor = node.meta["val"]
    number = [_number(node)] if node.target in NUMBERS else []
    options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    plain = surgery.insert(node, PLAIN[node.target], list(value.shape), *number, like=node, **options)  # type: ignore[index]  # FX types arguments loosely
    surgery.replace(node, plain)


def _number(node: Node) -> object:
    if node.target not in NUMBERS:
        return None
    position = NUMBERS[node.target]
    return node.args[position] if len(node.args) > position else node.kwargs["fill_value"]
