"""Read the piece of a concatenation instead of the concatenation.

    tokens = cat([tokens, new], 1)            tokens = cat([tokens, new], 1)
    last = select(tokens, 1, -1)        ->    last = select(new, 1, 0)

A decoder may keep all of its tokens in one tensor, and read the last one from there. Each step then reads a tensor of
another size. Once it reads its own token, the concatenations only collect results, and the loop can be rolled.

A read is a candidate if it lies within one piece. Declined where the steps of a loop may each read another part of one
concatenation, which the loop then reads step by step (random numbers that are drawn ahead); where the dtype or the
layout of the piece would become visible; and where the caller receives the read. A stack of which all pieces are read,
such as the last states of layers, stays: each step has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse.loops.collectors import COLLECTORS, dimension_of, pieces_of
from fuse.loops.rolling import LEAST_STEPS
from fuse.passes.forward_writes import READS, keep_layouts_of_copies, shows
from fuse.rewrite import effects, surgery, view_layouts
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite
from fuse.rewrite.writes import dimension, span

aten = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """Positions ``start`` to ``end`` of ``piece``; ``start`` is None for the whole piece."""

    piece: Node
    start: int | None = None
    end: int = 0


@register_pass(stage="clean", after="collect_writes")
def forward_pieces(graph: GraphModule) -> Iterator[Verdict]:
    """Read the piece of a concatenation instead of the concatenation."""
    escaping = effects.escaping(graph)
    for node in list(graph.graph.nodes):
        if node.target in COLLECTORS:
            found = [(read, part_of(read, node)) for read in node.users if read.target in READS]
            parts = {read: part for read, part in found if part is not None}
            if node.target is aten.stack.default and len({*parts.values()}) == len(pieces_of(node)):
                continue
            if len({*parts.values()}) >= LEAST_STEPS:
                yield declined(list(parts), "steps of a loop may each read another part")
                continue
            for read, part in parts.items():
                if reason := obstacle(read, part, escaping):
                    yield declined(read, reason)
                else:
                    yield rewrite(read, forward, read, part)


def part_of(read: Node, collector: Node) -> Part | None:
    """The part of a piece of ``collector`` that ``read`` has; None if it is not of one piece."""
    dim, (start, end) = dimension_of(collector), span(read)
    if dimension(read) != dim or start == end:
        return None
    if collector.target is aten.stack.default:
        return Part(pieces_of(collector)[start]) if read.target is aten.select.int else None
    for piece in pieces_of(collector):
        value: Tensor = piece.meta["val"]
        extent = value.shape[dim] if value.dim() > dim else 0  # cat passes over a vector without elements
        if start < extent:
            whole = read.target is aten.slice.Tensor and (start, end) == (0, extent)
            return (Part(piece) if whole else Part(piece, start, end)) if end <= extent else None
        start, end = start - extent, end - extent
    return None


def arguments(read: Node, part: Part) -> tuple[Any, ...]:
    """The arguments of the view that reads ``part`` of its piece."""
    return (dimension(read), part.start, *([part.end] if read.target is aten.slice.Tensor else []))


def obstacle(read: Node, part: Part, escaping: set[Node]) -> str | None:
    """Why ``read`` cannot read its piece, or None."""
    value, new = read.meta["val"], view_layouts.without_data(part.piece.meta["val"])
    if read in escaping:
        return "the caller receives the read, which shares memory with the concatenation"
    if value.dtype != new.dtype:
        return "the piece has another dtype"
    if part.start is not None:
        new = view_layouts.view(read.target, new, arguments(read, part))  # type: ignore[arg-type]  # FX types targets loosely
    return None if new.stride() == value.stride() else shows(read, new)


def forward(read: Node, part: Part) -> None:
    """Let the users of ``read`` have its part of a piece."""
    keep_layouts_of_copies(read)
    new = part.piece
    if part.start is not None:
        new = surgery.insert(read, read.target, new, *arguments(read, part))  # type: ignore[arg-type]  # FX types targets loosely
    surgery.replace(read, new)
