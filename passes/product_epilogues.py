"""Fuse a matrix product or convolution with the operators that follow it.

    y = addmm(b, x, w)             z = region(b, x, w, r):
    z = gelu(y) + r         ->         for tiles of x @ w, in registers and the nearest cache:
                                           z[tile] = gelu(tile + b) + r[tile]

One launch replaces two, and the product's result is not written to memory and read again. The product is then a
generated kernel (``tiles.h``, with the weight packed in the call; ``windows.h``). The batch norm, activation and sum
that follow a convolution are elementwise, so that a residual block has one launch for each convolution. The product
joins its first reader, whatever else that reads. Other readers join if they need no further result, such as comparisons
for the backward pass (``y > 0``). If any other operator reads the product, the kernel also stores it.

A reader that reduces the product's columns (layer norm, softmax) joins it where the weight is small enough to stay in
the cache of one core (``fuse/kernel/whole_rows.py``).

Declined where packing the weight does not pay for so few rows (where sizes vary, a small weight is packed
nevertheless), where the reader's elements are not the product's (a slice, another shape), and where the reader already
contains a product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.kernel.kernel import Declined
from fuse.kernel.lower import lower
from fuse.kernel.sizes.sized import sizes_vary
from fuse.rewrite import effects, nested, regions
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten

PRODUCTS = (aten.mm.default, aten.addmm.default, aten.convolution.default)

FEWEST_ROWS = 4
"""Below, the library multiplies without packing the weight, and is faster."""
SMALL_WEIGHT = 4096
"""The most elements of a weight with which the library is at most 4 % faster (measured with 8 to 64 columns)."""


@register_pass(stage="fuse", after="fuse_movement")
def product_epilogues(graph: GraphModule) -> Iterator[Verdict]:
    """Fuse a matrix product or convolution with the operators that follow it."""
    order = {node: number for number, node in enumerate(graph.graph.nodes)}
    for product in [node for node in graph.graph.nodes if node.target in PRODUCTS]:
        readers = [reader for reader in effects.readers(product) if reader.op != "output"]
        first, *others = sorted(readers, key=order.__getitem__) or (None,)
        if first is None or not is_elementwise(first):
            continue
        if reason := obstacle(product, first):
            yield declined((product, first), reason)
            continue
        more = [reader for reader in others if waits_for(product, reader)]
        for members in ((product, first, *more), (product, first)) if more else ((product, first),):
            body, inputs, results = regions.build_body(members)
            kernel = lower(body)
            if not isinstance(kernel, Declined):
                yield rewrite(members, join, graph, members, (body, inputs, results), order)
                break
            yield declined(members, kernel.reason)
    regions.sort(graph.graph)


def join(
    graph: GraphModule,
    members: Sequence[Node],
    made: tuple[GraphModule, list[Node], list[Node]],
    order: dict[Node, int],
) -> None:
    """Insert the region: at the product's first reader in ``order``, at its last member in the graph."""
    position = order[members[1]]
    order[regions.insert_region(graph, members, *made)] = position


def waits_for(product: Node, reader: Node) -> bool:
    """Whether ``reader`` is elementwise, and reads only the product and inputs."""
    there = {product, *reader.graph.find_nodes(op="placeholder")}
    elementwise = is_elementwise(reader) and not holds_product(reader)
    return elementwise and there.issuperset(map(regions.owner, reader.all_input_nodes))


def is_elementwise(node: Node) -> bool:
    """Whether ``node`` may join a product's kernel; ``lower`` decides which reductions may."""
    if node.op != "call_function":
        return regions.is_region(node)
    if node.target is aten.clone.default:  # a copy into another layout
        return True
    return ops.kind(node.target) in ("pointwise", "reduction")


def obstacle(product: Node, reader: Node) -> str | None:
    """Why the two should not be one kernel, or None; ``lower`` decides whether a kernel exists."""
    if product.target is not aten.convolution.default and has_few_rows(product):
        return f"fewer than {FEWEST_ROWS} rows: packing the weight does not pay"
    if holds_product(reader):
        return "the reader contains a product already"
    return None


def has_few_rows(product: Node) -> bool:
    """Whether the library is faster for so few rows. If sizes vary and both are about as fast, the kernel of calls with
    more rows serves this call too, and nothing is compiled for it."""
    if product.meta["val"].size(0) >= FEWEST_ROWS:
        return False
    weight = product.args[-1]
    assert isinstance(weight, Node)
    return not sizes_vary() or weight.meta["val"].numel() > SMALL_WEIGHT


def holds_product(node: Node) -> bool:
    module = nested.called_module(node)
    return isinstance(module, GraphModule) and any(
        n.target in (*PRODUCTS, aten.bmm.default) for n in module.graph.nodes
    )
