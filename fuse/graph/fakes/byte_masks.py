"""Masks of dtype uint8, which eager accepts in some operators and fake tensors refuse.

x[m]   ->   x[m != 0]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten

_INDEXED = frozenset(
    {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
)


def has_byte_masks(op: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether eager follows uint8 masks among the operands of ``op``.

    >>> mask = torch.tensor([2, 0], dtype=torch.uint8)
    >>> has_byte_masks(aten.index.Tensor, (torch.ones(2), [mask]))
    True
    >>> has_byte_masks(aten.masked_select.default, (torch.ones(2), mask))
    False
    """
    if op is aten.where.self:
        return _is_bytes(args[0])
    return op in _INDEXED and any(map(_is_bytes, args[1])) and not _fills(args)


def with_masks(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` with comparisons in place of uint8 masks, those in lists included.

    >>> with_masks((torch.ones(2), [torch.tensor([2, 0], dtype=torch.uint8)]))
    (tensor([1., 1.]), [tensor([ True, False])])
    """
    first, second, *others = args
    if isinstance(second, (list, tuple)):
        return first, [one != 0 if _is_bytes(one) else one for one in second], *others
    return first != 0, second, *others


def _is_bytes(index: Tensor | None) -> bool:
    return index is not None and index.dtype is torch.uint8


def _fills(args: tuple[Any, ...]) -> bool:
    """Whether eager runs a write of one number as ``masked_fill_``, which refuses uint8."""
    masks = [one for one in args[1] if one is not None]
    one_number = len(args) > 2 and args[2].numel() == 1 and not (len(args) > 3 and args[3])
    return one_number and len(masks) == 1
