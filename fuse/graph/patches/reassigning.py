"""Follow ``forward`` where it gives a tensor other memory without an operator.

    w.data = 0.9 * w.data + x           no operator; from here on, w is another tensor to the graph
    y = x @ w                     ->    v = add(mul(w, 0.9), x);  y = mm(x, v);  after the call: w.data = v

The tensor keeps its identity, gradient and version; what is read through views of its old memory stays. Declined for
tensors that ``forward`` makes, for other dtypes and devices, and for other shapes where gradients are taken.
``torch.utils.swap_tensors`` is only noted. Comparing each tensor with its earlier self at the end would take as long as
recording it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fuse.graph.patches.patched import in_this_thread, patched

Assign = Callable[[Tensor, Tensor], None]
"""``assign(tensor, other)`` does what ``tensor.data = other`` does."""


@contextlib.contextmanager
def reassignments_followed(
    follow: Callable[[Tensor, Tensor, Assign], None], note: Callable[[], None]
) -> Iterator[None]:
    """A context that calls ``follow(tensor, other, assign)`` when this thread assigns the data of a fake tensor, which
    is to assign it, and ``note`` when it swaps fake tensors.

    >>> def follow(tensor, other, assign):
    ...     print("followed")
    ...     assign(tensor, other)
    >>> with torch._subclasses.FakeTensorMode(), reassignments_followed(follow, lambda: None):
    ...     x = torch.ones(2)
    ...     x.data = torch.zeros(3)
    ...     x.shape
    followed
    torch.Size([3])
    """
    data: Any = FakeTensor.data
    swap: Any = torch._C._swap_tensor_impl

    def assign(tensor: Tensor, other: Tensor) -> None:
        follow(tensor, other, data.__set__)

    def swapped(one: Tensor, other: Tensor) -> None:
        if isinstance(one, FakeTensor) or isinstance(other, FakeTensor):
            note()
        swap(one, other)

    with (
        patched(FakeTensor, {"data": property(data.__get__, in_this_thread(assign, data.__set__))}),
        patched(torch._C, {"_swap_tensor_impl": in_this_thread(swapped, swap)}),
    ):
        yield


def obstacle(tensor: Tensor, other: Tensor) -> str | None:
    """Why ``tensor`` cannot become ``other`` in a graph; None if it can."""
    if other.layout is not torch.strided:
        return f"layout {other.layout}"
    if (tensor.dtype, tensor.device) != (other.dtype, other.device):
        return "another dtype or device"
    if any(one.is_conj() or one.is_neg() for one in (tensor, other)):
        return "lazy numbers"
    if tensor.requires_grad and tensor.shape != other.shape:
        return "another shape, while it needs gradients"
    return None
