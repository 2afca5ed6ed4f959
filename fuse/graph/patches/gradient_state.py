"""``.grad`` of tensors that the caller holds, in ``forward``.

    def forward(self, x):
        self.zero_grad()                   assigns None to .grad, or fills it with zeros
        norm = self.weight.grad.norm()     None before the first backward pass, another tensor after it

No operator shows these, and a program would neither repeat them nor notice that ``.grad`` is another one. Only where
``.grad`` is None and stays None is there nothing to repeat; each call then asks whether it still is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fuse.graph.patches.patched import in_this_thread, patched


@contextlib.contextmanager
def gradients_noted(note: Callable[[Tensor, Tensor | None], None]) -> Iterator[None]:
    """A context that calls ``note(tensor, None)`` before this thread reads ``.grad`` of a fake tensor or a parameter,
    and ``note(tensor, value)`` before it assigns a value.

    >>> with gradients_noted(lambda tensor, value: print(value)):
    ...     nn.Parameter(Tensor(2)).grad = None
    None
    """
    grad: Any = Tensor.grad

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def called(tensor: Tensor, *value: Any) -> Any:
            note(tensor, value[0] if value else None)
            return original(tensor, *value)

        return in_this_thread(called, original)

    seen = property(noted(grad.__get__), noted(grad.__set__), noted(grad.__delete__))
    with patched(FakeTensor, {"grad": seen}), patched(nn.Parameter, {"grad": seen}):
        yield
