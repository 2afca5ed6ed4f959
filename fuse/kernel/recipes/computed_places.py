"""Recipes of operators that write at computed positions: ``index_put``, ``index_copy``, ``index_add``, ``scatter``.

    index_copy(x, 0, i, y)   ->   y[0] where row == i[0], else x                       one row
    index_put(x, [i], 1)     ->   1 where row is any of i, else x                      one number at many positions
    scatter(x, 0, i, y)      ->   y[k] of the last k where row == i[k], else x         many numbers, the last one stays
    index_add(x, 0, i, y)    ->   x + sum over k of (y[k] where row == i[k], else 0)   many rows, added
    scatter_reduce(x, 0, i, y, "amax")                                                 many numbers, the largest stays

Every element is computed, and compares its place with the positions. Positions are checked as those of look-ups,
because the element that was there is looked up. Declined for several rows that ``index_put`` or ``index_copy``
write, whose order ATen does not promise where positions are equal, and where comparing would take longer than
writing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from fuse.kernel.arithmetic.expressions import Parameter, fn, select
from fuse.kernel.arithmetic.extents import pinned
from fuse.kernel.arithmetic.index import Index
from fuse.kernel.ir import identity
from fuse.kernel.recipes.lookups import positions_of, strides_of, table_of, together
from fuse.kernel.recipes.reductions import reduce as reduced
from fuse.kernel.recipes.reductions import total
from fuse.kernel.recipes.registry import Call, Unsupported, apply, choice, convert, recipe, rounded
from fuse.kernel.values import Constant, Gather, Input, Iota, Map, ReduceOp, Reindex, Shape, Value, expand, view

aten = torch.ops.aten

MOST_COMPARED = 2**16
"""The most elements of a result times the positions that each is compared with."""
MOST_ADDED = 2**13
"""The same where values are added, or one of them is chosen.

