"""Look-ups at indices that tensors contain, without learning the indices.

    B[:, obs[t]]        eager reads the number obs[t], and returns a view   ->      index(B, [None, obs[t]])
    B[n : n + 4]        eager reads n twice, and returns a view             ->      index_select(B, 0, n + arange(4))

The graph then serves any ``obs`` and ``n``. For a slice, Python learns its length, and that it lies within the tensor.
The result is a new tensor, where eager returns a view of ``B``. If ``B`` or the result is written afterwards, or if the
model returns the result, the call is recorded again, and Python learns the number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from fuse.graph.functional.aliases import Base
from fuse.graph.numbers.read_numbers import is_number
from fuse.graph.strides import contiguous_strides

aten = torch.ops.aten

_PLAIN = frozenset((int, slice, type(None), EllipsisType))
"""Types of index parts that make views."""
_POSITIONS = frozenset((torch.int64, torch.int32))


@dataclass(frozen=True)
class _IndexCopy:
    """A look-up: ``result`` was copied from ``of`` at its ``version``."""

    of: Base
    version: int
    result: Base


@dataclass
class IndexCopies:
    """Look-ups whose results are views in eager mode."""

    made: list[_IndexCopy] = field(default_factory=list)

    def add(self, of: Base, result: Base) -> None:
        self.made.append(_IndexCopy(of, of.version, result))

    def are_visible(self, returned: Sequence[Base]) -> bool:
        """Whether the caller could notice that results are no views: one is ``returned``, or memory was written."""
        given = set(map(id, returned))
        return any(
            copy.of.version != copy.version or copy.result.version or id(copy.result) in given for copy in self.made
        )


def positions_in(index: Any) -> list[Any]:
    """The parts of an index that are tensors or Numbers; none if any other part does not make a view."""
    parts = index if type(index) is tuple else (index,)
    found = [part for part in parts if is_position(part)]
    return found if all(type(part) in _PLAIN or is_position(part) for part in parts) else []


def is_position(part: Any) -> bool:
    """Whether ``part`` of an index is an integer in a tensor."""
    if is_number(part):
        return isinstance(part, int)
    return isinstance(part, Tensor) and part.dim() == 0 and part.dtype in _POSITIONS


def windows_in(index: Any) -> list[slice]:
    """The slices of an index whose two ends are tensors or Numbers; none if any other part is one, or makes no view."""
    parts = index if type(index) is tuple else (index,)
    return [p for p in parts if _is_window(p)] if all(type(part) in _PLAIN for part in parts) else []


def _is_window(part: Any) -> bool:
    return type(part) is slice and part.step is None and is_position(part.start) and is_position(part.stop)


def viewed(tensor: Tensor, index: Any, view: Callable[[Tensor, Any], Tensor]) -> tuple[Tensor, list[int]]:
    """``tensor`` indexed by the other parts of ``index``, and the dimensions of it that the tensor parts index.

    Parts are positions, or windows if there are any.

    >>> from torch import empty, tensor
    >>> made, dims = viewed(empty(2, 3, 4, 5), (0, ..., tensor(1), None, slice(2)), lambda x, index: x[index])
    >>> made.shape, dims
    (torch.Size([3, 4, 1, 2]), [1])
    """
    parts = index if type(index) is tuple else (index,)
    moves = _is_window if any(map(_is_window, parts)) else is_position
    used = sum(part is not None and part is not ... for part in parts)
    dims, at = [], 0
    for part in parts:
        if moves(part):
            dims.append(at)
        if part is ...:
            at += tensor.dim() - used
        elif type(part) is not int:
            at += 1
    if len(dims) == len(parts):
        return tensor, dims
    return view(tensor, tuple(slice(None) if moves(part) else part for part in parts)), dims


def window(table: Tensor, dims: Sequence[int], starts: Sequence[Tensor], lengths: Sequence[int]) -> Tensor | None:
    """A copy of the part of ``table`` that begins at ``starts`` of ``dims``, with the strides of eager's view.

    None if it cannot have these strides. Where the part is no dense one, the whole table is copied, moved so that the
    part comes first.

    >>> from torch import arange, tensor
    >>> window(arange(12).view(3, 4), [0, 1], [tensor(1), tensor(2)], [2, 2])
    tensor([[ 6,  7],
            [10, 11]])
    """
    sizes = dict(zip(dims, lengths, strict=True))
    shape = [sizes.get(dim, size) for dim, size in enumerate(table.shape)]
    moved = table.stride() != contiguous_strides(shape)
    if moved and table.stride() != contiguous_strides(table.shape):
        return None
    for dim, start in zip(dims, starts, strict=True):
        rows = start + torch.arange(table.shape[dim] if moved else sizes[dim], device=start.device)
        table = table.index_select(dim, rows % table.shape[dim] if moved else rows)
    for dim, length in sizes.items() if moved else ():
        table = table.narrow(dim, 0, length)
    return table


def looks_like_view(table: Tensor, dims: Sequence[int], indices: Sequence[Tensor | None]) -> bool:
    """Whether a copy can be viewed like eager's view, because its strides are alike; runs on fake tensors."""
    view = table
    for dim in reversed(dims):
        view = view.select(dim, 0)
    return view.dim() <= 1 or view.stride() == aten.index.Tensor(table, list(indices)).stride()
