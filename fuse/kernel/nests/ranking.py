"""``topk`` and ``sort`` in a step of a loop: the positions of the largest elements of a row, and a look-up of these.

for rows (parallel):
    for columns: ROW[column] = x
    rank ROW into BEST
    for places: store BEST[place]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fuse.kernel.arithmetic.dtypes import register
from fuse.kernel.arithmetic.extents import pinned
from fuse.kernel.arithmetic.index import Affine, offset
from fuse.kernel.elements import Builder
from fuse.kernel.ir import Buffer, Declare, Load, Rank, Statement, Store
from fuse.kernel.nest import Dimension, Sink
from fuse.kernel.recipes.lookups import along_a_dimension
from fuse.kernel.recipes.registry import Call, Result, Unsupported
from fuse.kernel.values import Input, Ranked, RankOrder, Value

aten = torch.ops.aten

LONGEST_ROW = 4096
"""Most elements that are ranked: a thread holds them, with their positions, in 96 KB of its stack and heap. Selecting
among more takes tens of microseconds, beside which a call of the library is short."""


OPS = frozenset({aten.topk.default, aten.sort.default, aten.sort.stable})
EQUALS = 20
"""Elements of a row of equal ones by which the order of the library's ``sort`` is known; up to 16 keep their places."""
PARTED = (10, *range(19, 10, -1), 0, *range(9, 0, -1))
"""The positions of such a row after ``std::sort``."""


def ranked(call: Call, keep: Callable[[Value], Input]) -> Result:
    """The results of an operator in ``OPS``: elements and positions. ``keep`` stores a value before any is read."""
    source, held, name = call.tensor("self"), call.result, call.op.overloadpacket.__name__
    if not source.shape or source.dtype is torch.bool:
        raise Unsupported(f"{name} is taken of a tensor without dimensions, or of bools")
    dim = call["dim"] % len(source.shape)
    shape = tuple(held[1].shape)
    if not 0 < pinned(shape[dim]) <= pinned(source.shape[dim]) <= LONGEST_ROW:
        raise Unsupported(f"{name} is taken of rows of more than {LONGEST_ROW:,} elements, or of no element")
    table = keep(source)
    positions = keep(Ranked(shape, torch.int64, table, dim, *_order(call)))
    looked_up = {"self": table, "dim": dim, "index": positions}
    elements = along_a_dimension(Call(aten.gather.default, looked_up, held[0]))
    return elements, positions


def _order(call: Call) -> tuple[bool, RankOrder]:
    """Whether the largest come first, and the order of equal elements."""
    if call.op is aten.topk.default:
        return call["largest"], "topk" if call["sorted"] else "any"
    if call.op is aten.sort.stable and call["stable"]:
        return call["descending"], "stable"
    order = _library_order()
    if order is None:
        raise Unsupported("sort leaves equal elements in an order that no kernel knows")
    return call["descending"], order


@cache
def _library_order() -> RankOrder | None:
    """The order in which ``sort`` leaves equal elements."""
    with unset_fake_temporarily():
        places = tuple(torch.zeros(EQUALS).sort().indices.tolist())
    orders: dict[tuple[int, ...], RankOrder] = {tuple(range(EQUALS)): "stable", PARTED: "sort"}
    return orders.get(places)


def rank_nest(
    target: Sink, inputs: list[Buffer], names: Mapping[int, str], dimensions: Sequence[Dimension]
) -> list[Statement]:
    """The loops that store ``target``, whose value is ranked; ``dimensions`` are those of its source.

    Raises:
        SplitNeeded, NotAffine: see :mod:`fuse.kernel.arithmetic.index`.
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
    builder.add(Rank(best, row, ranked.largest, ranked.order))
    builder.open("place", "serial")
    found = Load(builder.fresh("position"), best, Affine.of("place"))
    builder.add(found)
    builder.add(Store(target.buffer, offset(at("place"), target.strides) + target.start, found.variable))
    builder.close()
    for _ in rows:
        builder.close()
    return builder.blocks[0].statements
