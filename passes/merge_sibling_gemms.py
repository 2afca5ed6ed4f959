"""Merge matrix products that share their left operand.

    a = mm(x, w1)              ab = mm(x, [w1 | w2])
    b = mm(x, w2)      ->      a  = ab[:, :n1]
                               b  = ab[:, n1:]

One launch replaces several, and a wider product fills the vector units better: this is the first step of Appleyard,
Kocisky and Blunsom, "Optimizing Performance of Recurrent Neural Networks on GPUs", 2016. The joined weight is built
once for all products that use it, and in a loop once for all steps. Constant weights (of a frozen model) are joined
before any call. Declined where joining the weights in every call would move more bytes than the saved launches are
worth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse.rewrite import effects, surgery
from fuse.rewrite.constants import constant_nodes, fold_to_constant, given_constants
from fuse.rewrite.evaluate import evaluate
from fuse.rewrite.matrix_products import (
    MatrixProduct,
    costs_more_to_join,
    grouped,
    immovable,
    insert_product,
    needs_copy,
    products,
    replace_by_slices,
    size_in_bytes,
    transposed,
)
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten

Weights = tuple[tuple[Node, Node | None], ...]
"""The right operands of a group of products, each with its bias."""


@register_pass(stage="loops", after="sum_over_steps")
def merge_sibling_gemms(graph: GraphModule) -> Iterator[Verdict]:
    """Merge matrix products that share their left operand."""
    escaping = effects.escaping(graph)
    known = given_constants(graph)
    constant = {*known, *constant_nodes(graph, known)}
    siblings = grouped(products(graph), lambda p: (p.left, p.depth, p.node.target, p.node.meta["val"].dtype, p.factors))
    uses = Counter(weights(group) for group in siblings)
    joined: dict[Weights, tuple[Node, Node | None]] = {}
    for group in siblings:
        nodes = [product.node for product in group]
        width = sum(product.columns for product in group)
        copies = [needs_copy(product, widened(product, width), escaping) for product in group]
        is_constant = constant.issuperset(operands(group))
        if reason := obstacle(group, sum(copies), uses[weights(group)], is_constant):
            yield declined(nodes, reason)
        else:
            yield rewrite(nodes, merge, graph, group, copies, joined, known if is_constant else None)


def weights(group: Sequence[MatrixProduct]) -> Weights:
    """The weights that ``group`` joins."""
    return tuple((product.right, product.bias) for product in group)


def operands(group: Sequence[MatrixProduct]) -> list[Node]:
    """The right operands of ``group``, and its biases."""
    return [operand for pair in weights(group) for operand in pair if operand is not None]


def obstacle(group: Sequence[MatrixProduct], copies: int, uses: int, is_constant: bool) -> str | None:
    """Why these products cannot run as one, or None. ``uses`` groups share the joined weights; every call joins them,
    unless they are constants."""
    if not all(product.bias_is_row for product in group):
        return "a bias differs from row to row"
    joined = operands(group)
    if blocker := immovable(group, joined):
        return f"{blocker.target} would have to run earlier"
    launches_saved = uses * (len(group) - 1 - copies)
    if is_constant:
        return None if launches_saved > 0 else "the parts would have to be copied out of the joined product"
    launches_saved -= 1 if group[0].bias is None else 2
    if costs_more_to_join(joined, launches_saved):
        return "joining the weights in every call costs more than the launches saved"
    return None


def widened(product: MatrixProduct, width: int) -> list[int]:
    """The strides of the product's result as a part of one with ``width`` columns."""
    *batch, rows, _ = product.node.meta["val"].size()
    return [*(rows * width for _ in batch), width, 1]


def merge(
    graph: GraphModule,
    group: Sequence[MatrixProduct],
    copies: Sequence[bool],
    joined: dict[Weights, tuple[Node, Node | None]],
    known: dict[Node, Tensor | None] | None,
) -> None:
    """Run ``group`` as one product, with its weights ``known`` or joined in the call, and replace the results by its
    parts."""
    first = group[0].node
    if weights(group) not in joined:
        joined[weights(group)] = join(group)
        if known is not None:
            joined[weights(group)] = computed(graph, joined[weights(group)], known)
    right, bias = joined[weights(group)]
    product = insert_product(first, group[0], group[0].left, right, bias)
    replace_by_slices(group, product, first.meta["val"].dim() - 1, copies)


def join(group: Sequence[MatrixProduct]) -> tuple[Node, Node | None]:
    """Concatenate the weights, and the biases, in front of the first product."""
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


def computed(
    graph: GraphModule, joined: tuple[Node, Node | None], known: dict[Node, Tensor | None]
) -> tuple[Node, Node | None]:
    """The joined weight and bias as constants of the graph."""

    def constant(node: Node) -> Node:
        value = evaluate(node, known, size_in_bytes([node]))
        assert value is not None, "it is as large as its parts"
        return fold_to_constant(graph, node, value, known)

    right, bias = joined
    if (stored := effects.view_base(right)) is None:
        right = constant(right)
    else:  # ``right`` becomes a view of the constant
        constant(stored)
    return right, None if bias is None else constant(bias)
