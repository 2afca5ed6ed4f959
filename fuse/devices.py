"""The devices that have kernels, and PyTorch's autocast on them.

A device is a name here, a folder in ``fuse/kernel/`` that writes its kernels, one in ``fuse/runtime/`` that builds and
starts them, and a profile in ``fuse/cost/profiles.py``. No other file names a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

DEVICES = ("cpu",)
"""The types of the devices that have kernels, as ``torch.device.type`` has them."""
HOST = torch.device("cpu")
"""The device on which Python runs and constants are computed: PyTorch's default device."""
_enabled, _dtype = torch.is_autocast_enabled, torch.get_autocast_dtype


def has_kernels(tensor: Tensor) -> bool:
    """Whether programs can compute on the device of this tensor.

    >>> has_kernels(torch.zeros(1)), has_kernels(torch.zeros(1, device="meta"))
    (True, False)
    """
    return tensor.device.type in DEVICES


def is_host(tensor: Tensor) -> bool:
    """Whether a tensor is in the memory of the processor.

    >>> is_host(torch.zeros(1)), is_host(torch.zeros(1, device="meta"))
    (True, False)
    """
    return tensor.device.type == HOST.type


def device_of(graph: GraphModule) -> str:
    """The type of the device that a graph computes on: the host, unless a tensor is on another device.

    >>> device_of(torch.fx.symbolic_trace(torch.nn.Tanh()))
    'cpu'
    """
    values = (node.meta.get("val") for node in graph.graph.nodes)
    types = {value.device.type for value in values if isinstance(value, Tensor)}
    return min(types - {HOST.type}, default=HOST.type)


def autocast_modes() -> tuple[Any, ...]:
    """Whether autocast is on, and to which dtype, on each device that has kernels. Every call of a model asks this.

    >>> autocast_modes()
    (False, torch.bfloat16)
    """
    modes = _enabled(DEVICES[0]), _dtype(DEVICES[0])
    if len(DEVICES) == 1:
        return modes
    return (*modes, *map(_enabled, DEVICES[1:]), *map(_dtype, DEVICES[1:]))


def set_autocast_modes(modes: tuple[Any, ...]) -> None:
    """Set what :func:`autocast_modes` gave.

    >>> set_autocast_modes(autocast_modes())
    """
    for device, enabled, dtype in zip(DEVICES, modes[: len(DEVICES)], modes[len(DEVICES) :], strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


@contextlib.contextmanager
def autocast(dtype: torch.dtype) -> Iterator[None]:
    """Turn autocast to ``dtype`` on, for every device that has kernels.

    >>> with autocast(torch.bfloat16):
    ...     torch.get_autocast_dtype("cpu")
    torch.bfloat16
    """
    with contextlib.ExitStack() as stack:
        for device in DEVICES:
            stack.enter_context(torch.autocast(device, dtype))
        yield


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Turn autocast off: recorded operators already contain the casts that it chose.

    >>> with torch.autocast("cpu"), without_autocast():
    ...     torch.is_autocast_enabled("cpu")
    False
    """
    with contextlib.ExitStack() as stack:
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
