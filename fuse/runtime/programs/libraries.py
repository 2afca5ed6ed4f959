"""Matrix products that a BLAS library computes as native steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node


@dataclass(frozen=True)
class LibraryProduct:
    """One library launch: ``C = alpha A B + beta bias``, for every matrix of a batch, in row-major layout.

    ``A`` is ``m`` by ``k``, ``B`` is ``k`` by ``n``. Layouts are (transposed, leading dimension); leading dimensions
    and batch strides are in elements. ``bias_layout`` is the size and stride of the bias broadcast to C.
    """

    left: Node
    right: Node
    bias: Node | None
    dtype: torch.dtype
    m: int
    n: int
    k: int
    left_layout: tuple[bool, int]  # transposed, leading dimension
    right_layout: tuple[bool, int]
    result_leading: int
    alpha: float = 1.0
    beta: float = 0.0
    batch: int = 1
    batch_strides: tuple[int, int, int] = (0, 0, 0)  # left, right, result
    bias_layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def largest(self) -> int:
        """The largest integer among the arguments of the BLAS call."""
        leading = (self.left_layout[1], self.right_layout[1], self.result_leading)
        return max(self.batch, self.m, self.n, self.k, *leading)
