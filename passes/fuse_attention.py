"""Fuse attention, however it is spelled, into one kernel.

    s = bmm(q.clone(), k.clone())           o = region(q, k, v, mask):
    t = s * 0.125 + mask                        for blocks of a few queries, in the nearest cache:
    p = softmax(t, -1)               ->             scores = queries @ keys
    o = bmm(p, v.clone())                           scores = softmax(scores * 0.125 + mask)
    o = o.transpose(1, 2).clone()                   o[queries] = scores @ values

Any elementwise operators and reductions over keys may stand between the two products: scale, masks, ``where``, a
softmax or its parts. The kernel needs no copies of operands or result in another layout. It also computes the scale of
an operand, and a mask that only this attention reads. ``F.scaled_dot_product_attention`` is replaced, too: from two
queries on the kernel was 1.03 to 1.5 times as fast as ATen's (one thread, 2 to 1024 queries, 16 to 1024 keys, with and
without a mask). Whole rows of scores are kept, so that a softmax equals any other softmax, also for infinities and rows
without a key. Scores stay in the cache, as in Dao et al., "FlashAttention", 2022.

Declined where other operators read scores or probabilities (a gradient does), and where a random operator stands
between the products. Declined where the library is faster: few queries share the packed keys and values, or attention
is causal (ATen skips half of the keys).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.kernel.kernel import Declined
from fuse.kernel.lower import lower
from fuse.kernel.sizes.sized import call_at_hand
from fuse.rewrite import effects, regions, surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten

PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.baddbmm.default: 1, aten.addmm.default: 1}
"""Products, and the position of the left operand."""

WHOLE = aten._scaled_dot_product_flash_attention_for_cpu.default
"""Both products and the softmax as one operator of ATen's."""

EXPONENTIALS = (aten._softmax.default, aten._safe_softmax.default, aten.exp.default)
"""The operators between the products of attention include one of these."""

FEWEST_QUERIES = 2
PACKED_FOR_ONE = 1 << 16
"""The most elements of keys and values packed for a single query: beyond, packing costs more than launches save (12
heads with 128 keys, 64 wide: 0.85 times as fast). From two queries on one kernel was never slower, be it 16 keys or
4096: 1.0 to 1.2 times as fast for short sequences, 1.2 for 128, 1.4 for 384, 1.7 for a batch of 8, whose copies go."""

COPIES = (aten.clone.default, aten.contiguous.default, aten._to_copy.default)
"""Copies into another layout, or dtype."""

MOST_BETWEEN = 64
"""The most operators between two products."""


@register_pass(stage="match", after="match_patterns")
def fuse_attention(graph: GraphModule) -> Iterator[Verdict]:
    """Fuse attention, however it is spelled, into one kernel."""
    for product in [node for node in graph.graph.nodes if node.target in PRODUCTS or node.target is WHOLE]:
        if product._erased or (found := attention_of(product)) is None:
            continue
        if reason := obstacle(found):
            yield declined((found.first, found.second), reason)
            continue
        if views := views_in_place_of_copies(found):
            yield rewrite(views, copy_instead, views)
            found = attention_of(product) or found
        members = sorted(found.members)
        body, inputs, results = regions.build_body(members)
        kernel = lower(body)
        if isinstance(kernel, Declined):
            yield declined((found.first, found.second), kernel.reason)
        else:
            yield rewrite(members, regions.insert_region, graph, members, body, inputs, results)


@dataclass
class Attention:
    """``between`` computes the left operand of the product ``second`` from the product ``first``; ``around`` are other
    operators of the kernel. For ATen's attention operator, both products are its node."""

    first: Node
    second: Node
    between: set[Node]
    around: set[Node] = field(default_factory=set)

    @property
    def members(self) -> set[Node]:
        return {self.first, self.second} | self.between | self.around


def attention_of(second: Node) -> Attention | None:
    """The attention that ends in the product ``second``, with its surroundings; None if no softmax feeds it."""
    if second.target is WHOLE:
        return with_surroundings(Attention(second, second, set()))
    weights = left_operand(second)
    leads = products_above(weights)
    size = weights.meta["val"].numel()
    firsts = [product for product in leads[weights] if product.meta["val"].numel() == size]
    if not firsts or weights in firsts:
        return None
    first = max(firsts)
    between = {node for node, products in leads.items() if first in products and node is not first}
    between = {node for node in between if not effects.is_view(node) and node.target is not operator.getitem}
    if not any(node.target in EXPONENTIALS for node in between):
        return None
    return with_surroundings(Attention(first, second, between))


def with_surroundings(found: Attention) -> Attention:
    """Add the operators ``around`` the attention that the kernel can hold."""
    take_in_operands(found)
    take_in_masks(found)
    take_in_copy(found)
    return found


def position_of_left(product: Node) -> int:
    return PRODUCTS[product.target]  # type: ignore[index]  # FX types arguments loosely


def left_operand(product: Node) -> Node:
    return product.args[position_of_left(product)]  # type: ignore[return-value]  # FX types arguments loosely


def kind(node: Node) -> str | None:
    known = ops.info(node.target)
    return known.kind if known else None


