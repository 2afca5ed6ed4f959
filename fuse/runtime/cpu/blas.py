"""Matrix products through the BLAS that torch itself ships.

    node mm/addmm/bmm/baddbmm/mv  ->  LibraryProduct: the arguments of ?gemm_ or ?gemm_batch_

The routines are those of torch's own shared library, so that a fused product runs the same code with the same threads
as eager. BLAS is column-major and torch's matrices are row-major: C = A B is computed as C^T = B^T A^T, without a copy.
To BLAS, an operand with one unit stride is a plain or a transposed matrix. Other products (other dtypes, no unit
stride, an empty matrix, no BLAS) are ``None`` here and stay ATen calls.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import Node

from fuse.runtime.programs.layout import is_lazy
from fuse.runtime.programs.libraries import LibraryProduct

aten = torch.ops.aten
_PREFIX = {torch.float32: "s", torch.float64: "d"}
LARGEST_NUMBER = 2**31 - 1  # BLAS takes 32-bit integers


@cache
def blas_address(name: str) -> int | None:
    """Address of a BLAS routine in the process's torch; None if this build has none.

    >>> blas_address("no_such_routine_") is None
    True
    """
    folder = Path(torch.__file__).parent / "lib"
    for file in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            library = ctypes.CDLL(str(folder / file))
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def gemm_address(dtype: torch.dtype) -> int | None:
    """Address of ``sgemm_`` or ``dgemm_``; None if there is none for this dtype."""
    return blas_address(f"{_PREFIX[dtype]}gemm_") if dtype in _PREFIX else None


def gemm_batch_address(dtype: torch.dtype) -> int | None:
    """Address of ``sgemm_batch_`` or ``dgemm_batch_``, an extension of MKL; None elsewhere."""
    return blas_address(f"{_PREFIX[dtype]}gemm_batch_") if dtype in _PREFIX else None


def product(node: Node) -> LibraryProduct | None:
    """``node`` as a BLAS product; None if it stays an ATen call."""
    if node.op != "call_function" or node.target not in PRODUCTS:
        return None
    *bias, left, right = node.args
    found = _describe(node, left, right, *bias)
    return None if found is None or gemm_address(found.dtype) is None else found


PRODUCTS = frozenset({aten.mm.default, aten.bmm.default, aten.mv.default, aten.addmm.default, aten.baddbmm.default})
"""Operators whose last two arguments are multiplied, and added to the one before them if there is one."""


def _describe(node: Node, left: object, right: object, bias: object = None) -> LibraryProduct | None:
    if not isinstance(left, Node) or not isinstance(right, Node):
        return None
    values: list[Tensor] = [left.meta["val"], right.meta["val"], node.meta["val"]]
    dtype = values[2].dtype
    same = all(v.dtype == dtype and v.device.type == "cpu" and not is_lazy(v) for v in values)
    if not same or dtype not in _PREFIX or values[2].numel() == 0:
        return None
    as_column = values[1].dim() == 1
    (batch, m, k), a_strides = _as_batch(values[0], False)
    (_, _, n), b_strides = _as_batch(values[1], as_column)
    _, c_strides = _as_batch(values[2], as_column)
    left_layout = blas_layout(m, k, *a_strides[1:])
    right_layout = blas_layout(k, n, *b_strides[1:])
    result_layout = blas_layout(m, n, *c_strides[1:])
    if left_layout is None or right_layout is None or result_layout is None or result_layout[0]:
        return None
    if k == 0:
        return None
    found = LibraryProduct(
        left,
        right,
        None,
        dtype,
        m,
        n,
        k,
        left_layout,
        right_layout,
        result_layout[1],
        batch=batch,
        batch_strides=(a_strides[0], b_strides[0], c_strides[0]),
    )
    if found.largest > LARGEST_NUMBER:
        return None
    return _with_bias(found, bias, node) if isinstance(bias, Node) else found


def _with_bias(found: LibraryProduct, bias: Node, node: Node) -> LibraryProduct | None:
    alpha, beta = (node.kwargs.get(name, 1) for name in ("alpha", "beta"))
    if not isinstance(alpha, int | float) or not isinstance(beta, int | float):
        return None
    value: Tensor = bias.meta["val"]
    if value.dtype != found.dtype or value.device.type != "cpu" or is_lazy(value):
        return None
    if beta == 0:  # as in eager, the bias is not read, so that a NaN in it has no effect
        return replace(found, alpha=float(alpha))
    size = tuple(node.meta["val"].shape)
    layout = (size, broadcast_strides(value, size))
    return replace(found, bias=bias, alpha=float(alpha), beta=float(beta), bias_layout=layout)


def _as_batch(tensor: Tensor, column: bool) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Size and stride of a tensor viewed as a batch of matrices; a vector is one row, or one column with ``column``."""
    size, stride = tuple(tensor.shape), tensor.stride()
    if len(size) == 1:
        size, stride = ((*size, 1), (*stride, 1)) if column else ((1, *size), (1, *stride))
    if len(size) == 2:
        size, stride = (1, *size), (0, *stride)
    return size, stride  # type: ignore[return-value]  # three of each by now


def broadcast_strides(tensor: Tensor, size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of ``tensor.expand(size)``.

    >>> broadcast_strides(torch.empty(5), (3, 5)), broadcast_strides(torch.empty(3, 1), (2, 3, 5))
    ((0, 1), (0, 1, 0))
    """
    own = [0 if length == 1 else stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return (*[0] * (len(size) - len(own)), *own)


def blas_layout(rows: int, columns: int, row_stride: int, column_stride: int) -> tuple[bool, int] | None:
    """The layout of a matrix for BLAS: ``(transposed, leading dimension)``; None if BLAS cannot read it.

    >>> blas_layout(3, 4, 4, 1), blas_layout(3, 4, 1, 3), blas_layout(3, 4, 8, 2)
    ((False, 4), (True, 3), None)
    """
    if (column_stride == 1 or columns == 1) and (row_stride >= columns or rows == 1):
        return False, row_stride if rows > 1 else max(columns, 1)
    if (row_stride == 1 or rows == 1) and (column_stride >= rows or columns == 1):
        return True, column_stride if columns > 1 else max(rows, 1)
    return None
