"""Dtypes that kernels handle, and the dtypes that they compute in."""

from __future__ import annotations

import torch

SUPPORTED = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
HALVES = frozenset({torch.bfloat16, torch.float16})


def supported(dtype: torch.dtype) -> bool:
    """Whether kernels handle this dtype; complex, quantised and 8-bit floating-point dtypes are not handled."""
    return dtype in SUPPORTED


def register(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a kernel computes in: float32 for bfloat16 and float16, the element's own dtype otherwise.

    >>> register(torch.bfloat16), register(torch.bool)
    (torch.float32, torch.bool)
    """
    return torch.float32 if dtype in HALVES else dtype
