"""Overlaps in memory between the tensors that an operator reads and writes.

    y[1:].add_(y[:-1])        reads a part of what it writes: eager raises, or the order of its loop decides
    y[:, :4].mul_(y[:, 4:])   interleaved in memory, but without a common element: like separate tensors

A graph has no memory. A write whose result depends on memory cannot be captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fuse import ops
from fuse.graph.strides import is_dense

aten = torch.ops.aten

StridedLayout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides and offset, in elements."""


def obstacle(op: OpOverload, written: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why the result of the in-place operator ``op`` depends on memory, or None."""
    for target in written:
        if overlaps_itself(target):
            return "writes to a tensor whose elements share memory"
        given = list(_tensors((*args, *kwargs.values())))
        own = next(i for i, t in enumerate(given) if t is target)
        for other in (*given[:own], *given[own + 1 :]):
            if other.untyped_storage()._cdata != target.untyped_storage()._cdata or not other.numel():
                continue
            if other.dtype == target.dtype and _layout(other) == _layout(target):
                if ops.kind(op) != "pointwise" and op is not aten.copy_.default:
                    return "reads all that it writes"
            elif other.dtype != target.dtype or not disjoint(_layout(target), _layout(other)):
                return "reads a part of what it writes"
    return None


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor may share memory.

    >>> overlaps_itself(torch.zeros(1, 3).expand(2, 3)), overlaps_itself(torch.zeros(4, 6)[:, ::2].t())
    (True, False)
    """
    if is_dense(tensor) or not tensor.numel():
        return False
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def disjoint(a: StridedLayout, b: StridedLayout) -> bool:
    """Whether two layouts are known to have no common element.

    An offset is written as a number whose digits count the strides, the largest stride first. If no digit can carry,
    two layouts are disjoint as soon as one digit differs for all of their elements.

    >>> disjoint(((4, 3), (6, 1), 0), ((4, 3), (6, 1), 3)), disjoint(((3,), (2,), 0), ((3,), (2,), 1))
    (True, True)
    >>> disjoint(((5,), (1,), 0), ((5,), (1,), 1)), disjoint(((3, 3), (3, 1), 0), ((3, 3), (1, 3), 0))
    (False, False)
    """
    if a[2] > b[2]:
        a, b = b, a
    strides = sorted({s for _, s in (*_moving(a), *_moving(b))} | {1}, reverse=True)
    distance = b[2] - a[2]
    spans = []
    for stride in strides:
        digit, distance = divmod(distance, stride)
        spans.append((_span(a, stride), digit, digit + _span(b, stride)))
    reach = 0
    for stride, (last, _, other_last) in reversed(list(zip(strides, spans, strict=True))):
        if reach >= stride:
            return False
        reach += max(last, other_last) * stride
    return any(first > last for last, first, _ in spans)


def strided_views(root: Tensor, result: Tensor) -> list[tuple[OpOverload, tuple[Any, ...]]] | None:
    """Views that lead from ``root`` to ``result``, for any storage offset of ``root``; None if they may leave ``root``.

    >>> root = torch.zeros(4, 6)
    >>> [str(op) for op, _ in strided_views(root, root.as_strided((2, 3), (6, 1), 4))]
    ['aten.as_strided.default', 'aten.slice.Tensor', 'aten.as_strided.default']

    The diagonal of a matrix, which ``fill_diagonal_`` writes, is one ``diagonal``.

    >>> strided_views(root, root.as_strided((4,), (7,)))
    [(<OpOverload(op='aten.diagonal', overload='default')>, ())]
    """
    if root.dtype != result.dtype or root.is_conj() or root.is_neg() or result.is_conj() or result.is_neg():
        return None
    start, count = int(result.storage_offset() - root.storage_offset()), root.numel()
    reach = sum(s * (n - 1) for n, s in _moving(_layout(result)))
    if start < 0 or start + reach >= count or not result.numel() or not is_dense(root):
        return None
    if start == 0 and root.dim() == 2 and _layout(result)[:2] == ((min(root.shape),), (sum(root.stride()),)):
        return [(aten.diagonal.default, ())]
    last = (aten.as_strided.default, (list(result.shape), list(result.stride())))
    if start == 0:
        return [last]
    return [(aten.as_strided.default, ([count], [1])), (aten.slice.Tensor, (0, start, count)), last]


def _layout(tensor: Tensor) -> StridedLayout:
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def _moving(layout: StridedLayout) -> list[tuple[int, int]]:
    return [(n, s) for n, s in zip(layout[0], layout[1], strict=True) if n > 1 and s > 0]


def _span(layout: StridedLayout, stride: int) -> int:
    return sum(n - 1 for n, s in _moving(layout) if s == stride)


def _tensors(arguments: Any) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (tuple, list)):
            yield from _tensors(argument)
