"""Pack the weights of a frozen model into the layout that its products read.

    w [768, 3072]                      packed [48, 768, 64]: blocks of 64 columns, computed once
    y = gelu(x @ w + b)        ->      region(x, packed, b):
                                           w = packed.permute(1, 0, 2).reshape(768, 3072)       read in place
                                           y = gelu(x @ w + b)

A product reads its right operand in blocks of columns. A weight that may change is packed so in every call. A constant
weight (``fuse.compile(model, freeze=True)``) is packed before any call: 1.3 to 3.5 times as fast as the library with 1
to 16 rows, 1.1 to 1.3 times with 64 and 128 (one thread, 768 x 768 to 3072 x 768). So even a single product, which
would otherwise be a library call, becomes a kernel, also in the steps of a loop.

Declined where the number of columns is no multiple of 16, and where another operator of the region reads the weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fuse.devices import has_kernels
from fuse.graph.loop import Loop
from fuse.graph.outputs import add_placeholder
from fuse.kernel.kernel import Declined
from fuse.kernel.lower import lower
from fuse.kernel.recipes.products import PRODUCT_TYPES
from fuse.kernel.target import target_of
from fuse.rewrite import nested, regions, surgery
from fuse.rewrite.constants import constant_nodes, given_constants
from fuse.rewrite.evaluate import evaluate
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten

PRODUCTS = {aten.mm.default: 1, aten.addmm.default: 2, aten.convolution.default: 1}
"""Products, and the position of the right operand."""

Packed = dict[tuple[Node, int, Node | None], Node]
"""Packed weights by width of their blocks: the nodes with which the graph and each loop's body read them."""


@dataclass(frozen=True)
class ProductGraph:
    """A graph with products; ``constants`` maps its nodes to constants of the outer graph. It may be the body of
    ``loop``."""

    graph: GraphModule
    constants: dict[Node, Node]
    loop: Node | None = None


@dataclass(frozen=True)
class Weight:
    """The right operand of a product: the constant, the node in the region's body, and the width of its blocks."""

    constant: Node
    inner: Node
    width: int


@register_pass(stage="finish", after="fuse_horizontal")
def pack_weights(graph: GraphModule) -> Iterator[Verdict]:
    """Pack the weights of a frozen model into the layout that its products read."""
    values = given_constants(graph)
    packed: Packed = {}
    for target in product_graphs(graph, {*values, *constant_nodes(graph, values)} if values else set()):
        for node in list(target.graph.graph.nodes):
            if node.target in PRODUCTS:
                body, inputs, results = regions.build_body((node,))
            elif regions.is_region(node):
                body, inputs, results = nested.called_module(node), list(node.args), []  # type: ignore[assignment]  # FX types arguments loosely
            else:
                continue
            product = product_of(body)
            right = product and product.args[PRODUCTS[product.target]]  # type: ignore[index]  # FX types arguments loosely
            outer = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True)).get(right)
            if product is None or outer not in target.constants:
                continue
            if reason := obstacle(product, right):  # type: ignore[arg-type]  # a node
                yield declined((node,), reason)
                continue
            weight = Weight(target.constants[outer], right, width_of(right))  # type: ignore[arg-type]  # nodes
            made = with_packed(body, weight)
            if isinstance(kernel := lower(made), Declined):
                yield declined((node,), kernel.reason)
                continue

            def build(
                target: ProductGraph = target, node: Node = node, made: GraphModule = made, inputs: list[Node] = inputs,
                results: list[Node] = results, weight: Weight = weight, outer: Node | None = outer,
            ) -> None:  # fmt: skip
                blocks = packed_in(graph, target, weight, values, packed)
                pack(target.graph, node, made, [blocks if one is outer else one for one in inputs], results)

            yield rewrite((node,), build)


def product_graphs(graph: GraphModule, constant: Collection[Node]) -> Iterator[ProductGraph]:
    """``graph``, and the bodies of its loops that run as programs and read constants."""
    if not constant:
        return
    yield ProductGraph(graph, {node: node for node in constant})
    for node in graph.graph.find_nodes(op="call_module"):
        loop = nested.called_module(node)
        if isinstance(loop, Loop) and not loop.persistent:
            given = zip(loop.body.graph.find_nodes(op="placeholder"), node.args, strict=True)
            fixed = list(given)[loop.spec.carries + len(loop.spec.step_inputs) :]
            yield ProductGraph(loop.body, {inner: outer for inner, outer in fixed if outer in constant}, node)


def product_of(body: GraphModule) -> Node | None:
    """The product in a region that reads a weight in vectors; None if it has no or several products."""
    found = [node for node in body.graph.nodes if node.target in PRODUCTS]
    return found[0] if len(found) == 1 and multiplies_matrices(found[0]) else None


