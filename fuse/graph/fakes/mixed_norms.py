"""Dtypes that eager gives to the statistics of norms in mixed precision; fake tensors have others.

    native_layer_norm(bf16[6, 8], weight f32[8])    ->    bf16[6, 8], mean f32[6, 1], 1 / deviation f32[6, 1]

Under autocast, a batch norm gets values in half precision, and weights and running statistics in float32. ATen then
keeps the statistics in the parameters' dtype (``param_scalar_type`` of ATen's mixed_data_type.h). FakeTensorMode gives
half precision for them, and float32 for the gradient of a group norm's input and for running statistics in half
precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten

_PARAMETERS: Mapping[OpOverload, slice] = {
    aten.native_batch_norm.default: slice(1, 5),
    aten._native_batch_norm_legit.default: slice(1, 5),
    aten._native_batch_norm_legit.no_stats: slice(1, 3),
    aten._native_batch_norm_legit_functional.default: slice(1, 5),
    aten._native_batch_norm_legit_no_training.default: slice(1, 5),
    aten.native_layer_norm.default: slice(2, 4),
    aten.native_group_norm.default: slice(1, 3),
}
"""The arguments of a norm that may have another dtype than its values."""


def eager_dtype(op: OpOverload, args: Sequence[object], position: int, result: Tensor) -> torch.dtype:
    """The dtype in eager mode of ``result``, which is result number ``position`` of ``op``.

    >>> values, weight = torch.empty(6, 8, dtype=torch.bfloat16), torch.empty(8)
    >>> eager_dtype(aten.native_layer_norm.default, (values, [8], weight, None, 1e-5), 1, torch.empty(6, 1).bfloat16())
    torch.float32
    """
    if op is aten.native_group_norm_backward.default and position == 0 and isinstance(args[1], Tensor):
        return args[1].dtype
    if op is aten._native_batch_norm_legit_functional.default and position > 2:
        running = args[position]  # a result has the position of the argument that it updates
        return running.dtype if isinstance(running, Tensor) else result.dtype
    if op not in _PARAMETERS or position not in (1, 2):
        return result.dtype
    return next((value.dtype for value in args[_PARAMETERS[op]] if isinstance(value, Tensor)), result.dtype)