def products_above(start: Node) -> dict[Node, set[Node]]:
    """For ``start`` and each operator above it, up to products: the products that it depends on."""
    found: dict[Node, set[Node]] = {}
    stack = [(start, False)]
    while stack:
        node, done = stack.pop()
        if done:
            found[node] = set().union(*(found[argument] for argument in node.all_input_nodes))
        elif node not in found:
            found[node] = {node} if node.target in PRODUCTS else set()
            if passes_on(node) and len(found) < MOST_BETWEEN:
                stack.append((node, True))
                stack.extend((argument, False) for argument in node.all_input_nodes)
    return found


def passes_on(node: Node) -> bool:
    """Whether ``node`` may stand between the products; random operators count, and are a reason to decline."""
    if node.op != "call_function" or node.target in PRODUCTS:
        return False
    return (
        is_elementwise(node)
        or effects.is_view(node)
        or node.target in COPIES
        or node.target is operator.getitem
        or kind(node) in ("reduction", "random")
    )


def is_elementwise(node: Node) -> bool:
    known = ops.info(node.target)
    return known is not None and known.elementwise and not known.random


def take_in_operands(found: Attention) -> None:
    """Add layout copies and scales of queries, keys and values that nothing else reads."""
    for operand in operands_of(found):
        node = effects.root(operand)
        while (is_scale(node) or node.target in COPIES) and found.members.issuperset(effects.readers(node)):
            found.around.add(node)
            node = effects.root(node.all_input_nodes[0])


def operands_of(found: Attention) -> tuple[Node, Node, Node]:
    """Queries, keys (transposed, if the products are separate nodes) and values."""
    if found.first is found.second:
        return found.first.args[:3]  # type: ignore[return-value]  # FX types arguments loosely
    first, second = position_of_left(found.first), position_of_left(found.second)
    return *found.first.args[first : first + 2], found.second.args[second + 1]  # type: ignore[return-value]  # FX types arguments loosely


def views_in_place_of_copies(found: Attention) -> list[Node]:
    """Operands that are views here (the heads of a batch of one, say) but copies in calls of other sizes. With a copy,
    which the kernel leaves out, all sizes share one kernel."""
    call = call_at_hand()
    operands = [] if found.first is found.second else operands_of(found)
    copied = any(effects.root(operand).target in COPIES for operand in operands)
    place = "operands of attention", found.second.meta.get("source")
    if call is None or not call.follows_from_sizes(place, copied) or copied:
        return []
    readers = {found.first, found.second}
    return [operand for operand in operands if drops_a_one(operand) and readers.issuperset(operand.users)]


def drops_a_one(node: Node) -> bool:
    """Whether a node is a view that merges batches and heads, and would be a copy if both were larger than one."""
    if node.target is not aten.view.default:
        return False
    old, new = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]  # FX types arguments loosely
    of_images = new.dim() == 3 and old.dim() > 3 and old.shape[-2:] == new.shape[-2:]
    apart = (old.stride(d) != old.shape[d + 1] * old.stride(d + 1) for d in range(old.dim() - 3))
    return bool(of_images and 1 in old.shape[:-2] and any(apart))


def copy_instead(views: list[Node]) -> None:
    for view in views:
        copy = surgery.insert(view, aten.clone.default, view.args[0], memory_format=torch.contiguous_format)
        surgery.replace(view, surgery.insert(view, aten._unsafe_view.default, copy, view.args[1]))


def is_scale(node: Node) -> bool:
    return node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor) and len(node.all_input_nodes) == 1


def take_in_masks(found: Attention) -> None:
    """Add cheap elementwise operators (masks) that only this attention reads."""
    stack = [argument for node in found.between for argument in node.all_input_nodes]
    stack += added_to(found)
    while stack and len(found.around) < MOST_BETWEEN:
        node = effects.root(stack.pop())
        known = ops.info(node.target)
        cheap = known is not None and known.cheap and known.elementwise
        if (
            (cheap or node.target in COPIES)
            and node not in found.members
            and found.members.issuperset(effects.readers(node))
        ):
            found.around.add(node)
            stack.extend(node.all_input_nodes)


def added_to(found: Attention) -> list[Node]:
    """The summands (masks) of products that also add."""
    if found.first is found.second:
        mask = found.first.kwargs.get("attn_mask")
        return [mask] if isinstance(mask, Node) else []
    return [product.args[0] for product in (found.first, found.second) if position_of_left(product)]  # type: ignore[misc]  # FX types arguments loosely


def take_in_copy(found: Attention) -> None:
    """Add a copy of the result in another layout, if nothing else reads the result."""
    readers = effects.readers(found.second)
    if len(readers) == 1 and readers[0].target in COPIES:
        found.around.add(readers[0])


def obstacle(found: Attention) -> str | None:
    """Why the attention should not be one kernel, or None; ``lower`` decides whether a kernel exists."""
    for node in sorted(found.between):
        if kind(node) == "random":
            return "a random operator stands between the two products"
    inner = [node for node in (found.first, *sorted(found.between)) if node is not found.second]
    for node in inner:
        if not found.members.issuperset(effects.readers(node)):
            return "scores or probabilities are read elsewhere too"
    queries, *others = operands_of(found)
    rows, packed = queries.meta["val"].shape[-2], sum(operand.meta["val"].numel() for operand in others)
    if rows < FEWEST_QUERIES and packed > PACKED_FOR_ONE:
        return "a single query: packing its keys and values costs more than the launches saved"
    return None
