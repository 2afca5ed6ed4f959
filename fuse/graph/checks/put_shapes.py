"""Shapes that ``index_put`` cannot write; fake tensors do not check them.

x[i] = y      x [6, 4], i [1], y [2, 4]      eager raises: [2, 4] cannot be broadcast to [1, 4]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from fuse.graph.strides import broadcast

aten = torch.ops.aten

_PUTS = frozenset({aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default})


def obstacle(op: OpOverload, args: Sequence[Any]) -> str | None:
    """Why eager raises an error in this call of ``index_put``, or None; masks choose an unknown number of elements.

    >>> x, i = torch.zeros(6, 4), torch.tensor([1])
    >>> obstacle(aten.index_put_.default, (x, [i], torch.ones(2, 4)))
    'raises an error: values of shape [2, 4] are written to [1, 4]'
    >>> obstacle(aten.index_put_.default, (x, [None, i], torch.ones(6, 1)))
    """
    if op not in _PUTS:
        return None
    table, indices, values = args[:3]
    at = [dim for dim, index in enumerate(indices) if index is not None]
    if any(indices[dim].dtype in (torch.bool, torch.uint8) for dim in at):
        return None
    places = broadcast([indices[dim].shape for dim in at])
    if places is None or not at:
        return None
    kept = [size for dim, size in enumerate(table.shape) if dim not in at]
    first = at[0] if at[-1] - at[0] < len(at) else 0
    written = [*kept[:first], *places, *kept[first:]]
    if broadcast([values.shape, written]) == tuple(written):
        return None
    return f"raises an error: values of shape {list(values.shape)} are written to {written}"
