"""Recipes of look-ups: embedding, ``index_select``, ``gather``, ``x[positions]``.

Each is one indirect load an element. Positions are checked before the kernel writes anything; where one is out of range
the call is run by eager, which raises its own error.
"""

from __future__ import annotations

import torch

from fuse.kernel.index import Index
from fuse.kernel.recipes import Call, Unsupported, convert, recipe
from fuse.kernel.values import Gather, Input, Value

INDEX_DTYPES = (torch.int64, torch.int32)


def table_of(call: Call, name: str) -> Input:
    table = call.tensor(name)
    if not isinstance(table, Input):
        raise Unsupported("the table of a look-up is computed in the same kernel")
    return table


def positions_of(value: Value) -> Value:
    if value.dtype not in INDEX_DTYPES:
        raise Unsupported(f"positions of dtype {value.dtype}")
    return convert(value, torch.int64)


@recipe("embedding")
def embedding(call: Call) -> Value:
    """Row ``indices[...]`` of ``weight``."""
    table, positions = table_of(call, "weight"), positions_of(call.tensor("indices"))
    return Gather(
        call.shape, call.dtype, table, positions, 0, lambda index: index[:-1], lambda index: index[-1:], False
    )


@recipe("index_select")
def index_select(call: Call) -> Value:
    table, positions = table_of(call, "self"), positions_of(call.tensor("index"))
    if not table.shape or len(positions.shape) != 1:
        raise Unsupported("index_select of a scalar")
    dim = call["dim"] % len(table.shape)

    def rest(index: Index) -> Index:
        return index[:dim] + index[dim + 1 :]

    return Gather(call.shape, call.dtype, table, positions, dim, lambda index: (index[dim],), rest, False)


@recipe("gather")
def gather(call: Call) -> Value:
    table, positions = table_of(call, "self"), positions_of(call.tensor("index"))
    if not table.shape or len(table.shape) != len(positions.shape):
        raise Unsupported("gather of a scalar")
    dim = call["dim"] % len(table.shape)

    def rest(index: Index) -> Index:
        return index[:dim] + index[dim + 1 :]

    return Gather(call.shape, call.dtype, table, positions, dim, lambda index: index, rest, False)


@recipe("index.Tensor")
def index_by_tensor(call: Call) -> Value:
    """``x[:, positions]``: one tensor of positions; several, or a mask, have no kernel."""
    table, indices = table_of(call, "self"), call["indices"]
    used = [d for d, positions in enumerate(indices) if positions is not None]
    if len(used) != 1:
        raise Unsupported("indexing by several tensors at once")
    dim, positions = used[0], positions_of(indices[used[0]])
    rank = len(positions.shape)

    def position_index(index: Index) -> Index:
        return index[dim : dim + rank]

    def rest(index: Index) -> Index:
        return index[:dim] + index[dim + rank :]

    return Gather(call.shape, call.dtype, table, positions, dim, position_index, rest, True)
