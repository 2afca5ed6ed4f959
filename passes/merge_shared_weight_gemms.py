"""Merge matrix products that share their right operand.

    a = mm(x[:, 0], w)              ab = mm(view(x, [b * 2, k]), w)
    b = mm(x[:, 1], w)      ->      a  = view(ab, [b, 2, n])[:, 0]
                                    b  = view(ab, [b, 2, n])[:, 1]

The input projections of a recurrent loop are such products, one for each step. Where the left operands are consecutive
parts of one tensor, that tensor is the joined operand and nothing is copied. Otherwise they are concatenated, if the
launches saved are worth the bytes moved. Products are merged if the same number of products precedes each of them, so
that none needs another's result; a loop's recurrent products stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from fuse.rewrite import effects, surgery
from fuse.rewrite.matrix_products import (
    MatrixProduct,
    costs_more_to_join,
    grouped,
    immovable,
    insert_product,
    needs_copy,
    products,
    replace_by_slices,
    replace_product,
)
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten


@dataclass(frozen=True)
class Rows:
    """Left operands as rows of one matrix: ``base`` in rows of ``pitch`` elements, from ``start`` and ``column`` on.

    ``index[i]`` is the place of product i among them. ``interleaved``: row r of operand i is row ``r * count + i`` (the
    operands are parts along an inner dimension, ``x[:, i]``), otherwise row ``i * rows + r`` (``x[i]``).
    """

    base: Node
    pitch: int
    start: int
    column: int
    index: tuple[int, ...]
    interleaved: bool


@register_pass(stage="loops", after="merge_sibling_gemms")
def merge_shared_weight_gemms(graph: GraphModule) -> Iterator[Verdict]:
    """Merge matrix products that share their right operand."""
    escaping = effects.escaping(graph)
    candidates = [product for product in products(graph) if product.node.target is not aten.bmm.default]
    for group in grouped(candidates, lambda p: (p.right, p.bias, p.depth, p.factors)):
        nodes = [product.node for product in group]
        rows = consecutive_rows(group)
        copies = [needs_copy(product, spread(product, rows), escaping) for product in group]
        if reason := obstacle(group, rows, sum(copies)):
            yield declined(nodes, reason)
        elif rows:
            yield rewrite(nodes, merge_in_place, group, rows, copies)
        else:
            yield rewrite(nodes, merge_joined, group, copies)


def obstacle(group: Sequence[MatrixProduct], rows: Rows | None, copies: int) -> str | None:
    """Why these products cannot run as one, or None."""
    if not all(product.bias_is_row for product in group):
        return "the bias differs from row to row"
    launches_saved = len(group) - 1 - copies
    if rows:
        return None if launches_saved > 0 else "copying the results out costs as many launches as are saved"
    lefts = [product.left for product in group]
    if blocker := immovable(group, lefts):
        return f"{blocker.target} would have to run earlier"
    if costs_more_to_join(lefts, launches_saved - 1):
        return "joining the left operands costs more than the launches saved"
    return None


def consecutive_rows(group: Sequence[MatrixProduct]) -> Rows | None:
    """The left operands as rows of one matrix without a copy, or None if their layouts do not allow it."""
    base = effects.root(group[0].left)
    vals = [product.left.meta["val"] for product in group]
    if any(effects.root(product.left) is not base for product in group) or not base.meta["val"].is_contiguous():
        return None
    if any(val.dtype != base.meta["val"].dtype or val.is_conj() or val.is_neg() for val in vals):
        return None
    if any((val.size(), val.stride()) != (vals[0].size(), vals[0].stride()) for val in vals) or vals[0].stride(1) != 1:
        return None
    rows, width = vals[0].size()
    offsets = [val.storage_offset() - base.meta["val"].storage_offset() for val in vals]
    begins = sorted(set(offsets))
    gap = begins[1] - begins[0] if len(begins) > 1 else 0
    if not gap or begins != list(range(begins[0], begins[-1] + 1, gap)):
        return None
    interleaved = rows > 1 and vals[0].stride(0) == len(begins) * gap
    if not interleaved and rows > 1 and gap != rows * vals[0].stride(0):
        return None
    pitch = gap if interleaved or rows == 1 else vals[0].stride(0)
    start, column = divmod(begins[0], pitch)
    if base.meta["val"].numel() % pitch or column + width > pitch:
        return None
    index = tuple((offset - begins[0]) // gap for offset in offsets)
    return Rows(base, pitch, start, column, index, interleaved)


def spread(product: MatrixProduct, rows: Rows | None) -> list[int]:
    """The strides of the product's result as a part of the merged one."""
    step = max(rows.index) + 1 if rows and rows.interleaved else 1
    return [step * product.columns, 1]


def merge_in_place(group: Sequence[MatrixProduct], rows: Rows, copies: Sequence[bool]) -> None:
    """Run ``group`` as one product on a view of the common tensor of all left operands."""
    first = group[0]
    height, width = first.left.meta["val"].size()
    count = max(rows.index) + 1
    matrix = surgery.insert(first.node, aten.view.default, rows.base, [-1, rows.pitch])
    for dim, start, size in ((0, rows.start, height * count), (1, rows.column, width)):
        if matrix.meta["val"].size(dim) != size:
            matrix = surgery.insert(first.node, aten.slice.Tensor, matrix, dim, start, start + size)
    product = insert_product(first.node, first, matrix, first.right, first.bias)
    dim = 1 if rows.interleaved else 0
    shape = [height, count] if rows.interleaved else [count, height]
    stacked = surgery.insert(first.node, aten.view.default, product, [*shape, first.columns])
    parts = [
        surgery.insert(first.node, aten.select.int, stacked, dim, index, like=one.node)
        for one, index in zip(group, rows.index, strict=True)
    ]
    for one, part, copy in zip(group, parts, copies, strict=True):
        replace_product(one, part, copy)


def merge_joined(group: Sequence[MatrixProduct], copies: Sequence[bool]) -> None:
    """Run ``group`` as one product on the concatenated left operands."""
    first = group[0]
    lefts = [product.left for product in group]
    surgery.hoist(lefts, first.node)
    joined = surgery.insert(first.node, aten.cat.default, lefts)
    product = insert_product(first.node, first, joined, first.right, first.bias)
    replace_by_slices(group, product, 0, copies)
