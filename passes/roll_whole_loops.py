"""Roll a loop that computes the products of its inputs in each step, where that is faster.

    for t: h = tanh(xs[t] @ u + h @ w)      ->      h, hs = loop(h0, xs, u, w)      both products in the step

Before the loop, ``xs @ u`` is one large product, whose result makes a trip through memory. In the step, both products
run on packed weights in the same kernel, and no library is called. This is faster as long as all weights stay in cache,
or enough rows share each weight that is read. Otherwise the products are merged first, and ``roll_loops`` rolls the
rest.

Declined where the weights are too large for the batch. Declined where a step has reductions (threads then share rows,
not units), unless all products of the input take less time than the launch of one product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.cost import profiles
from fuse.cost.work import work_of_node
from fuse.graph.functional.short_graphs import WHOLE, StepsNeeded, is_short
from fuse.loops.body_operands import BodyOperand, Computed, MovingInput
from fuse.loops.rolling import Rolled, lasting
from fuse.loops.short_loops import needs_steps, opened
from fuse.passes.roll_loops import roll
from fuse.passes.view_chains import view_chains
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict

aten = torch.ops.aten
CACHED_BYTES = 2 * 2**20
"""Weights up to this many bytes stay in the second-level caches of two cores between steps."""
SHARING_ROWS = 8
"""Rows from which a step is bound by arithmetic, not by reading weights."""


@register_pass(stage="clean", after="cats_at_once", behind_others=True)  # which may rewrite every step
def roll_whole_loops(graph: GraphModule) -> Iterator[Verdict]:
    """Roll a loop that computes the products of its inputs in each step, where that is faster."""
    if is_short(graph) and opened(graph):
        yield from view_chains(graph)
    yield from roll(graph, obstacle)
    if is_short(graph) and needs_steps(graph):
        raise StepsNeeded
    graph.meta.pop(WHOLE, None)


def projections(rolled: Rolled) -> list[Node]:
    """The products of a step that multiply a part of an input by a weight."""
    positions = dict.fromkeys(j for (j, _), found in rolled.slots.items() if _moves(found))
    nodes = [rolled.typical[j] for j in positions]
    return [node for node in nodes if node.target in (aten.mm.default, aten.addmm.default)]


def _moves(slot: BodyOperand) -> bool:
    return isinstance(slot, MovingInput) or (isinstance(slot, Computed) and any(map(_moves, slot.slots.values())))


def obstacle(rolled: Rolled) -> str | None:
    """Why the input's products should leave the loop, or None."""
    projected = projections(rolled)
    if not projected:
        return None
    step = [rolled.typical[j] for j in sorted(lasting(rolled))]
    if any(ops.kind(node.target) == "reduction" for node in step) and not are_small(projected, rolled.count):
        return "a step has reductions: the input's products leave the loop"
    products = [node for node in step if ops.kind(node.target) == "gemm"]
    if not products:
        return None
    return better_outside(min(node.meta["val"].shape[0] for node in products), sum(map(weight_bytes, products)))


def are_small(products: Sequence[Node], steps: int) -> bool:
    """Whether the arithmetic of ``products`` in all steps takes less time than the launch of one product."""
    work = [work_of_node(product) for product in products]
    profile = profiles.of_device(products[0].meta["val"].device.type)
    return profile.is_small(steps * sum(one.flops for one in work), 0, work[0].dtype)


def better_outside(rows: int, weights: int) -> str | None:
    """Why the input's product of steps of ``rows`` rows and ``weights`` bytes should leave the loop, or None."""
    if rows < SHARING_ROWS and weights > CACHED_BYTES:
        return "the weights do not stay in cache: the input's products leave the loop"
    return None


def weight_bytes(product: Node) -> int:
    weight: Tensor = product.args[-1].meta["val"]  # type: ignore[union-attr]  # FX types arguments loosely
    return math.prod(weight.shape) * weight.itemsize
