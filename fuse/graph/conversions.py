"""``module.to(...)`` in ``forward`` where everything is there already.

    self.experts.to(x.device)      nothing is converted   ->   nothing

Eager writes each parameter into itself then. Torch swaps fake parameters instead, which it cannot do while a graph is
recorded.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def idle_conversions() -> Iterator[None]:
    """Within, this thread's conversions of a module that change none of its tensors do nothing."""
    original: Callable[..., nn.Module] = nn.Module._apply
    thread = threading.get_ident()

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if threading.get_ident() != thread:
            return original(module, fn, recurse)
        if recurse:
            for child in module.children():
                child._apply(fn)
        held = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        with torch.no_grad():
            idle = all(fn(tensor) is tensor for tensor in held)
        return module if idle else original(module, fn, recurse=False)

    nn.Module._apply = apply  # type: ignore[method-assign]  # for the time of a capture
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]  # untyped in torch