On a thread of an EPYC, ``tanh(zeros.index_add(...))`` took 12 us as a kernel of 4,096 comparisons and 26 us as one of
16,384; in three library calls it took 10 and 13 us.
"""


@dataclass(frozen=True)
class _Places:
    """Where an operator writes.

    ``positions`` are positions along dimension ``dim`` of ``table``; ``here`` has that of each element. ``several`` is
    the shape of the positions that an element is compared with; ``at`` and ``rest`` map the element's index, ``at``
    with the index into ``several``, to those into ``positions`` and into the other dimensions of ``table``.
    """

    table: Input | Constant
    dim: int
    positions: Value
    wraps: bool
    here: Value
    several: Shape
    at: Callable[[Index, Index], Index]
    rest: Callable[[Index], Index]

    def compared(self, shape: Shape) -> tuple[Value, Value]:
        """Whether elements of ``shape``, which ends in ``several``, are written, and what was there."""
        rank = len(shape) - len(self.several)

        def position_index(index: Index) -> Index:
            return self.at(index[:rank], index[rank:])

        before = Gather(
            shape,
            self.table.dtype,
            self.table,
            self.positions,
            self.dim,
            position_index,
            lambda index: self.rest(index[:rank]),
            self.wraps,
        )
        at: Value = Reindex(shape, torch.int64, self.positions, lambda index, extents: position_index(index))
        if self.wraps:
            extent = self.table.shape[self.dim]
            at = apply(lambda position: select(position < 0, position + extent, position), [at], torch.int64, shape)
        here = Reindex(shape, torch.int64, self.here, lambda index, extents: index[:rank])
        equal = fn.equal(Parameter(torch.int64, 0), Parameter(torch.int64, 1))
        return Map(shape, torch.bool, equal, (here, at, before)), before


def _written(call: Call, places: _Places, piece: Value, piece_at: Callable[[Index, Index], Index], adds: bool) -> Value:
    """The written tensor. ``piece_at`` maps an element's index, with the index into ``several``, to that of the value
    for it."""
    shape, dtype, whole = call.shape, call.dtype, call.tensor("self")
    if whole.dtype != dtype or piece.dtype != dtype or (dtype is torch.bool and adds):
        raise Unsupported("the written values have another dtype than the tensor")
    count, rank = math.prod(places.several), len(shape)
    one = isinstance(piece, Constant) or math.prod(piece.shape) == 1
    in_order = call.op is aten.scatter.src
    if count > 1 and not (adds or one or in_order):
        raise Unsupported("several rows are written at computed positions")
    if count > 1 and count * math.prod(shape) > (MOST_COMPARED if one and not adds else MOST_ADDED):
        raise Unsupported("comparing every element with so many positions takes longer than writing")
    compared = (*shape, *places.several)
    written, before = places.compared(compared)
    value: Value = Reindex(compared, dtype, piece, lambda index, extents: piece_at(index[:rank], index[rank:]))
    if count == 1:
        hit, new = view(written, shape), view(value, shape)
        return choice(hit, apply(operator.add, [view(before, shape), new], dtype, shape) if adds else new, whole)
    several = range(rank, len(compared))
    hit = view(reduced(written, several, "any"), shape)
    if one and not adds:
        return choice(hit, expand(view(piece, ()), shape), whole)
    if not adds:  # of one element and many identities; a sum with zeros would lose the sign of a zero
        none = Constant(compared, dtype, identity("max", dtype).number)
        last = reduced(choice(_last(written, rank), value, none), several, "max")
        return choice(hit, view(last, shape), whole)
    added = total(choice(written, value, Constant(compared, dtype, 0)), several)
    return choice(hit, convert(apply(operator.add, [whole, view(added, shape)], added.dtype, shape), dtype), whole)


def _combined(
    call: Call, places: _Places, piece: Value, piece_at: Callable[[Index, Index], Index], how: str, with_self: bool
) -> Value:
    """The tensor whose elements are the ``sum``, ``mean``, ``amax`` or ``amin`` of the values for them, and of
    themselves if ``with_self``; elements without values stay."""
    shape, dtype, whole = call.shape, call.dtype, call.tensor("self")
    if {whole.dtype, piece.dtype} != {dtype} or not dtype.is_floating_point or how == "prod":
        raise Unsupported(f"values are combined by {how}, or are not of one floating dtype")
    compared, rank = (*shape, *places.several), len(shape)
    if math.prod(compared) > MOST_ADDED:
        raise Unsupported("comparing every element with so many positions takes longer than writing")
    written, _ = places.compared(compared)
    value: Value = Reindex(compared, dtype, piece, lambda index, extents: piece_at(index[:rank], index[rank:]))
    several = range(rank, len(compared))
    hit = view(reduced(written, several, "any"), shape)
    if how in ("amax", "amin"):
        op: ReduceOp = "max" if how == "amax" else "min"
        none = Constant(compared, dtype, identity(op, dtype).number)
        found = view(reduced(choice(written, value, none), several, op), shape)
        both = apply(fn.maximum if op == "max" else fn.minimum, [whole, found], dtype, shape) if with_self else found
        return choice(hit, both, whole)
    added = view(total(choice(written, value, Constant(compared, dtype, 0)), several), shape)
    if with_self:
        added = apply(operator.add, [whole, added], added.dtype, shape)
    if how == "mean":
        count = view(total(convert(written, dtype), several), shape)
        added = apply(lambda a, n: a / (n + float(with_self)), [added, count], added.dtype, shape)
    return choice(hit, convert(added, dtype), whole)


def _last(written: Value, dim: int) -> Value:
    """Where ``written`` is true for the last time along its last dimension ``dim``."""
    order = Iota(written.shape, torch.int64, dim, 0, 1)
    last = reduced(choice(written, order, Constant(written.shape, torch.int64, -1)), (dim,), "max")
    equal = fn.equal(Parameter(torch.int64, 0), Parameter(torch.int64, 1))
    return Map(written.shape, torch.bool, equal, (order, expand(last, written.shape)))


def _share_memory(table: Input | Constant, dims: Sequence[int]) -> bool:
    """Whether two positions in ``dims``, whose sizes are known, may be one place in memory."""
    reached = 0
    for stride, extent in sorted((pinned(strides_of(table)[d]), pinned(table.shape[d])) for d in dims):
        if extent > 1 and stride <= reached:
            return True
        reached += (extent - 1) * stride
    return False


@recipe("index_copy", "index_add", "index_fill.int_Scalar")
def along_a_dimension(call: Call) -> Value:
    """Slices at a vector of positions."""
    table, positions = table_of(call, "self"), positions_of(call.tensor("index"))
    if not table.shape or call.arguments.get("alpha", 1) != 1:
        raise Unsupported("a tensor without dimensions is indexed, or alpha is not 1")
    dim = call["dim"] % len(table.shape)
    places = _Places(
        table,
        dim,
        view(positions, (math.prod(positions.shape),)),
        False,
        Iota(call.shape, torch.int64, dim, 0, 1),
        (math.prod(positions.shape),),
        lambda index, among: among,
        lambda index: index[:dim] + index[dim + 1 :],
    )
    return _written(call, places, *_piece(call, dim), call.op._opname == "index_add")


@recipe("scatter.src", "scatter.value", "scatter_add", "scatter_reduce.two")
def each_element(call: Call) -> Value:
    """Elements, each at its own position along a dimension."""
    table, positions = table_of(call, "self"), positions_of(call.tensor("index"))
    if not table.shape:
        raise Unsupported("a tensor without dimensions is indexed")
    dim = call["dim"] % len(table.shape)
    count = positions.shape[dim]
    if positions.shape != (*table.shape[:dim], count, *table.shape[dim + 1 :]):
        raise Unsupported("the positions cover only a part of the tensor")
    places = _Places(
        table,
        dim,
        positions,
        False,
        Iota(call.shape, torch.int64, dim, 0, 1),
        (count,),
        lambda index, among: (*index[:dim], *among, *index[dim + 1 :]),
        lambda index: index[:dim] + index[dim + 1 :],
    )
    if call.op is aten.scatter_reduce.two:
        return _combined(call, places, *_piece(call, dim), call["reduce"], call["include_self"])
    return _written(call, places, *_piece(call, dim), call.op._opname == "scatter_add")


def _piece(call: Call, dim: int) -> tuple[Value, Callable[[Index, Index], Index]]:
    """The values that are written, and the index of the value for an element and a position."""
    name = next((name for name in ("source", "src") if name in call.arguments), None)
    if name is None:
        return Constant((), call.dtype, rounded(call["value"], call.dtype)), lambda index, among: ()
    piece = call.tensor(name)
    if len(piece.shape) != len(call.shape):
        raise Unsupported("the written values have another number of dimensions than the tensor")
    if call.op._opname.startswith("scatter") and piece.shape != call.tensor("index").shape:
        raise Unsupported("there are more values than positions")
    return piece, lambda index, among: (*index[:dim], *among, *index[dim + 1 :])


@recipe("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(call: Call) -> Value:
    """``x[:, positions] = values`` and ``x[first, second] = values``; a boolean mask has no kernel."""
    table, indices = table_of(call, "self"), call["indices"]
    used = [d for d, positions in enumerate(indices) if positions is not None]
    if used != list(range(used[0], used[-1] + 1)):
        raise Unsupported("the indexed dimensions are not neighbours")
    positions, wraps, dim = positions_of(indices[used[0]]), len(used) == 1, used[0]
    here: Value = Iota(call.shape, torch.int64, dim, 0, 1)
    joined = table
    if not wraps:
        joined, positions = together(table, used, [positions_of(indices[d]) for d in used])
        if _share_memory(table, used):
            raise Unsupported("elements of the written tensor share memory")
        steps = [pinned(stride) for stride in strides_of(table) if isinstance(stride, int)]
        rows = [Iota(call.shape, torch.int64, d, 0, steps[d]) for d in used]
        here = apply(lambda *parts: reduce(operator.add, parts), rows, torch.int64, call.shape)
    many = positions.shape
    places = _Places(
        joined,
        dim,
        positions,
        wraps,
        here,
        many,
        lambda index, among: among,
        lambda index: index[:dim] + index[dim + len(used) :],
    )
    whole = (*call.shape[:dim], *many, *call.shape[dim + len(used) :])
    piece = call.tensor("values")
    if not isinstance(piece, Constant) and math.prod(piece.shape) != 1:
        piece = expand(piece, whole)
        return _written(
            call,
            places,
            piece,
            lambda index, among: (*index[:dim], *among, *index[dim + len(used) :]),
            adds=call["accumulate"],
        )
    number = convert(view(piece, ()), call.dtype)
    return _written(call, places, number, lambda index, among: (), adds=call["accumulate"])
