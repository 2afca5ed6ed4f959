"""Let kernels write the pieces of a concatenation directly into its result.

    h1 = region_1(...)                    h1, p1 = region_1(...)      p1: h1 stored once more, in its place
    h2 = region_2(...)             ->     h2, p2 = region_2(...)
    out = stack([h1, h2], 1)              out = assemble([p1, p2], 1)   launches nothing

This serves pieces that are computed one after another, such as a loop's outputs, so that no single kernel can
concatenate them. The memory planner places each piece inside the result's memory.

Declined where a piece comes from a library call or is an input: it would have to be copied.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from fuse.kernel.kernel import Declined
from fuse.kernel.lower import lower
from fuse.loops.collectors import COLLECTORS, dimension_of, pieces_of
from fuse.rewrite import regions, surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten


@register_pass(stage="fuse", after="fuse_reductions")
def assemble_in_place(graph: GraphModule) -> Iterator[Verdict]:
    """Let kernels write the pieces of a concatenation directly into its result."""
    for node in list(graph.graph.nodes):
        if node.target not in COLLECTORS or len(pieces_of(node)) < 2:
            continue
        if reason := obstacle(node):
            yield declined(node, reason)
        elif isinstance(bodies := extended_bodies(node), Declined):
            yield declined(node, bodies.reason)
        else:
            yield rewrite(node, assemble, graph, node, bodies)


def obstacle(collector: Node) -> str | None:
    """Why the pieces cannot be written in place, or None."""
    held = collector.meta["val"]
    pieces = pieces_of(collector)
    if not held.is_contiguous() or held.numel() == 0:
        return "the collected tensor is not contiguous"
    if any(p.meta["val"].dtype != held.dtype for p in pieces):
        return "the pieces differ in dtype"
    if any(p.meta["val"].numel() == 0 for p in pieces):
        return "a piece has no elements"
    for piece in pieces:
        producer = regions.owner(piece)
        if not regions.is_region(producer):
            return f"a piece comes from {_origin(producer)}, which no generated kernel computes"
    if len({regions.owner(p) for p in pieces}) == 1:
        return "one kernel computes all pieces"
    return None


def _origin(producer: Node) -> str:
    return "outside" if producer.op == "placeholder" else str(producer.target)


def extended_bodies(collector: Node) -> dict[Node, GraphModule] | Declined:
    """For each region that computes pieces: a body with them as further results, in their places; or a reason."""
    pieces_by_region: dict[Node, list[Node]] = {}
    for piece in pieces_of(collector):
        pieces_by_region.setdefault(regions.owner(piece), []).append(piece)
    bodies: dict[Node, GraphModule] = {}
    with surgery.fake_mode(collector.graph):
        for call, pieces in pieces_by_region.items():
            body, results, inner = regions.copied_body(call, pieces)
            stored = [_stored_in_place(piece, collector) for piece in inner]
            bodies[call] = regions.region_module(body, [*results, *stored])
    for body_module in bodies.values():
        if isinstance(verdict := lower(body_module), Declined):
            return verdict
    return bodies


def _stored_in_place(piece: Node, collector: Node) -> Node:
    """A copy of ``piece`` (in the body of its region) with the strides of its place in the result."""
    graph, held = piece.graph, collector.meta["val"]
    value, source = piece.meta["val"], piece.meta.get("source", "")
    if collector.target is aten.stack.default:
        dim = dimension_of(collector)
        value = value.unsqueeze(dim)
        piece = graph.call_function(aten.unsqueeze.default, (piece, dim))
        piece.meta.update(val=value, source=source)
    copied = graph.call_function(aten.clone.default, (piece,))
    copied.meta["val"] = torch.empty_strided(value.shape, held.stride(), dtype=value.dtype, device=value.device)
    copied.meta["source"] = source
    return copied


def assemble(graph: GraphModule, collector: Node, bodies: dict[Node, GraphModule]) -> None:
    """Give the producing regions their extended bodies, and assemble the added results."""
    places = {call: iter(regions.exchange_body(graph, call, body)) for call, body in bodies.items()}
    parts = [next(places[regions.owner(piece)]) for piece in pieces_of(collector)]
    new = surgery.insert(collector, torch.ops.fuse.assemble.default, parts, dimension_of(collector), like=collector)
    surgery.replace(collector, new)
