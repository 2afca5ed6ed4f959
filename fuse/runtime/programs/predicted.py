"""Checks that results of ATen operators have the layouts that capture predicted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from fuse.graph.describing import dtype_name
from fuse.runtime.programs.steps import CallStep, PythonStep


class KernelFailed(Exception):
    """A kernel stopped before it wrote anything that the caller can see: eager raises, or may raise."""

    def __str__(self) -> str:
        return "a position is out of range, or a matrix may be singular"


class Mispredicted(Exception):
    """An ATen operator returned another layout than capture predicted, so that the program does not serve this call.

    Nothing that the caller can see has been written. ``op`` and ``source`` are the operator and its line, ``shape`` is
    the size of its result.
    """

    def __init__(self, op: str, source: str, problem: str, shape: tuple[int, ...] = ()) -> None:
        super().__init__(f"{op} gives {problem}")
        self.op, self.source, self.shape = op, source, shape


def fitted(
    step: PythonStep, tensor: Tensor | None, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """The result of a call, copied to the predicted strides if necessary and allowed.

    Raises:
        Mispredicted: there is no result, or its size, dtype or strides differ.
    """
    name = str(step.function) if isinstance(step, CallStep) else "a loop"
    if tensor is None:  # a result that the operator computes for gradients only
        raise Mispredicted(name, step.source, "no tensor, where one was predicted")
    same_size = tensor.shape == size and tensor.dtype == dtype
    tells = [n > 1 and mine != own for n, mine, own in zip(size, stride, tensor.stride(), strict=False)]
    if same_size and (not any(tells) or tensor.numel() == 0):
        return tensor
    if same_size and not (
        isinstance(step, CallStep) and isinstance(step.function, OpOverload)
    ):  # regions and loops that run op by op may have other strides
        return torch.empty_strided(size, stride, dtype=dtype, device=tensor.device).copy_(tensor)
    problem = f"{_described(tensor.shape, tensor.stride(), tensor.dtype)}, not {_described(size, stride, dtype)}"
    raise Mispredicted(name, step.source, f"{problem} as predicted", tuple(tensor.shape))


def _described(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> str:
    return f"{dtype_name(dtype)}{list(size)} with strides {tuple(stride)}"
