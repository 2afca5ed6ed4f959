"""Settings of torch that a call may leave changed.

    torch.set_grad_enabled(False)            the caller's next operators run without gradients
    return self.head(x)

A graph cannot hold such a change, and a compiled call would not repeat it: the call runs eager.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fuse.devices import autocast_modes, set_autocast_modes
from fuse.errors import CaptureError

_SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...] = (
    ("the grad mode of torch", torch.is_grad_enabled, torch._C._set_grad_enabled),
    ("autocast", autocast_modes, set_autocast_modes),
    ("the default dtype of torch", torch.get_default_dtype, torch.set_default_dtype),
    ("the number of threads of torch", torch.get_num_threads, torch.set_num_threads),
    ("the precision of float32 products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
)
"""Settings by name, each with the function that reads it and the one that sets it."""


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """A context that puts torch's settings back.

    Raises:
        CaptureError: the code inside ended without an error and left one changed.

    >>> with settings_kept():
    ...     torch.set_default_dtype(torch.float64)
    Traceback (most recent call last):
    fuse.errors.CaptureError: forward sets the default dtype of torch to torch.float64; a graph cannot hold that
    """
    before = [read() for _, read, _ in _SETTINGS]
    left = ""
    try:
        yield
    finally:
        for (name, read, write), value in zip(_SETTINGS, before, strict=True):
            if (now := read()) != value:
                left = f"forward sets {name} to {now}; a graph cannot hold that"
                write(value)
    if left:
        raise CaptureError(left)
