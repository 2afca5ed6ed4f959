"""Steps as tables of 64-bit integers, and the native function that executes them.

    KernelStep(name, reads, writes)   ->   kind, address of the kernel, first argument, arguments, detail
    Place(buffer, offset)             ->   index of a base pointer, bytes from there

The layout is that of the structs in ``runner.cpp``.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from typing import Any

import torch

from fuse.runtime.cpu.blas import gemm_address, gemm_batch_address
from fuse.runtime.cpu.compiler import build
from fuse.runtime.programs.libraries import LibraryProduct
from fuse.runtime.programs.steps import CopyStep, KernelStep, Place, ProductStep, PythonStep, Step

_KERNEL, _COPY = 0, 1
_PRODUCT = {torch.float32: 2, torch.float64: 3}
_BATCH = {torch.float32: 4, torch.float64: 5}
_STEP_FIELDS = 7
_SHARED_OUT, _BY_ONE_THREAD = 0, -1
_POINTER_BYTES = 8


class Tables:
    """Steps, arguments and details as the runner reads them (see ``runner.cpp`` for the fields)."""

    def __init__(self, workspace: int, functions: dict[str, int]) -> None:
        self.workspace = workspace
        self.functions = functions
        self.steps, self.arguments, self.details = array("q"), array("q"), array("q")
        self.address = 0

    def add(self, step: Step, addresses: Callable[[tuple[Place, ...]], Sequence[int]]) -> None:
        """Append a native step; ``addresses`` gives for each place the index of a base pointer and an offset in
        bytes."""
        assert not isinstance(step, PythonStep)
        first: tuple[Place, ...] = step.writes
        second: tuple[Place, ...] = step.reads
        detail = len(self.details)
        least = _BY_ONE_THREAD
        if isinstance(step, KernelStep):
            kind, function = _KERNEL, self.functions[step.kernel.name]
            least = _SHARED_OUT if step.kernel.parallel else _BY_ONE_THREAD
            first, second = second, first
            self.details.extend([value for _, value in step.kernel.sizes])
        elif isinstance(step, CopyStep):
            kind, function = _COPY, 0
            self.details.extend(copy_detail(step.item, step.size, step.target_stride, step.source_stride))
        elif isinstance(step, ProductStep):
            kind, function = _product_function(step.product)
            self.details.extend(_product_detail(step.product))
        argument = len(self.arguments) // 2
        self.arguments.extend(addresses(first))
        self.arguments.extend(addresses(second))
        self.steps.extend((kind, function, argument, len(first) + len(second), detail, least, 0))

    def __len__(self) -> int:
        return len(self.steps) // _STEP_FIELDS

    def freeze(self) -> Tables:
        """Write the header with the addresses of the arrays, which must not grow any more."""
        parts = (self.steps, self.arguments, self.details)
        self.header = array("q", [*(part.buffer_info()[0] for part in parts), self.workspace])
        self.address = self.header.buffer_info()[0]
        return self


def copy_detail(item: int, size: Sequence[int], to: Sequence[int], source: Sequence[int]) -> list[int]:
    """The details of a copy: rank, element size, then for each dimension its size and both strides in bytes.

    Dimensions that are contiguous on both sides are merged.

    >>> copy_detail(4, (2, 3, 5), (15, 5, 1), (15, 5, 1))
    [1, 4, 30, 4, 4]
    >>> copy_detail(4, (3, 5), (5, 1), (0, 1))
    [2, 4, 3, 20, 0, 5, 4, 4]
    """
    dimensions = sorted((s for s in zip(size, to, source, strict=True) if s[0] != 1), key=lambda d: -d[1])
    merged: list[tuple[int, int, int]] = []
    for length, a, b in dimensions:
        if merged and merged[-1][1:] == (a * length, b * length):
            merged[-1] = merged[-1][0] * length, a, b
        else:
            merged.append((length, a, b))
    return [len(merged), item, *(n for length, a, b in merged for n in (length, a * item, b * item))]


def _product_function(product: LibraryProduct) -> tuple[int, int]:
    single, grouped = gemm_address(product.dtype), gemm_batch_address(product.dtype)
    if product.batch > 1 and grouped:
        return _BATCH[product.dtype], grouped
    assert single is not None, "the scheduler makes products only where there is a BLAS"
    return _PRODUCT[product.dtype], single


def _product_detail(product: LibraryProduct) -> list[int]:
    item = product.dtype.itemsize
    (transpose_a, lda), (transpose_b, ldb) = product.left_layout, product.right_layout
    scales = struct.unpack("2q", struct.pack("2d", product.alpha, product.beta))
    strides = (stride * item for stride in product.batch_strides)
    fields = [product.m, product.n, product.k, transpose_a, transpose_b, lda, ldb, product.result_leading, *scales]
    fields += [product.batch, *strides]
    if product.bias_layout is None:
        return [*fields, 0]
    size, stride = product.bias_layout
    *outer, rows, columns = (1, 1, *size)[-3:]
    result = (product.batch_strides[2], product.result_leading, 1)
    spread = (0, 0, *stride)[-3:]
    copy = copy_detail(item, (*outer, rows, columns), result, spread)
    return [*fields, len(fields) + 1, *copy]


@cache
def runner() -> Any:
    """``fuse_run`` of ``runner.cpp`` as a built-in Python function, compiled once for all programs.

    ``run(tables, first, last, bases)`` takes two addresses and the range of steps, and returns the launches.
    """
    folder = resources.files("fuse.runtime.cpu")
    source = "\n".join(folder.joinpath(name).read_text() for name in ("crowd.h", "runner.cpp"))
    method = ctypes.c_char.in_dll(build(source), "fuse_method")
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return make(("PyCFunction_NewEx", ctypes.pythonapi))(ctypes.addressof(method), None, None)


def scratch_bytes(steps: Sequence[Step]) -> int:
    """Bytes for the pointers of the step with the most arguments."""
    needed = 0
    for step in steps:
        if isinstance(step, PythonStep):
            continue
        needed = max(needed, len(step.reads) + len(step.writes) + 2)
        if isinstance(step, ProductStep):
            needed = max(needed, len(step.reads) + len(step.writes) + 1 + 3 * step.product.batch)
    return needed * _POINTER_BYTES
