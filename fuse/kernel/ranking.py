"""``topk`` in a step of a loop: the positions of the largest elements of a row, and a look-up of these elements.

for rows (parallel):
    for columns: ROW[column] = x
    rank ROW into BEST
    for places: store BEST[place]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from fuse.kernel.dtypes import register
from fuse.kernel.elements import Builder
from fuse.kernel.extents import pinned
from fuse.kernel.index import Affine, offset
from fuse.kernel.ir import Buffer, Declare, Load, Rank, Statement, Store
from fuse.kernel.lookups import along_a_dimension
from fuse.kernel.nest import Dimension, Sink
from fuse.kernel.recipes import Call, Result, Unsupported
from fuse.kernel.values import Input, Ranked, Value

aten = torch.ops.aten

LONGEST_ROW = 4096
"""Most elements that are ranked: a thread holds them, with their positions, in 96 KB of its stack and heap. Selecting
among more takes tens of microseconds, beside which a call of the library is short."""


def largest_of(call: Call, keep: Callable[[Value], Input]) -> Result:
    """The results of ``topk``: elements and positions. ``keep`` stores a value before any is read."""
    source, held = call.tensor("self"), call.result
    if not source.shape or source.dtype is torch.bool:
        raise Unsupported("topk is taken of a tensor without dimensions, or of bools")
    dim = call["dim"] % len(source.shape)
    if not 0 < pinned(call["k"]) <= pinned(source.shape[dim]) <= LONGEST_ROW:
        raise Unsupported(f"topk is taken of rows of more than {LONGEST_ROW:,} elements, or of no element")
    table = keep(source)
    shape = tuple(held[1].shape)
    positions = keep(Ranked(shape, torch.int64, table, dim, call["largest"], call["sorted"]))
    looked_up = {"self": table, "dim": dim, "index": positions}
    elements = along_a_dimension(Call(aten.gather.default, looked_up, held[0]))
    return elements, positions


def rank_nest(
    target: Sink, inputs: list[Buffer], names: Mapping[int, str], dimensions: Sequence[Dimension]
) -> list[Statement]:
    """The loops that store ``target``, whose value is ranked; ``dimensions`` are those of its source.

    Raises:
        SplitNeeded, NotAffine: see :mod:`fuse.kernel.index`.
    """
    ranked = target.value
    assert isinstance(ranked, Ranked)
    count, length = (pinned(shape[ranked.dim]) for shape in (ranked.shape, ranked.source.shape))
    extents = {a: e for d in dimensions for a, e in zip(d.atoms, d.extents, strict=True)}
    builder = Builder(inputs, {**extents, "place": count, "column": length}, names)
    row = Buffer(builder.fresh("ROW"), register(ranked.source.dtype), "scratch", length)
    best = Buffer(builder.fresh("BEST"), torch.int64, "scratch", count)
    rows = [atom for d, dimension in enumerate(dimensions) if d != ranked.dim for atom in dimension.atoms]

    def at(atom: str) -> tuple[Affine, ...]:
        return tuple(Affine.of(atom) if d == ranked.dim else one.index() for d, one in enumerate(dimensions))

    for atom in rows:
        builder.open(atom, "parallel")
    builder.add(Declare(row))
    builder.add(Declare(best))
    builder.open("column", "serial")
    builder.add(Store(row, Affine.of("column"), builder.element(ranked.source, at("column"))))
    builder.close()
    builder.add(Rank(best, row, ranked.largest, ranked.ordered))
    builder.open("place", "serial")
    found = Load(builder.fresh("position"), best, Affine.of("place"))
    builder.add(found)
    builder.add(Store(target.buffer, offset(at("place"), target.strides) + target.start, found.variable))
    builder.close()
    for _ in rows:
        builder.close()
    return builder.blocks[0].statements
