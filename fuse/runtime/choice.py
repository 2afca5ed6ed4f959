"""Which kernel, or library, runs a product or a convolution: by rule, or measured (``FUSE_TUNE=1``).

    region with a product          kernel with blocks of 1, 2, 3 or 4 panels
    mm, addmm on their own    ->   the library's product, or one of such kernels
    convolution on its own         the library's convolution, or one of such kernels

All ways are one launch, so that a choice changes no count. Where it is measured, operands are made up in the layouts
that the call has. The rule: large products on their own are a kernel on processors of AMD, where the library of
PyTorch's usual builds (MKL) was 0.8 to 0.9 times as fast, packing included (one thread, 16 to 384 rows, 768 x 768 to
3072 x 768).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse.graph.ends import outputs_of
from fuse.kernel.lower import Declined, Kernel, lower, structure
from fuse.kernel.product_frame import HEADERS, MOST_PANELS
from fuse.runtime import cpu, tuning
from fuse.runtime.functions import addresses_of
from fuse.runtime.lone import region_of

aten = torch.ops.aten

LIBRARY = "library"
FEWEST_ROWS = 16
LARGE = 1 << 24
"""Multiplications of a product for which it pays to compile a kernel."""
LONE = (aten.mm.default, aten.addmm.default, aten.convolution.default)


def lower_measured(region: GraphModule) -> Kernel | Declined:
    """The kernel of ``region``: what ``lower`` says, or the fastest with other blocks where that is measured."""
    made = lower(region)
    if not tuning.enabled() or not isinstance(made, Kernel) or made.headers[: len(HEADERS)] != HEADERS:
        return made
    kernels = kernels_of(region)
    return kernels[tuning.fastest(structure(region, named=False), runs_of(region, kernels))]


def preferred(node: Node) -> Kernel | str | None:
    """What runs a product or convolution on its own: a kernel, or ``LIBRARY``; None where nothing is known."""
    if node.target not in LONE or not (tuning.enabled() or is_large_on_amd(node)):
        return None
    region, _ = region_of(node)
    made = lower(region)
    if isinstance(made, Declined):
        return None
    if not tuning.enabled():
        return made
    kernels = kernels_of(region)
    runs = runs_of(region, kernels)
    inputs = [made_up(n.meta["val"]) for n in region.graph.nodes if n.op == "placeholder"]
    runs[LIBRARY] = lambda: region(*inputs)
    name = tuning.fastest(structure(region, named=False), runs)
    return kernels.get(name, LIBRARY)


def is_large_on_amd(node: Node) -> bool:
    """Whether this is a product that MKL is slow at."""
    if node.target is aten.convolution.default or not cpu.is_amd():
        return False
    rows, columns = node.meta["val"].shape
    depth = node.args[-1].meta["val"].shape[0]  # type: ignore[union-attr]  # the right operand
    return bool(rows >= FEWEST_ROWS and rows * columns * depth >= LARGE)


def kernels_of(region: GraphModule) -> dict[str, Kernel]:
    """The kernels that may be the fastest for ``region``, by name; equal ones once."""
    found: dict[str, Kernel] = {}
    for panels in range(1, MOST_PANELS + 1):
        kernel = lower(region, panels=panels)
        texts = {k.source.replace(k.name, "") for k in found.values()}
        if isinstance(kernel, Kernel) and kernel.source.replace(kernel.name, "") not in texts:
            found[f"{panels} panels"] = kernel
    return found


def runs_of(region: GraphModule, kernels: dict[str, Kernel]) -> dict[str, Callable[[], object]]:
    """Functions that run each kernel once, all on the same operands."""
    values = [node.meta["val"] for node in region.graph.nodes if node.op == "placeholder"]
    results = [node.meta["val"] for node in outputs_of(region.graph)]
    tensors = [made_up(value) for value in (*values, *results)]
    addresses = addresses_of(kernels.values())
    return {name: _run(addresses[kernel.name], tensors, kernel) for name, kernel in kernels.items()}


def made_up(value: Tensor) -> Tensor:
    """A tensor of the layout of ``value``: numbers of all sizes for floats, else zeros, which every table has.

    The numbers are not drawn from the generator of the user's program.
    """
    held = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    drawn = torch.Generator().manual_seed(0)
    return held.normal_(generator=drawn) if value.dtype.is_floating_point else held.zero_()


def _run(address: int, tensors: Sequence[Tensor], kernel: Kernel) -> Callable[[], object]:
    workspace = torch.empty(kernel.workspace_bytes, dtype=torch.uint8)
    pointers = [tensor.data_ptr() for tensor in (*tensors, workspace)]
    arguments = (ctypes.c_void_p * len(pointers))(*pointers)
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(address)
    held = (*tensors, workspace)
    return lambda: (function(arguments), held)
