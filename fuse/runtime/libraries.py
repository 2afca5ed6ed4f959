"""Matrix products that a library computes as steps of native code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node


@dataclass(frozen=True)
class LibraryProduct:
    """One library launch: ``C = alpha A B + beta bias``, for every matrix of a batch.

    ``m, n, k``, leading dimensions and batch strides are in elements, as the row-major product sees them.
    ``bias_layout`` is size and stride of the bias broadcast over C.
    """

    left: Node
    right: Node
    bias: Node | None
    dtype: torch.dtype
    m: int
    n: int
    k: int
    left_form: tuple[bool, int]  # transposed, leading dimension
    right_form: tuple[bool, int]
    result_leading: int
    alpha: float = 1.0
    beta: float = 0.0
    batch: int = 1
    batch_strides: tuple[int, int, int] = (0, 0, 0)  # left, right, result
    bias_layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def largest(self) -> int:
        """The largest number that BLAS is given."""
        leading = (self.left_form[1], self.right_form[1], self.result_leading)
        return max(self.batch, self.m, self.n, self.k, *leading)
