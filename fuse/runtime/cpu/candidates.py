"""Candidate kernels of a region for autotuning.

    with a product       1 to 4 panels in a block; one thread for little work
    ... a convolution    1 to 4 panels in a block; other shares of the output for a thread
    any other            one thread for little work

The first is the kernel of the cost model. Others are tried only where the cost model may be wrong: one thread only for
work near the limit from which several pay. If torch has one thread, all kernels have one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch.fx import GraphModule, Node

from fuse.kernel.config import DEFAULT, Config
from fuse.kernel.cpu.product_frame import HEADERS, MOST_PANELS, PARALLEL_PRODUCT
from fuse.kernel.cpu.tiled_products import by_cost_of_panels
from fuse.kernel.cpu.work import PARALLEL_WORK, works
from fuse.kernel.kernel import Kernel
from fuse.kernel.lower import lower
from fuse.kernel.nests.schedule import schedule
from fuse.kernel.recipes.reading import computation_of

aten = torch.ops.aten

USUAL = "as costs say"
MOST_WORK = 8
"""Work up to which one thread is tried, relative to the work from which several are used; beyond, several always
pay."""
MOST_SHARES = 3
"""Shares of a convolution that are tried, the cost model's included."""
MOST_PANEL_NUMBERS = 3
"""Numbers of panels that are tried for a matrix product."""
MOST_KERNELS = 5
"""Most kernels that are measured; each one adds to the compile time."""
MULTIPLY = (aten.mm.default, aten.addmm.default, aten.convolution.default)


def holds_product(kernel: Kernel) -> bool:
    """Whether a kernel contains a tiled product or convolution."""
    return kernel.headers[: len(HEADERS)] == HEADERS


def kernels_of(region: GraphModule, usual: Kernel) -> dict[str, Kernel]:
    """The distinct candidate kernels of ``region``, by name; ``usual`` is the kernel of the cost model."""
    configs = _products(region) if holds_product(usual) else _loops(region)
    found: dict[str, Kernel] = {}
    texts = set()
    for name, config in configs:
        if torch.get_num_threads() == 1 and config.threads == "one":
            continue
        kernel = lower(region, config)
        if isinstance(kernel, Kernel) and (text := kernel.source.replace(kernel.name, "")) not in texts:
            texts.add(text)
            found[name] = kernel
        if len(found) == MOST_KERNELS:
            break
    return found


Candidates = Iterator[tuple[str, Config]]


def _products(region: GraphModule) -> Candidates:
    yield USUAL, DEFAULT
    node = next((node for node in region.graph.nodes if node.target in MULTIPLY), None)
    if node and PARALLEL_PRODUCT <= _multiplications(node) < MOST_WORK * PARALLEL_PRODUCT:
        yield "one thread", Config(threads="one")
    panels: Sequence[int] = range(1, MOST_PANELS + 1)
    if node and node.target is aten.convolution.default:
        for share in range(1, MOST_SHARES):
            yield f"share {share + 1}", Config(share=share)
    elif node:
        depth, columns = node.args[-1].meta["val"].shape
        panels = by_cost_of_panels(columns, depth, node.meta["val"].itemsize)[:MOST_PANEL_NUMBERS]
    for number in panels:
        yield f"{number} panels", Config(panels=number)


def _loops(region: GraphModule) -> Candidates:
    yield USUAL, DEFAULT
    most = max(works(schedule(computation_of(region))), default=0)
    if PARALLEL_WORK <= most < MOST_WORK * PARALLEL_WORK:
        yield "one thread", Config(threads="one")


def _multiplications(node: Node) -> int:
    """Number of multiplications in a product or convolution."""
    if node.target is aten.convolution.default:
        return int(node.meta["val"].numel() * math.prod(node.args[1].meta["val"].shape[1:]))  # type: ignore[union-attr]  # FX types arguments loosely
    return int(node.meta["val"].numel() * node.args[-1].meta["val"].shape[0])  # type: ignore[union-attr]  # FX types arguments loosely
