"""Known allocations inside operators that run whole, from shapes.

    _transformer_encoder_layer_fwd   queries, keys and values twice (as multiplied, as attention reads them), or the
                                     hidden layer; with the norm first also what it gives
    transposed convolution           its result twice more: as oneDNN lays it out, and in between; once more where
                                     channels lie side by side, as oneDNN has them

Read from what torch's allocator was asked for (torch 2.13). Of other operators nothing is known, and nothing counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuse.devices import is_host

aten = torch.ops.aten

FEWEST_ELEMENTS = 20_480
"""Elements of a lone image from which on PyTorch gives it to oneDNN."""


def inside_bytes(op: Any, args: Sequence[Any], result: Any) -> int:
    """Bytes that ``result = op(*args)`` holds at most, besides arguments and result; tensors may be fake.

    >>> x, weight = torch.ones(2, 8, 4, 4), torch.ones(8, 3, 2, 2)
    >>> result = torch.ones(2, 3, 8, 8)
    >>> args = (x, weight, None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1)
    >>> inside_bytes(aten.convolution.default, args, result) == 2 * 4 * result.numel()
    True
    """
    if op is aten._transformer_encoder_layer_fwd.default:
        return _of_encoder_layer(args)
    if op is aten.convolution.default and args[6] and _is_for_onednn(args[0]):
        beside = result.dim() == 4 and result.is_contiguous(memory_format=torch.channels_last)
        return (1 if beside else 2) * int(result.numel()) * int(result.itemsize)
    return 0


def _of_encoder_layer(args: Sequence[Any]) -> int:
    x, norm_first, hidden = args[0], bool(args[8]), args[14]
    one = int(x.numel()) * int(x.itemsize)
    between = one // int(x.shape[-1]) * int(hidden.shape[0])
    return max(6 * one, between + 2 * one) + norm_first * one - one


def _is_for_onednn(x: Tensor) -> bool:
    """Whether PyTorch gives a transposed convolution of ``x`` to oneDNN."""
    if x.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return False
    return is_host(x) and (int(x.shape[0]) > 1 or int(x.numel()) > FEWEST_ELEMENTS)
