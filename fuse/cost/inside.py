"""Known allocations inside single operators, computed from shapes.

    _transformer_encoder_layer_fwd   queries, keys and values twice (as multiplied, and in attention's layout), or the
                                     hidden layer; if the norm comes first, its result too
    transposed convolution           its result twice more: in oneDNN's layout, and an intermediate; once more if the
                                     result is channels-last, which is oneDNN's own layout

Taken from the requests to torch's allocator (torch 2.13). Allocations inside other operators are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuse.devices import is_host

aten = torch.ops.aten

FEWEST_ELEMENTS = 20_480
"""PyTorch passes a batch of one image to oneDNN if it has more elements than this."""


def inside_bytes(op: Any, args: Sequence[Any], result: Any) -> int:
    """Peak bytes that ``result = op(*args)`` holds besides arguments and result; tensors may be fake.

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
    """Whether PyTorch computes a transposed convolution of ``x`` with oneDNN."""
    if x.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return False
    return is_host(x) and (int(x.shape[0]) > 1 or int(x.numel()) > FEWEST_ELEMENTS)
