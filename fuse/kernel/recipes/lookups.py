"""Recipes of operators that index by tensors: embedding, ``index_select``, ``gather``, ``x[positions]``, ``nll_loss``.

    nll_loss(p, target)   =   - sum over n of w[target[n]] * p[n, target[n]]   (mean: over the sum of w[target[n]])

Targets equal to ``ignore_index`` add nothing. Each element is one indirect load. Positions are checked before the
kernel writes anything; if one is out of range, eager runs the call and raises its own error.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce

import torch

from fuse.graph.strides import contiguous_strides
from fuse.kernel.arithmetic.dtypes import HALVES
from fuse.kernel.arithmetic.expressions import Expression, either, fn
from fuse.kernel.arithmetic.index import Index, Stride
from fuse.kernel.recipes.reductions import SUM_DTYPE, total
from fuse.kernel.recipes.registry import Call, Unsupported, apply, choice, convert, recipe
from fuse.kernel.values import Constant, Gather, Input, Value, view

INDEX_DTYPES = (torch.int64, torch.int32)
NONE, MEAN = 0, 1
"""ATen's numbers for ``reduction="none"`` and ``"mean"``."""


def table_of(call: Call, name: str) -> Input | Constant:
    table = call.tensor(name)
    if not isinstance(table, (Input, Constant)):
        raise Unsupported("the tensor that is indexed is computed in the same kernel")
    return table


def positions_of(value: Value) -> Value:
    if value.dtype not in INDEX_DTYPES:
        raise Unsupported(f"the indices are of dtype {value.dtype}")
    return convert(value, torch.int64)


@recipe("embedding")
def embedding(call: Call) -> Value:
    """Row ``indices[...]`` of ``weight``."""
    table, positions = table_of(call, "weight"), positions_of(call.tensor("indices"))
    return Gather(
        call.shape, call.dtype, table, positions, 0, lambda index: index[:-1], lambda index: index[-1:], False
    )


@recipe("index_select", "gather")
def along_a_dimension(call: Call) -> Value:
    """``index_select`` takes slices by a vector of positions; ``gather`` takes each element by its own position."""
    table, positions = table_of(call, "self"), positions_of(call.tensor("index"))
    slices = call.op._opname == "index_select"
    if not table.shape or len(positions.shape) != (1 if slices else len(table.shape)):
        raise Unsupported("a tensor without dimensions is indexed")
    dim = call["dim"] % len(table.shape)

    def position_index(index: Index) -> Index:
        return (index[dim],) if slices else index

    def rest(index: Index) -> Index:
        return index[:dim] + index[dim + 1 :]

    return Gather(call.shape, call.dtype, table, positions, dim, position_index, rest, False)


@recipe("index.Tensor")
def index_by_tensor(call: Call) -> Value:
    """``x[:, positions]`` and ``x[first, second]``; a boolean mask has no kernel."""
    table, indices = table_of(call, "self"), call["indices"]
    used = [d for d, positions in enumerate(indices) if positions is not None]
    positions, wraps = positions_of(indices[used[0]]), len(used) == 1
    if not wraps:
        table, positions = together(table, used, [positions_of(indices[d]) for d in used])
    dim = used[0] if used == list(range(used[0], used[-1] + 1)) else 0  # apart, their dimensions come first
    rank = len(positions.shape)

    def position_index(index: Index) -> Index:
        return index[dim : dim + rank]

    def rest(index: Index) -> Index:
        return index[:dim] + index[dim + rank :]

    return Gather(call.shape, call.dtype, table, positions, dim, position_index, rest, wraps)


def together(
    table: Input | Constant, dims: Sequence[int], positions: Sequence[Value]
) -> tuple[Input | Constant, Value]:
    """The table with ``dims`` joined to one dimension of stride 1, and the positions along it.

    A joint position is the offset in memory of the positions in ``dims``. It is out of range if one of them is.
    """
    all_strides = strides_of(table)
    extents, strides = [table.shape[d] for d in dims], [all_strides[d] for d in dims]
    steps = [stride for stride in strides if isinstance(stride, int)]
    if len(steps) < len(strides):
        raise Unsupported("several tensors index a tensor whose strides are known only during the call")
    end = 1 + sum((extent - 1) * step for extent, step in zip(extents, steps, strict=True))

    def joint(end: Expression, *given: Expression) -> Expression:
        known = zip(given[::3], given[1::3], given[2::3], strict=True)
        ahead = [(fn.select(part < 0, part + extent, part), extent, step) for part, extent, step in known]
        outside = reduce(either, (either(at < 0, at >= extent) for at, extent, _ in ahead))
        return fn.select(outside, end, reduce(operator.add, (at * step for at, _, step in ahead)))

    shape = tuple(torch.broadcast_shapes(*(p.shape for p in positions)))
    dim = dims[0] if list(dims) == list(range(dims[0], dims[-1] + 1)) else 0
    kept = [d for d in range(len(table.shape)) if d not in dims]
    own = [(table.shape[d], all_strides[d]) for d in kept]
    whole = [*own[:dim], (end, 1), *own[dim:]]
    wide = tuple(n for n, _ in whole)
    joined: Input | Constant = (
        Constant(wide, table.dtype, table.number)
        if isinstance(table, Constant)
        else Input(wide, table.dtype, table.position, tuple(s for _, s in whole))
    )
    given = [one for three in zip(positions, extents, steps, strict=True) for one in three]
    return joined, apply(joint, [end, *given], torch.int64, shape)


def strides_of(table: Input | Constant) -> tuple[Stride, ...]:
    """The strides of ``table``, of a constant those of a contiguous tensor."""
    return contiguous_strides(table.shape) if isinstance(table, Constant) else table.strides


@recipe("nll_loss_forward")
def nll_loss(call: Call) -> tuple[Value, Value | None]:
    """The loss of one or many rows, and the sum of weights; the latter is None for ``reduction="none"``."""
    rows, target = table_of(call, "self"), positions_of(call.tensor("target"))
    shape, dtype, rank = target.shape, rows.dtype, len(rows.shape)
    if dtype in HALVES:
        raise Unsupported("the loss is in half precision")
    if rank != len(shape) + 1:
        raise Unsupported("the target of the loss has as many dimensions as its input")
    given = Constant(shape, torch.int64, call["ignore_index"])
    ignored = apply(fn.equal, [target, given], torch.int64, shape)
    place = choice(ignored, Constant(shape, torch.int64, 0), target)
    picked = Gather(shape, dtype, rows, place, rank - 1, lambda index: index, lambda index: index, False)
    weights: Value = Constant(shape, dtype, 1.0)
    if call["weight"] is not None:
        weights = Gather(shape, dtype, table_of(call, "weight"), place, 0, lambda index: index, lambda index: (), False)
    nothing = Constant(shape, dtype, 0.0)
    losses = choice(ignored, nothing, apply(lambda p, weight: -p * weight, [picked, weights], dtype, shape))
    if call["reduction"] == NONE:
        return losses, None
    counted = total(choice(ignored, nothing, weights), range(len(shape)))
    summed = total(losses, range(len(shape)))
    if call["reduction"] == MEAN:
        summed = apply(operator.truediv, [summed, counted], SUM_DTYPE, summed.shape)
    return view(convert(summed, dtype), ()), view(convert(counted, dtype), ())
