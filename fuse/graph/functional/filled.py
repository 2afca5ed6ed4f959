"""Tensors made before a loop that its steps fill, one position a step, and do not read.

    for t in range(T): out[t] = h[t]      ->      out = stack([h[0], ..., h[T - 1]])

    place = select(out, 0, t)
    copy_(place, h)

Declined where the positions do not follow one another, up or down, where a copy changes the dtype or broadcasts, and
where the step reads the position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fuse.graph.functional.call_templates import CallTemplate
from fuse.graph.functional.short_graphs import STEPS_KEPT
from fuse.graph.signature import Dispatch

aten = torch.ops.aten


@dataclass(frozen=True)
class Filled:
    """A tensor ``whole`` that steps fill: each selects a part along dimension ``dim``, and copies its result there.

    ``first``: the position that the first step fills. ``down``: whether positions decrease from step to step.
    """

    whole: Tensor
    dim: int
    first: int
    down: bool

    def bounds(self, count: int) -> tuple[int, int]:
        """The first place that ``count`` steps fill, and the one behind the last."""
        return (self.first - count + 1, self.first + 1) if self.down else (self.first, self.first + count)


def filled_by(
    calls: Sequence[Dispatch],
    templates: Sequence[CallTemplate],
    maker: Callable[[Tensor], tuple[int, int] | None],
    write: int,
    step: int,
) -> list[int] | None:
    """The operators that select the place which operator number ``write`` fills in ``step``; None if this is no such
    write.

    The first selects what is written. Nothing reads what the others select: autograd makes such views of what was
    written. ``maker``: step and number of the operator that made a tensor.
    """
    period = len(templates)
    typical = calls[step * period : (step + 1) * period]
    if templates[write].op is not aten.copy_.default:
        return None
    target, source, *_ = typical[write].args
    found = maker(target)
    if found is None or found[0] != step:
        return None
    place = found[1]
    view = typical[place]
    if view.op is not aten.select.int or len(view.args) != 3 or maker(view.args[0]) is not None:
        return None
    made = maker(source)
    if made is None or made[0] != step or not _is_piece(source, target):
        return None
    reads = [(j, one) for j, call in enumerate(typical) for one in _tensors(call.args)]
    idle = [j for j, one in reads if one is view.args[0] and j != place]
    readers = [(found[1], j) for j, one in reads if (found := maker(one)) is not None and found[1] in (place, *idle)]
    plain = all(templates[j].op is aten.select.int for j in idle)
    return [place, *idle] if plain and readers == [(place, write)] else None


def filled(place: int, calls: Sequence[Dispatch], period: int, count: int) -> Filled | None:
    """The tensor whose parts operator number ``place`` of a step selects; None if these are not one behind another.

    The places of ``count`` steps are known to be evenly spaced.
    """
    whole, dim, first = calls[place].args
    second, last = calls[period + place].args[2], calls[(count - 1) * period + place].args[2]
    if second - first not in (1, -1) or (first < 0) != (last < 0):
        return None
    dim %= whole.dim()
    return Filled(whole, dim, first % whole.shape[dim], second < first)


def values_filled(node: Node, count: int) -> list[Node]:
    """The last ``count`` values that were written to places of ``node``, a tensor."""
    values: list[Node] = []
    for _ in range(count):
        assert node.target is aten.select_scatter.default
        values.append(_written(node))
        node = node.args[0]  # type: ignore[assignment]
    return values[::-1]


def value_at(node: Node, dim: int, at: int) -> Node | tuple[Node, int, int]:
    """The value that was written to place ``at`` of ``node``; where none was, arguments of the ``select`` that reads
    it."""
    rank, extent = node.meta["val"].dim(), node.meta["val"].shape[dim]
    for _ in range(STEPS_KEPT):
        if node.target is not aten.select_scatter.default:
            break
        before, part, along, place = node.args
        assert isinstance(before, Node)
        assert isinstance(part, Node)
        assert isinstance(along, int)
        assert isinstance(place, int)
        if along % rank != dim:
            break
        if place % extent == at:
            value = _written(node)
            return value if _is_piece(value.meta["val"], part.meta["val"]) else (node, dim, at)
        node = before
    return node, dim, at


def _written(write: Node) -> Node:
    """The value that a ``select_scatter`` writes, before it is copied into the layout of its place."""
    before, value, *_ = write.args
    assert isinstance(value, Node)
    copied = value.target is aten.copy.default and value.args[0].args[:1] == (before,)  # type: ignore[union-attr]
    return value.args[1] if copied else value  # type: ignore[return-value]


def _is_piece(value: Tensor, place: Tensor) -> bool:
    """Whether a stack may take ``value`` for ``place``; with more dimensions, its layout could decide that of the
    whole."""
    return value.dtype == place.dtype and value.shape == place.shape and (value.dim() <= 2 or value.is_contiguous())


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    items = [item for one in args for item in (one if type(one) in (tuple, list) else (one,))]
    return [item for item in items if isinstance(item, Tensor)]
