"""Which kernel, or library, runs a region: by rule, or measured (``FUSE_TUNE=1``).

    region                   the kernel of the cost model, or one of other blocks, threads or order of loops
    mm, addmm on their own   the library's product (MKL), or one of such kernels
    convolution on its own   the library's convolution (oneDNN), or one of such kernels

``candidates.py`` says what there is. All ways are one launch, so that a choice changes no count. Where it is measured,
operands are made up in the layouts that the call has, and what is called from Python is measured with what that costs.
The rule: products on their own are a kernel where the library's are slow (``blas_speed.py`` measures that once),
but for the smallest and thinnest. On AMD's processors the library of PyTorch's usual builds (MKL) took 1.0 to 3 times
as long, packing included (one call, two threads, 2 to 1000 rows, 32 to 4096 columns); it also keeps what it packs
into, 0.1 to 2 MB that no plan knows of.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from fuse.kernel.lower import Declined, Kernel, lower, structure
from fuse.runtime import tuning
from fuse.runtime.cpu import blas_speed, processor
from fuse.runtime.cpu.candidate_runs import Run, run_of_library, runs_of_kernels
from fuse.runtime.cpu.candidates import kernels_of
from fuse.runtime.single_operators import region_of

aten = torch.ops.aten

LIBRARY = "library"
FEWEST_ROWS = 2
FEWEST_COLUMNS = 32
LARGE = 1 << 16
"""Multiplications of a product for which it pays to compile a kernel."""
LONE = (aten.mm.default, aten.addmm.default, aten.convolution.default)


def lower_measured(region: GraphModule) -> Kernel | Declined:
    """What computes ``region``: the kernel that ``lower`` makes, or the fastest way where that is measured."""
    made = lower(region)
    if not tuning.enabled() or isinstance(made, Declined):
        return made
    return _fastest(region, made, {}) or made


def preferred(node: Node, lowered: Callable[[Node], Kernel | Declined]) -> Kernel | str | None:
    """The kernel of a product or convolution on its own, or ``LIBRARY``; None where nothing is known.

    ``lowered`` makes the kernel of an operator on its own, once for equal ones.
    """
    if node.target not in LONE or not (tuning.enabled() or is_for_a_kernel(node)):
        return None
    if not tuning.enabled():
        found = lowered(node)
        return None if isinstance(found, Declined) else found
    region, _ = region_of(node)
    made = lower(region)
    if isinstance(made, Declined):
        return None
    runs = {LIBRARY: run_of_library(region)}
    return _fastest(region, made, runs, kernel_first=is_for_a_kernel(node)) or LIBRARY


def _fastest(region: GraphModule, made: Kernel, library: dict[str, Run], kernel_first: bool = True) -> Kernel | None:
    """The fastest of the ``library`` and of what else computes ``region``, whose usual kernel is ``made``; None for the
    library. What runs where nothing is measured is the first."""
    kernels = kernels_of(region, made)
    runs = runs_of_kernels(region, kernels)
    runs = {**runs, **library} if kernel_first else {**library, **runs}
    if len(runs) < 2:
        return made
    return kernels.get(tuning.fastest(f"{structure(region, named=False)} on {processor.identity()}", runs))


def is_for_a_kernel(node: Node) -> bool:
    """Whether this is a product that the library is slow at, and large enough to compile a kernel for."""
    if node.target is aten.convolution.default:
        return False
    rows, columns = node.meta["val"].shape
    depth = node.args[-1].meta["val"].shape[0]  # type: ignore[union-attr]  # the right operand
    is_large = bool(rows >= FEWEST_ROWS and columns >= FEWEST_COLUMNS and rows * columns * depth >= LARGE)
    return is_large and blas_speed.is_slow()
