"""Run matrix products that share their left operand as one.

    a = mm(x, w1)              ab = mm(x, [w1 | w2])
    b = mm(x, w2)      ->      a  = ab[:, :n1]
                               b  = ab[:, n1:]

One launch instead of several, and a wider product fills the vector units better: the first step of Appleyard, Kocisky
and Blunsom, "Optimizing Performance of Recurrent Neural Networks on GPUs", 2016. The joined weight is built once for
all products that use it, in a loop for all steps. Declined where joining the weights in every call would move more
bytes than the saved launches are worth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch.fx import GraphModule, Node

from fuse.rewrite import effects, surgery
from fuse.rewrite.products import (
    Product,
    bytes_worth,
    grouped,
    immovable,
    insert_product,
    needs_copy,
    products,
    replace_product,
    size_in_bytes,
)
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten

Weights = tuple[tuple[Node, Node | None], ...]
"""The right operands, each with its bias, that a group of products joins."""


@register_pass(after=("common_subexpressions", "view_chains", "no_ops", "constant_folding"))
def merge_sibling_gemms(graph: GraphModule) -> Iterator[Verdict]:
    """Run matrix products that share their left operand as one."""
    escaping = effects.escaping(graph)
    siblings = grouped(products(graph), lambda p: (p.left, p.depth, p.node.target, p.node.meta["val"].dtype, p.factors))
    uses = Counter(weights(group) for group in siblings)
    joined: dict[Weights, tuple[Node, Node | None]] = {}
    for group in siblings:
        nodes = [product.node for product in group]
        width = sum(product.columns for product in group)
        copies = [needs_copy(product, widened(product, width), escaping) for product in group]
        if reason := obstacle(group, sum(copies), uses[weights(group)]):
            yield declined(nodes, reason)
        else:
            yield rewrite(nodes, merge, group, copies, joined)


def weights(group: Sequence[Product]) -> Weights:
    """What ``group`` would join."""
    return tuple((product.right, product.bias) for product in group)


def obstacle(group: Sequence[Product], copies: int, uses: int) -> str | None:
    """Why these products cannot run as one, or None; ``uses`` groups share the same joined weights."""
    if not all(product.bias_is_row for product in group):
        return "a bias differs from row to row"
    biases = [product.bias for product in group if product.bias is not None]
    rights = [product.right for product in group]
    if blocker := immovable(group, [*rights, *biases]):
        return f"{blocker.target} would have to run earlier"
    launches_saved = uses * (len(group) - 1 - copies) - (2 if biases else 1)
    if 2 * size_in_bytes([*rights, *biases]) > bytes_worth(launches_saved):
        return "joining the weights in every call costs more than the launches saved"
    return None


def widened(product: Product, width: int) -> list[int]:
    """The strides of the product's result as a part of one with ``width`` columns."""
    *batch, rows, _ = product.node.meta["val"].size()
    return [*(rows * width for _ in batch), width, 1]


def merge(group: Sequence[Product], copies: Sequence[bool], joined: dict[Weights, tuple[Node, Node | None]]) -> None:
    """Run ``group`` as one product and let its parts stand for the results."""
    first = group[0].node
    if weights(group) not in joined:
        joined[weights(group)] = join(group)
    right, bias = joined[weights(group)]
    product = insert_product(first, group[0], group[0].left, right, bias)
    start = 0
    parts = []
    for one in group:
        bounds = (first.meta["val"].dim() - 1, start, start + one.columns)
        parts.append(surgery.insert(first, aten.slice.Tensor, product, *bounds, like=one.node))
        start += one.columns
    for one, part, copy in zip(group, parts, copies, strict=True):
        replace_product(one, part, copy)


def join(group: Sequence[Product]) -> tuple[Node, Node | None]:
    """The weights side by side, and the biases, in front of the first product."""
    first = group[0].node
    rights = [product.right for product in group]
    biases = [product.bias for product in group if product.bias is not None]
    surgery.hoist([*rights, *biases], first)
    originals = [transposed(right) for right in rights]
    if None not in originals:  # as stored, rows are joined: one contiguous copy each
        right = surgery.insert(first, aten.t.default, surgery.insert(first, aten.cat.default, originals))
    else:
        right = surgery.insert(first, aten.cat.default, rights, rights[0].meta["val"].dim() - 1)
    return right, surgery.insert(first, aten.cat.default, biases) if biases else None


def transposed(right: Node) -> Node | None:
    """The matrix that ``right`` is the transpose of, if it is a view of one."""
    base = effects.view_base(right)
    if base is None or right.target not in (aten.t.default, aten.transpose.int, aten.permute.default):
        return None
    old, new = base.meta["val"], right.meta["val"]
    return base if new.dim() == 2 and old.stride() == new.stride()[::-1] else None
