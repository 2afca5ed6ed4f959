"""Slices that cut nothing are recorded as slices, as they are where other sizes make them cut.

    x[:, :, :h, :w]      x [2, 8, 58, 78], h = 57, w = 77      slice(slice(x, 2, 0, 57), 3, 0, 77)
                         x [2, 8, 58, 78], h = 58, w = 77      PyTorch leaves out the first one

A view costs nothing, and ``view_chains`` removes it. Where sizes vary, it stays, so that all sizes have one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def sliced(tensor: Tensor, index: Any, get: Callable[[Tensor, Any], Tensor]) -> Tensor | None:
    """``tensor[index]``, slice by slice; None if the index has other parts than slices, or if they all cut.

    ``get`` is the tensor's own ``__getitem__``.
    """
    if type(index) is not tuple or not any(type(part) is slice and type(part.stop) is int for part in index):
        return None
    parts, sizes = slices_of(index, tensor.dim()), Tensor.size(tensor)
    if parts is None or not any(map(_is_whole, parts.values(), (sizes[dim] for dim in parts))):
        return None
    for dim, part in parts.items():
        if _is_whole(part, sizes[dim]):
            tensor = tensor.narrow(dim, 0, sizes[dim])
        else:
            tensor = get(tensor, (*[slice(None)] * dim, part))
    return tensor


def slices_of(index: Any, dims: int) -> dict[int, slice] | None:
    """The slices of an index with several parts, by dimension, those left out that have no bounds; None if it has other
    parts.

    >>> slices_of((..., slice(5)), 3), slices_of((0, slice(5)), 3)
    ({2: slice(None, 5, None)}, None)
    """
    if type(index) is not tuple:
        return None
    dim, found = 0, dict[int, slice]()
    for part in index:
        if part is ...:
            dim += dims - len(index) + 1
        elif type(part) is slice:
            if part.start is not None or part.stop is not None or part.step is not None:
                found[dim] = part
            dim += 1
        else:
            return None
    return found if dim <= dims else None


def _is_whole(part: slice, size: int) -> bool:
    """Whether a slice that ends at a number is the whole dimension.

    >>> _is_whole(slice(0, 5), 5), _is_whole(slice(4), 5), _is_whole(slice(None), 5)
    (True, False, False)
    """
    ends = type(part.stop) is int and part.stop == size
    return ends and (part.start is None or part.start == 0) and (part.step is None or part.step == 1)
