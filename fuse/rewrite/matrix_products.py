"""Matrix products for the passes that merge them: operands, independence, and whether a result's layout is visible."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuse.cost import profiles
from fuse.rewrite import effects, surgery, view_layouts

aten = torch.ops.aten

PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


@dataclass(frozen=True)
class MatrixProduct:
    """``left @ right``, plus a ``bias`` for ``addmm``; ``factors`` are its ``alpha`` and ``beta``.

    ``depth``: the largest number of products on a path to this one, itself included; products of equal depth are
    independent. The operands are read from the node, because merging other products may have replaced them.
    """

    node: Node
    factors: tuple[tuple[str, float], ...]
    depth: int

    @property
    def left(self) -> Node:
        return self.node.args[-2]  # type: ignore[return-value]  # FX types arguments loosely

    @property
    def right(self) -> Node:
        return self.node.args[-1]  # type: ignore[return-value]  # FX types arguments loosely

    @property
    def bias(self) -> Node | None:
        return self.node.args[0] if len(self.node.args) == 3 else None  # type: ignore[return-value]  # FX types arguments loosely

    @property
    def columns(self) -> int:
        """The size of the result's last dimension."""
        return int(self.node.meta["val"].size(-1))

    @property
    def bias_is_row(self) -> bool:
        """Whether there is no bias, or one number for each column."""
        return self.bias is None or tuple(self.bias.meta["val"].size()) == (self.columns,)


def transposed(node: Node) -> Node | None:
    """The matrix that ``node`` is a transposed view of; None for any other node."""
    if node.target not in (aten.t.default, aten.transpose.int, aten.permute.default):
        return None
    base: Node = node.args[0]  # type: ignore[assignment]  # FX types arguments loosely
    if base.meta["val"].dim() != 2:
        return None
    turned, value = base.meta["val"].t(), node.meta["val"]
    return base if (turned.shape, turned.stride()) == (value.shape, value.stride()) else None


def products(graph: GraphModule) -> list[MatrixProduct]:
    """All matrix products of ``graph`` in program order."""
    depth: dict[Node, int] = {}
    found = []
    for node in graph.graph.nodes:
        depth[node] = max((depth[operand] for operand in node.all_input_nodes), default=0)
        if node.target in PRODUCTS:
            depth[node] += 1
            factors = tuple((name, value) for name, value in sorted(node.kwargs.items()) if value != 1)
            found.append(MatrixProduct(node, factors, depth[node]))
    return found


def grouped(items: Iterable[MatrixProduct], key: Callable[[MatrixProduct], Hashable]) -> list[list[MatrixProduct]]:
    """The items grouped by key, without groups of one, each in program order."""
    groups: dict[Hashable, list[MatrixProduct]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return [group for group in groups.values() if len(group) > 1]


def immovable(group: Sequence[MatrixProduct], operands: Iterable[Node]) -> Node | None:
    """The first node that would have to move before the first product of ``group`` but must not, or None."""
    moved = surgery.ancestors_after(operands, group[0].node)
    return next((node for node in moved if not effects.is_pure(node)), None)


def needs_copy(product: MatrixProduct, stride: Sequence[int], escaping: set[Node]) -> bool:
    """Whether it would be visible that the product's result is a part, with these strides, of a larger tensor.

    It is if the model returns the result, and if a view of it is impossible with these strides.
    """
    if product.node in escaping:
        return True
    return not _views_work(product.node, view_layouts.without_data(product.node.meta["val"], stride))


def _views_work(node: Node, val: Any) -> bool:
    """Whether all views of ``node`` are possible if its value has the layout of ``val``."""
    if effects.reads_place(node):
        return False
    for user in surgery.views_of(node):
        target: Any = user.target
        view = view_layouts.view(target, val, user.args[1:], user.kwargs)
        if view is None or not _views_work(user, view):
            return False
    return True


def costs_more_to_join(nodes: Sequence[Node], launches: int) -> bool:
    """Whether concatenating ``nodes`` takes longer than ``launches`` launches."""
    profile = profiles.of_device(nodes[0].meta["val"].device.type)
    return 2 * size_in_bytes(nodes) > int(launches * profile.launch_seconds * profile.bytes_per_second)


def size_in_bytes(nodes: Iterable[Node]) -> int:
    """The bytes of all values of ``nodes``."""
    return sum(node.meta["val"].numel() * node.meta["val"].element_size() for node in nodes)


def insert_product(before: Node, like: MatrixProduct, left: Node, right: Node, bias: Node | None) -> Node:
    """Insert a product of the same kind and factors as ``like``."""
    target = like.node.target
    assert isinstance(target, torch._ops.OpOverload)
    operands = (left, right) if bias is None else (bias, left, right)
    return surgery.insert(before, target, *operands, like=like.node, **dict(like.factors))


def replace_product(product: MatrixProduct, part: Node, copy: bool) -> None:
    """Replace ``product`` by ``part`` of a larger product, or by a ``copy`` of the part."""
    if copy:
        part = surgery.insert(
            product.node, aten.clone.default, part, like=product.node, memory_format=torch.contiguous_format
        )
    surgery.replace(product.node, part)


def replace_by_slices(group: Sequence[MatrixProduct], joined: Node, dim: int, copies: Sequence[bool]) -> None:
    """Replace the products by the slices of ``joined`` along ``dim`` that have their values, in order, or by copies."""
    first, start, parts = group[0].node, 0, []
    for one in group:
        end = start + one.node.meta["val"].size(dim)
        parts.append(surgery.insert(first, aten.slice.Tensor, joined, dim, start, end, like=one.node))
        start = end
    for one, part, copy in zip(group, parts, copies, strict=True):
        replace_product(one, part, copy)
