"""Classify a step's reads of outside tensors: the same part in each step, or a part that moves by a constant stride.

x[0], x[1], x[2]            select(x, 0, 0 + 1 * t)
x[4:6], x[2:4], x[0:2]      select(windows, 0, 2 - 1 * t),  windows = unfold(x, 0, 2, 2): all parts stacked
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from fuse.graph.loop import StepInput
from fuse.loops.reads import Link, Obstacle, Read, below

aten = torch.ops.aten


@dataclass(frozen=True)
class Moved:
    """Step ``t`` reads ``select(how.dim, how.start + how.step * t)`` of ``windows`` (views) of ``source``."""

    source: Node
    windows: tuple[Link, ...]
    how: StepInput


@dataclass(frozen=True)
class _Cut:
    """A part of a tensor along ``dim``; ``whole``: the dimension is left out, as ``select`` does."""

    dim: int
    start: int
    width: int
    whole: bool


def outside_read(reads: Sequence[Read], middle: int) -> Node | tuple[Moved, tuple[Link, ...]] | Obstacle:
    """One outside operand over all steps: an invariant, or a moving part and its views in step ``middle``."""
    typical, before = reads[middle], reads[middle - 1]
    every = frozenset(range(len(reads)))
    if (typical.root, typical.links) == (before.root, before.links):
        odd = frozenset(k for k, r in enumerate(reads) if (r.root, r.links) != (typical.root, typical.links))
        if not odd:
            return typical.node
        same = all(reads[k].root is typical.root for k in odd)
        return Obstacle(f"is {'another part' if same else 'another outside value'} in some steps", odd)
    if typical.root is not before.root:
        return Obstacle("is a different outside value in each step", every)
    if len(typical.links) != len(before.links):
        return Obstacle("is read through other views in each step", every)
    moving = [i for i, (a, b) in enumerate(zip(typical.links, before.links, strict=True)) if a != b]
    if len(moving) != 1:
        return Obstacle("is read at positions that move along several dimensions", every)
    at = moving[0]
    source = below(typical.node, len(typical.links) - at)
    if not isinstance(source.meta["val"], torch.Tensor):
        return Obstacle("is another result of one operator in each step", every)
    cuts = [_cut(read, at, typical, source) for read in reads]
    last, previous = cuts[middle], cuts[middle - 1]
    if last is None or previous is None or last != _Cut(last.dim, last.start, previous.width, previous.whole):
        return Obstacle("is read through other views in each step", every)
    step = last.start - previous.start
    expected = [_Cut(last.dim, last.start + step * (k - middle), last.width, last.whole) for k in range(len(reads))]
    odd = frozenset(k for k, (cut, wanted) in enumerate(zip(cuts, expected, strict=True)) if cut != wanted)
    if odd:
        return Obstacle("is read at positions that are not evenly spaced", odd)
    return _moved(source, expected[0], step, len(reads), typical.links[at + 1 :])


def _moved(source: Node, cut: _Cut, step: int, count: int, links: tuple[Link, ...]) -> tuple[Moved, tuple[Link, ...]]:
    """The tensor from which each step selects its part, and the views of the part."""
    if cut.whole:
        return Moved(source, (), StepInput(cut.dim, cut.start, step)), links
    if cut.width == 1:
        back: Link = (aten.unsqueeze.default, (cut.dim,), ())
        return Moved(source, (), StepInput(cut.dim, cut.start, step)), (back, *links)
    low = min(cut.start, cut.start + step * (count - 1))
    end = low + abs(step) * (count - 1) + cut.width
    windows: tuple[Link, ...] = (
        (aten.slice.Tensor, (cut.dim, low, end), ()),
        (aten.unfold.default, (cut.dim, cut.width, abs(step)), ()),
    )
    how = StepInput(cut.dim, 0 if step > 0 else count - 1, 1 if step > 0 else -1)
    rank = source.meta["val"].dim()  # the last dimension of a part goes back to where it was cut
    order = [*range(cut.dim), rank - 1, *range(cut.dim, rank - 1)]
    return Moved(source, windows, how), ((aten.permute.default, (tuple(order),), ()), *links)


def _cut(read: Read, at: int, typical: Read, source: Node) -> _Cut | None:
    """The part of ``source`` that view ``at`` of ``read`` selects; None if its other views differ from ``typical``."""
    links = typical.links
    if read.root is not typical.root or len(read.links) != len(links):
        return None
    if read.links[:at] != links[:at] or read.links[at + 1 :] != links[at + 1 :]:
        return None
    op, args, kwargs = read.links[at]
    shape = source.meta["val"].shape
    if kwargs or not all(isinstance(a, int) for a in args):
        return None
    if op is aten.select.int:
        dim, start = (int(a) for a in args)  # type: ignore[call-overload]
        return _Cut(dim % len(shape), start % shape[dim], 1, True)
    if op is aten.slice.Tensor and (len(args) == 3 or args[3:] == (1,)):
        dim = int(args[0]) % len(shape)  # type: ignore[call-overload]
        start, end, _ = slice(args[1], args[2]).indices(shape[dim])
        return _Cut(dim, start, end - start, False)
    return None
