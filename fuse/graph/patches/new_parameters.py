"""Parameters that ``forward`` makes: the runtime makes a new one in each call, on the memory of a value of the graph.

    self.w = nn.Parameter(0.9 * self.w + x)      v = add(mul(w, 0.9), x), after the call: model.w = nn.Parameter(v)

Torch makes a plain fake tensor of a fake one, whatever the class of the parameter. So subclasses are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fuse.errors import CaptureError
from fuse.graph.patches.patched import in_this_thread, patched


def parameter_of(leaf: Tensor) -> bool | None:
    """The ``requires_grad`` of a parameter; None for another tensor.

    >>> parameter_of(nn.Parameter(Tensor(2), requires_grad=False)), parameter_of(Tensor(2))
    (False, None)
    """
    return leaf.requires_grad if isinstance(leaf, nn.Parameter) else None


@contextlib.contextmanager
def subclasses_refused() -> Iterator[None]:
    """A context in which this thread makes no fake tensor for an object of a subclass of ``nn.Parameter``."""
    make = nn.Parameter.__new__

    def own(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if cls is not nn.Parameter and isinstance(data, FakeTensor):
            raise CaptureError(f"forward makes a {cls.__name__}, which a graph cannot make")
        return make(cls, data, requires_grad)

    with patched(nn.Parameter, {"__new__": staticmethod(in_this_thread(own, make))}):
        yield
