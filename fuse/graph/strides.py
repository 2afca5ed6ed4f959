"""Arithmetic on strides, in elements. torch's own functions import sympy for symbolic sizes, which are not used."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a new tensor of this shape.

    >>> contiguous_strides((4, 1, 8)), contiguous_strides((2, 0, 3))
    ((8, 8, 1), (3, 3, 1))
    """
    return dense_strides(shape, range(len(shape))[::-1])


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps; ``order`` lists the dimensions from the innermost to the outermost.

    >>> dense_strides((4, 2, 8), (1, 2, 0))
    (16, 1, 2)
    """
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def memory_order(value: Tensor) -> list[int]:
    """The dimensions of a tensor from the outermost to the innermost.

    >>> import torch
    >>> memory_order(torch.empty(2, 3, 4).permute(1, 2, 0))
    [2, 0, 1]
    """
    strides = value.stride()
    return sorted(range(value.dim()), key=lambda dim: (-strides[dim], dim))


def inverse(order: Sequence[int]) -> list[int]:
    """The order of dimensions that undoes ``order``.

    >>> inverse([2, 0, 1])
    [1, 2, 0]
    """
    return [order.index(dim) for dim in range(len(order))]


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of ``tensor`` fill its memory without gap or overlap, in any order.

    >>> import torch
    >>> x = torch.empty(3, 4)
    >>> is_dense(x.t()), is_dense(x[:, :2]), is_dense(x[:1].expand(3, 4))
    (True, False, False)
    """
    if tensor.is_sparse:
        return False
    if tensor.numel() < 2:
        return True
    step = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size == 1:
            continue
        if stride != step:
            return False
        step *= size
    return True


def extent(value: Tensor) -> int:
    """Bytes from the first to the last element of a tensor, both included; 0 for an empty one.

    >>> import torch
    >>> extent(torch.empty(2, 3)), extent(torch.empty(2, 6)[:, ::2]), extent(torch.empty(0, 3))
    (24, 44, 0)
    """
    if value.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return int(last + 1) * value.itemsize


def broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """The shape to which all ``shapes`` broadcast, or None.

    >>> broadcast([(4, 1), (8,)]), broadcast([(4,), (8,)])
    ((4, 8), None)
    """
    result = [1] * max(map(len, shapes), default=0)
    for shape in shapes:
        for at, size in enumerate(reversed(shape), 1):
            if size != 1 and result[-at] not in (1, size):
                return None
            if size != 1:
                result[-at] = size
    return tuple(result)
