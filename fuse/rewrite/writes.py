"""Functional writes into parts of a tensor: their positions and values.

select_scatter(out, copy(place, value), 1, t)        writes value to position t of dimension 1
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fuse.rewrite import surgery

aten = torch.ops.aten
WRITES = (aten.select_scatter.default, aten.slice_scatter.default)
COPIES = (aten.copy.default, aten.fill.Tensor)


def written(write: Node) -> Node:
    """The written value, before it is copied into the layout of its place."""
    value: Node = write.args[1]  # type: ignore[assignment]  # FX types arguments loosely
    return value.args[1] if value.target in COPIES else value  # type: ignore[return-value]  # FX types arguments loosely


def piece(write: Node, before: Node) -> Node:
    """The written value as a node before ``before``, in the tensor's dtype and the shape of its place."""
    value, place = written(write), write.args[1].meta["val"]  # type: ignore[union-attr]  # FX types arguments loosely
    dtype = write.meta["val"].dtype
    if value.meta["val"].dtype != dtype:
        value = surgery.insert(before, aten._to_copy.default, value, like=write, dtype=dtype)
    if value.meta["val"].shape != place.shape:
        value = surgery.insert(before, aten.expand.default, value, list(place.shape), like=write)
    return value


def dimension(node: Node) -> int:
    """The dimension of a write, or of the view that reads its place."""
    default = 0 if node.target in (aten.slice_scatter.default, aten.slice.Tensor) else None
    rank: int = _whole(node).dim()
    return int(_argument(node, 0, "dim", default)) % rank


def span(node: Node) -> tuple[int, int]:
    """The first position of the part, and the position after the last; an empty span for a part with steps."""
    extent = _whole(node).shape[dimension(node)]
    if node.target in (aten.select_scatter.default, aten.select.int):
        index = _argument(node, 1, "index", None) % extent
        return index, index + 1
    bounds = slice(_argument(node, 1, "start", None), _argument(node, 2, "end", None), _argument(node, 3, "step", 1))
    start, end, step = bounds.indices(extent)
    return (start, end) if step == 1 else (start, start)


def _whole(node: Node) -> torch.Tensor:
    whole: torch.Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]  # FX types arguments loosely
    return whole


def _argument(node: Node, position: int, name: str, default: Any) -> Any:
    """An argument by its position behind the tensors, or by name."""
    at = position + (2 if node.target in WRITES else 1)
    return node.args[at] if len(node.args) > at else node.kwargs.get(name, default)


def only_a_place(read: Node) -> bool:
    """Whether ``read`` only names the place of a copy: nothing reads its values."""
    return all(user.target in COPIES and user.args[0] is read and user.args[1] is not read for user in read.users)