def multiplies_matrices(product: Node) -> bool:
    """Whether the right operand is a matrix; that of a channels-last convolution counts as one."""
    if product.target is not aten.convolution.default:
        return True
    val, transposed, groups = product.meta["val"], product.args[6], product.args[8]
    last = val.dim() == 4 and val.is_contiguous(memory_format=torch.channels_last) and not val.is_contiguous()
    return bool(last and not transposed and groups == 1)


def matrix_shape(weight: Node) -> tuple[int, int]:
    """Rows and columns of a right operand; a convolution's weight has a row for each tap and channel."""
    shape = weight.meta["val"].shape
    if len(shape) == 4:
        outputs, channels, down, across = shape
        return down * across * channels, outputs
    depth, columns = shape
    return depth, columns


def obstacle(product: Node, right: Node) -> str | None:
    """Why the weight stays as it is, or None."""
    if right.meta["val"].dtype not in PRODUCT_TYPES:
        return f"products of {right.meta['val'].dtype} are left to the library"
    if not has_kernels(right.meta["val"]):
        return f"there are no kernels for device {right.meta['val'].device.type} yet"
    if width_of(right) is None:
        return f"its {matrix_shape(right)[1]} columns do not fill whole panels"
    if list(right.users) != [product]:
        return "something else in the region reads the weight"
    return None


def width_of(right: Node) -> int | None:
    """Columns of a block: as many panels as divide them evenly and fit the cache; None if a panel is not full."""
    held = right.meta["val"]
    return target_of(held.device.type).packing.whole_blocks(*matrix_shape(right), held.itemsize)


def with_packed(body: GraphModule, weight: Weight) -> GraphModule:
    """A copy of ``body`` that takes the weight in blocks."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    results: list[Node] = list(graph.graph_copy(body.graph, copies))  # type: ignore[arg-type]  # FX types arguments loosely
    inner, val = copies[weight.inner], weight.inner.meta["val"]
    readers = list(inner.users)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with surgery.fake_mode(graph):
        inner.meta["val"] = torch.empty(blocks_shape(weight), dtype=val.dtype, device=val.device)
    turned = surgery.insert(first, aten.permute.default, inner, [1, 0, 2])
    copied = surgery.insert(first, aten.clone.default, turned, memory_format=torch.contiguous_format)
    shape = [*val.shape[2:], val.shape[1], val.shape[0]] if val.dim() == 4 else list(val.shape)
    packed = surgery.insert(first, aten.view.default, copied, shape)
    matrix = surgery.insert(first, aten.permute.default, packed, [3, 2, 0, 1]) if val.dim() == 4 else packed
    for reader in readers:
        reader.replace_input_with(inner, matrix)
    return regions.region_module(graph, results)


def blocks_shape(weight: Weight) -> tuple[int, int, int]:
    depth, columns = matrix_shape(weight.inner)
    return columns // weight.width, depth, weight.width


def packed_in(
    graph: GraphModule, target: ProductGraph, weight: Weight, values: dict[Node, Tensor | None], packed: Packed
) -> Node:
    """The packed weight as a node of ``target``, computed once for all readers."""
    constant, width = weight.constant, weight.width
    if (constant, width, None) not in packed:
        value = evaluate(constant, values, constant.meta["val"].nbytes)
        assert value is not None, "it is as large as what it is a view of"
        count, depth, _ = blocks_shape(weight)
        matrix = value.permute(2, 3, 1, 0) if value.dim() == 4 else value
        blocks = matrix.reshape(depth, count, width).permute(1, 0, 2).contiguous()
        packed[constant, width, None] = surgery.add_constant(graph, blocks, like=constant)
    found = packed[constant, width, None]
    if target.loop is not None and (constant, width, target.loop) not in packed:
        last = target.graph.graph.find_nodes(op="placeholder")[-1]
        with target.graph.graph.inserting_after(last):
            inner = add_placeholder(target.graph.graph, found.name)
        inner.meta.update(val=found.meta["val"], source=found.meta.get("source", ""))
        target.loop.args = (*target.loop.args, found)
        packed[constant, width, target.loop] = inner
    return packed[constant, width, target.loop]


def pack(graph: GraphModule, node: Node, body: GraphModule, inputs: list[Node], results: list[Node]) -> None:
    """Replace the region, or the single product, by ``body``, which reads the packed weight."""
    if regions.is_region(node):
        setattr(graph, str(node.target), body)
        node.args = tuple(inputs)
    else:
        regions.insert_region(graph, (node,), body, inputs, results)
