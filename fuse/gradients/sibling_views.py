"""Find slices that together make up a tensor, so that autograd sees one operation.

    a = slice(x, 1, 0, 4);  b = slice(x, 1, 4, 8)        ->      a, b = split(x, 4, 1)

Each part is a view of its own in the graph. Autograd pads the gradients of such views and adds them, but concatenates
those of one ``split`` or ``unbind``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

aten = torch.ops.aten


SlicedDimension = tuple[Node, Any, int]
"""A tensor, the operator that takes parts of it, and the dimension."""


def all_parts(node: Node, refused: set[SlicedDimension]) -> list[Node]:
    """The slices (or steps), with ``node`` among them, that make up a whole dimension in order; empty if none do.

    ``refused`` collects cuts that do not, so that each is examined once.
    """
    if node.target not in (aten.slice.Tensor, aten.select.int):
        return []
    cut = (node.args[0], node.target, _dimension(node))
    if cut in refused:
        return []
    parts = _whole(*cut)  # type: ignore[arg-type]  # the first argument is a node
    if not parts:
        refused.add(cut)  # type: ignore[arg-type]  # likewise
    return parts


def _whole(base: Node, target: Any, dim: int) -> list[Node]:
    size = base.meta["val"].shape
    found: dict[int, tuple[int, Node]] = {}
    for user in base.users:
        if user.target is target and user.args[0] is base and _dimension(user) == dim:
            low, high = _bounds(user, size[dim])
            if low >= high or found.setdefault(low, (high, user))[1] is not user:
                return []
    parts: list[Node] = []
    at = 0
    while at in found:
        at, part = found.pop(at)
        parts.append(part)
    return parts if at == size[dim] and not found and len(parts) > 1 else []


def parts_of(whole: Tensor, parts: Sequence[Node]) -> Sequence[Tensor]:
    """The values of ``parts``, taken from ``whole`` in one operation."""
    dim = _dimension(parts[0])
    if parts[0].target is aten.select.int:
        return torch.unbind(whole, dim)
    return torch.split(whole, [part.meta["val"].shape[dim] for part in parts], dim)


def _dimension(part: Node) -> int:
    position = part.args[1] if len(part.args) > 1 else 0
    rank: int = part.args[0].meta["val"].dim()  # type: ignore[union-attr]  # FX types arguments loosely
    return int(position) % rank  # type: ignore[arg-type]  # FX types arguments loosely


def _bounds(part: Node, size: int) -> tuple[int, int]:
    """Start and end of ``part`` in its dimension; an empty range if it has gaps."""
    if part.target is aten.select.int:
        at = int(part.args[2]) % size  # type: ignore[arg-type]  # FX types arguments loosely
        return at, at + 1
    given: list[Any] = list(part.args[2:])
    low, high, step = given + [None, None, 1][len(given) :]
    if part.kwargs or step != 1:
        return 0, 0
    start, end, _ = slice(low, high).indices(size)
    return start, end
