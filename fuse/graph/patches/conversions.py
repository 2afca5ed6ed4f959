"""Skip ``module.to(...)`` in ``forward`` when it converts nothing.

    self.experts.to(x.device)      already there   ->   nothing

Eager then assigns each parameter to itself. For fake parameters torch swaps tensors instead, which fails during a
recording.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fuse.graph.patches.patched import in_this_thread, patched


@contextlib.contextmanager
def idle_conversions() -> Iterator[None]:
    """A context in which module conversions of this thread that change no tensor do nothing."""
    original: Callable[..., nn.Module] = nn.Module._apply

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if recurse:
            for child in module.children():
                child._apply(fn)
        held = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        with torch.no_grad():
            idle = all(fn(tensor) is tensor for tensor in held)
        return module if idle else original(module, fn, recurse=False)

    with patched(nn.Module, {"_apply": in_this_thread(apply, original)}):
        yield
