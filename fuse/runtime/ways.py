"""The kernels that may be the fastest for a region.

    with a product       1 to 4 panels in a block; one thread where there is little to do
    ... a convolution    1 to 4 panels in a block; other shares of the places and outputs for a thread
    any other            fewer or more threads, or inside an outer loop; another order of loops; smaller blocks of rows

The kernel of the cost model is the first. Others are left out where the cost model is sure: where there is so little to
do that nothing is to be gained, or so much that threads are worth waking in any case.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.fx import GraphModule

from fuse.kernel.emit import EARLY_WORK, PARALLEL_WORK, Threads, works
from fuse.kernel.form import DEFAULT, LANES, Form
from fuse.kernel.lower import Kernel, lower, program_of
from fuse.kernel.product_frame import HEADERS, MOST_PANELS, PARALLEL_PRODUCT
from fuse.kernel.schedule import schedule

aten = torch.ops.aten

USUAL = "as costs say"
MOST_WORK = 8
"""Times the work from which threads are woken: beyond, they always pay."""
MOST_SHARES = 3
MOST_KERNELS = 4
"""Kernels of a region without a product that are measured."""


def holds_product(kernel: Kernel) -> bool:
    """Whether the kernel is one of those that multiply tile by tile."""
    return kernel.headers[: len(HEADERS)] == HEADERS


def kernels_of(region: GraphModule, usual: Kernel) -> dict[str, Kernel]:
    """The kernels that may be the fastest for ``region``, whose kernel is ``usual``, by name; equal ones once."""
    forms = _products(region) if holds_product(usual) else _loops(region)
    found: dict[str, Kernel] = {}
    texts = set()
    for name, threads, form in forms:
        kernel = lower(region, threads, form)
        if isinstance(kernel, Kernel) and (text := kernel.source.replace(kernel.name, "")) not in texts:
            texts.add(text)
            found[name] = kernel
    return found if holds_product(usual) else dict(list(found.items())[:MOST_KERNELS])


Ways = Iterator[tuple[str, Threads, Form]]


def _products(region: GraphModule) -> Ways:
    yield USUAL, "if worth it", DEFAULT
    for panels in range(1, MOST_PANELS + 1):
        yield f"{panels} panels", "if worth it", Form(panels=panels)
    for share in range(1, MOST_SHARES if _convolves(region) else 0):
        yield f"share {share + 1}", "if worth it", Form(share=share)
    if PARALLEL_PRODUCT <= _multiplications(region) < MOST_WORK * PARALLEL_PRODUCT:
        yield "one thread", "one", DEFAULT


def _loops(region: GraphModule) -> Ways:
    yield USUAL, "if worth it", DEFAULT
    most = max(works(schedule(program_of(region))), default=0)
    if most < EARLY_WORK:
        return
    if most < PARALLEL_WORK:
        yield "more threads", "early", DEFAULT
    else:
        yield "threads inside", "inside", DEFAULT
    if PARALLEL_WORK <= most < MOST_WORK * PARALLEL_WORK:
        yield "one thread", "one", DEFAULT
    yield "other order", "if worth it", Form(order=1)
    for part in (2, 4, 8):
        yield f"{LANES // part} lanes", "if worth it", Form(lanes=LANES // part)


def _convolves(region: GraphModule) -> bool:
    return any(node.target is aten.convolution.default for node in region.graph.nodes)


def _multiplications(region: GraphModule) -> int:
    """Multiplications of the product or convolution in ``region``."""
    for node in region.graph.nodes:
        if node.target is aten.convolution.default:
            return int(node.meta["val"].numel() * math.prod(node.args[1].meta["val"].shape[1:]))
        if node.target in (aten.mm.default, aten.addmm.default):
            return int(node.meta["val"].numel() * node.args[-2].meta["val"].shape[1])
    return 0
