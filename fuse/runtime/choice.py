"""Which kernel, or library, runs a product or a convolution, where that is measured (``FUSE_TUNE=1``).

    region with a product          kernel with blocks of 1, 2, 3 or 4 panels
    mm, addmm on their own    ->   the library's product, or one of such kernels
    convolution on its own         the library's convolution, or one of such kernels

All ways are one launch, so that a measurement changes no count. Operands are made up in the layouts that the call has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse.kernel.lower import Declined, Kernel, lower, structure
from fuse.kernel.product_frame import HEADERS, MOST_PANELS
from fuse.runtime import tuning
from fuse.runtime.functions import addresses_of
from fuse.runtime.lone import region_of

aten = torch.ops.aten

LIBRARY = "library"
LONE = (aten.mm.default, aten.addmm.default, aten.convolution.default)


def lower_measured(region: GraphModule) -> Kernel | Declined:
    """The kernel of ``region``: what ``lower`` says, or the fastest with other blocks where that is measured."""
    made = lower(region)
    if not tuning.enabled() or not isinstance(made, Kernel) or made.headers[: len(HEADERS)] != HEADERS:
        return made
    kernels = kernels_of(region)
    return kernels[tuning.fastest(structure(region, named=False), runs_of(region, kernels))]


def preferred(node: Node) -> Kernel | str | None:
    """What runs a product or convolution on its own: a kernel, or ``LIBRARY``; None where that is not measured."""
    if not tuning.enabled() or node.target not in LONE:
        return None
    region, _ = region_of(node)
    if isinstance(lower(region), Declined):
        return None
    kernels = kernels_of(region)
    runs = runs_of(region, kernels)
    inputs = [made_up(n.meta["val"]) for n in region.graph.nodes if n.op == "placeholder"]
    runs[LIBRARY] = lambda: region(*inputs)
    name = tuning.fastest(structure(region, named=False), runs)
    return kernels.get(name, LIBRARY)


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
    results = [node.meta["val"] for node in region.graph.output_node().args[0]]  # type: ignore[union-attr]
    tensors = [made_up(value) for value in (*values, *results)]
    addresses = addresses_of(kernels.values())
    return {name: _run(addresses[kernel.name], tensors, kernel) for name, kernel in kernels.items()}


def made_up(value: Tensor) -> Tensor:
    """A tensor of the layout of ``value``: numbers of all sizes for floats, else zeros, which every table has."""
    held = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return held.normal_() if value.dtype.is_floating_point else held.zero_()


def _run(address: int, tensors: Sequence[Tensor], kernel: Kernel) -> Callable[[], object]:
    workspace = torch.empty(kernel.workspace_bytes, dtype=torch.uint8)
    pointers = [tensor.data_ptr() for tensor in (*tensors, workspace)]
    arguments = (ctypes.c_void_p * len(pointers))(*pointers)
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(address)
    held = (*tensors, workspace)
    return lambda: (function(arguments), held)
