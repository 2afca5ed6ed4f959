"""Detect when ``forward`` gives a tensor other memory without an operator.

    x.data = other                          no operator; from here on, x is another tensor to the graph
    torch.utils.swap_tensors(x, other)

The assignment itself is noted. Comparing each tensor with its earlier self at the end would take as long as recording
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fuse.graph.patched import in_this_thread, patched


@contextlib.contextmanager
def reassignments_noted(note: Callable[[], None]) -> Iterator[None]:
    """A context that calls ``note`` when this thread gives a fake tensor other memory.

    >>> with torch._subclasses.FakeTensorMode(), reassignments_noted(lambda: print("noted")):
    ...     x = torch.ones(2)
    ...     x.data = torch.zeros(3)
    noted
    """
    data: Any = FakeTensor.data
    swap: Any = torch._C._swap_tensor_impl

    def assign(tensor: Tensor, other: Tensor) -> None:
        note()
        data.__set__(tensor, other)

    def swapped(one: Tensor, other: Tensor) -> None:
        if isinstance(one, FakeTensor) or isinstance(other, FakeTensor):
            note()
        swap(one, other)

    with (
        patched(FakeTensor, {"data": property(data.__get__, in_this_thread(assign, data.__set__))}),
        patched(torch._C, {"_swap_tensor_impl": in_this_thread(swapped, swap)}),
    ):
        yield
