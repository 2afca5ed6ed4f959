"""Choice of the kernel or library that runs a region: by a rule, or by measurement (``FUSE_TUNE=1``).

    region                   the kernel of the cost model, or one with other blocks or threads
    single mm, addmm         the library's product (MKL), or one of such kernels
    single convolution       the library's convolution (oneDNN), or one of such kernels

``candidates.py`` lists the candidates. Each is one launch, so that the choice changes no count. They are measured on
made-up operands in the layouts of the call; library calls from Python are measured with the cost of the call.

The rule: a single product is a kernel if the library's are slow (``blas_speed.py`` measures that once), unless it is
small or thin. On AMD processors, MKL (in PyTorch's usual builds) took 1.0 to 3 times as long as the kernel, packing
included (one call, two threads, 2 to 1000 rows, 32 to 4096 columns). MKL also keeps 0.1 to 2 MB of packing memory,
which no peak counts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from fuse.kernel.kernel import Declined, Kernel
from fuse.kernel.lower import lower, structure
from fuse.runtime.building import tuning
from fuse.runtime.cpu import blas_speed, processor
from fuse.runtime.cpu.candidate_runs import Run, run_of_library, runs_of_kernels
from fuse.runtime.cpu.candidates import kernels_of
from fuse.runtime.programs.single_operators import region_of

aten = torch.ops.aten

LIBRARY = "library"
FEWEST_ROWS = 2
FEWEST_COLUMNS = 32
"""Fewest rows and columns of a product's result that is computed by a kernel rather than by a slow library."""
LARGE = 1 << 16
"""Fewest multiplications of such a product, for which compiling a kernel pays."""
SINGLE = (aten.mm.default, aten.addmm.default, aten.convolution.default)


def lower_measured(region: GraphModule) -> Kernel | Declined:
    """The kernel of ``region``: that of the cost model, or with ``FUSE_TUNE`` the fastest candidate."""
    made = lower(region)
    if not tuning.enabled() or isinstance(made, Declined):
        return made
    return _fastest(region, made, {}) or made


def preferred(node: Node, lowered: Callable[[Node], Kernel | Declined]) -> Kernel | str | None:
    """The kernel of a single product or convolution, or ``LIBRARY``; None for no preference.

    ``lowered`` makes the kernel of a single operator, once for equal ones.
    """
    if node.target not in SINGLE or not (tuning.enabled() or is_for_a_kernel(node)):
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
    """The fastest candidate for ``region``, whose kernel by the cost model is ``made``; None for the ``library``.

    The first candidate, which others must clearly beat, is the one that runs without measurement.
    """
    kernels = kernels_of(region, made)
    runs = runs_of_kernels(region, kernels)
    runs = {**runs, **library} if kernel_first else {**library, **runs}
    if len(runs) < 2:
        return made
    return kernels.get(tuning.fastest(f"{structure(region, named=False)} on {processor.identity()}", runs))


def is_for_a_kernel(node: Node) -> bool:
    """Whether a single operator is a product large enough for a kernel, on a machine whose library is slow."""
    if node.target is aten.convolution.default:
        return False
    rows, columns = node.meta["val"].shape
    depth = node.args[-1].meta["val"].shape[0]  # type: ignore[union-attr]  # the right operand
    is_large = bool(rows >= FEWEST_ROWS and columns >= FEWEST_COLUMNS and rows * columns * depth >= LARGE)
    return is_large and blas_speed.is_slow()
