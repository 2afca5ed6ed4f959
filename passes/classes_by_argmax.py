"""Replace `multinomial` in a loop by an argmax of random numbers drawn before the loop.

    for t: k = multinomial(p, 1)         ->         for t: q = exponential(empty_like(p))
                                                           k = argmax(p / q)
                                                           assert 0 <= min(p), 0 < max(p) < inf

The library does the same for one sample, so that the numbers and the generator's later state are equal. The
exponential numbers are drawn before the loop (``draw_ahead``), and a kernel computes the rest. The assertion stands for
the library's error; where it fails, the call runs again in eager mode. Declined for several samples
from one row, for a generator of the caller's, and for probabilities that are not contiguous. Declined where other draws
in the loop depend on values: nothing can then be drawn before the loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.graph.patches.seeding import OF_A_LAYOUT
from fuse.loops.rolling import LEAST_STEPS
from fuse.rewrite import surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten

MESSAGE = "probabilities of classes are negative, infinite, NaN or all zero"


@register_pass(stage="clean", after="view_chains")
def classes_by_argmax(graph: GraphModule) -> Iterator[Verdict]:
    """Replace `multinomial` in a loop by an argmax of random numbers drawn before the loop."""
    by_line: dict[tuple[str, torch.Size], list[Node]] = {}
    for draw in graph.graph.find_nodes(op="call_function", target=aten.multinomial.default):
        shape = draw.args[0].meta["val"].shape
        by_line.setdefault((draw.meta.get("source", ""), shape), []).append(draw)
    for draws in by_line.values():
        if len(draws) < LEAST_STEPS:
            continue
        if reason := next(filter(None, map(obstacle, draws)), None) or among_others(draws):
            yield declined(draws[0], reason)
        else:
            yield rewrite(draws[0], draw_by_argmax, draws)


def obstacle(draw: Node) -> str | None:
    """Why ``draw`` is left to the library, or None."""
    probabilities: Tensor = draw.args[0].meta["val"]  # type: ignore[union-attr]  # as the schema says
    if draw.args[1] != 1:
        return "several samples are drawn from each row"
    if draw.kwargs.get("generator") is not None:
        return "a generator of the caller's draws"
    if not probabilities.is_contiguous() or not probabilities.numel():
        return "the probabilities are not contiguous, or there are none"
    return None


def among_others(draws: list[Node]) -> str | None:
    """Why the numbers cannot be drawn before the first of ``draws``, or None."""
    node, last = draws[0], draws[-1]
    while node is not last:
        if ops.is_random(node.target) and node.target not in (aten.multinomial.default, *OF_A_LAYOUT):
            return "draws in between depend on values"
        node = node.next
    return None


def draw_by_argmax(draws: list[Node]) -> None:
    for draw in draws:
        weights: Node = draw.args[0]  # type: ignore[assignment]  # as the schema says
        held: Tensor = weights.meta["val"]
        place = surgery.insert(draw, aten.empty.memory_format, list(held.shape), dtype=held.dtype, device=held.device)
        numbers = surgery.insert(draw, aten.exponential.default, place, 1.0)
        least = surgery.insert(draw, aten.amin.default, weights, [-1])
        most = surgery.insert(draw, aten.amax.default, weights, [-1])
        bounds = (
            surgery.insert(draw, aten.ge.Scalar, least, 0),
            surgery.insert(draw, aten.gt.Scalar, most, 0),
            surgery.insert(draw, aten.lt.Scalar, most, math.inf),
        )
        good = bounds[0]
        for other in bounds[1:]:
            good = surgery.insert(draw, aten.bitwise_and.Tensor, good, other)
        surgery.insert(draw, aten._assert_async.msg, surgery.insert(draw, aten.all.default, good), MESSAGE)
        quotient = surgery.insert(draw, aten.div.Tensor, weights, numbers)
        surgery.replace(draw, surgery.insert(draw, aten.argmax.default, quotient, -1, True))
        draw.graph.erase_node(draw)  # a draw is an effect, which stays without a reader
