"""The kernels that may be the fastest for a region.

    with a product       1 to 4 panels in a block; one thread where there is little to do
    ... a convolution    1 to 4 panels in a block; other shares of the places and outputs for a thread
    any other            one thread where there is little to do

The kernel of the cost model is the first. Others are left out where the cost model is sure: where there is so little to
do that nothing is to be gained, or so much that threads are worth waking in any case. With one thread, nothing that is
only for threads is tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch.fx import GraphModule, Node

from fuse.kernel.config import DEFAULT, Config, Threads
from fuse.kernel.cpu.emit import PARALLEL_WORK, works
from fuse.kernel.cpu.product_frame import HEADERS, MOST_PANELS, PARALLEL_PRODUCT
from fuse.kernel.cpu.tiled_products import by_cost_of_panels
from fuse.kernel.lower import Kernel, lower
from fuse.kernel.reading import computation_of
from fuse.kernel.schedule import schedule

aten = torch.ops.aten

USUAL = "as costs say"
MOST_WORK = 8
"""Times the work from which threads are woken: beyond, they always pay."""
MOST_SHARES = 3
MOST_PANEL_NUMBERS = 3
MOST_KERNELS = 5
"""Kernels that are measured: they are compiled together, which takes longer."""
MULTIPLY = (aten.mm.default, aten.addmm.default, aten.convolution.default)


def holds_product(kernel: Kernel) -> bool:
    """Whether the kernel is one of those that multiply tile by tile."""
    return kernel.headers[: len(HEADERS)] == HEADERS


def kernels_of(region: GraphModule, usual: Kernel) -> dict[str, Kernel]:
    """The kernels that may be the fastest for ``region``, whose kernel is ``usual``, by name; equal ones once."""
    configs = _products(region) if holds_product(usual) else _loops(region)
    found: dict[str, Kernel] = {}
    texts = set()
    for name, threads, config in configs:
        if torch.get_num_threads() == 1 and threads == "one":
            continue
        kernel = lower(region, threads, config)
        if isinstance(kernel, Kernel) and (text := kernel.source.replace(kernel.name, "")) not in texts:
            texts.add(text)
            found[name] = kernel
        if len(found) == MOST_KERNELS:
            break
    return found


Ways = Iterator[tuple[str, Threads, Config]]


def _products(region: GraphModule) -> Ways:
    yield USUAL, "if worth it", DEFAULT
    node = next((node for node in region.graph.nodes if node.target in MULTIPLY), None)
    if node and PARALLEL_PRODUCT <= _multiplications(node) < MOST_WORK * PARALLEL_PRODUCT:
        yield "one thread", "one", DEFAULT
    panels: Sequence[int] = range(1, MOST_PANELS + 1)
    if node and node.target is aten.convolution.default:
        for share in range(1, MOST_SHARES):
            yield f"share {share + 1}", "if worth it", Config(share=share)
    elif node:
        depth, columns = node.args[-1].meta["val"].shape
        panels = by_cost_of_panels(columns, depth, node.meta["val"].itemsize)[:MOST_PANEL_NUMBERS]
    for number in panels:
        yield f"{number} panels", "if worth it", Config(panels=number)


def _loops(region: GraphModule) -> Ways:
    yield USUAL, "if worth it", DEFAULT
    most = max(works(schedule(computation_of(region))), default=0)
    if PARALLEL_WORK <= most < MOST_WORK * PARALLEL_WORK:
        yield "one thread", "one", DEFAULT


def _multiplications(node: Node) -> int:
    """Multiplications of a product or convolution."""
    if node.target is aten.convolution.default:
        return int(node.meta["val"].numel() * math.prod(node.args[1].meta["val"].shape[1:]))  # type: ignore[union-attr]  # FX types arguments loosely
    return int(node.meta["val"].numel() * node.args[-1].meta["val"].shape[0])  # type: ignore[union-attr]  # FX types arguments loosely
