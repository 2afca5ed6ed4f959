"""Let kernels write their results straight into the tensor that collects them.

    h1 = region_1(...)                    h1, p1 = region_1(...)      p1: the same h1, stored a second time, in its place
    h2 = region_2(...)             ->     h2, p2 = region_2(...)
    out = stack([h1, h2], 1)              out = assemble([p1, p2], 1)   launches nothing

For pieces that are computed one after another (the outputs of a loop), which no single kernel could concatenate. The planner gives each
piece its place inside the collected tensor's memory.

Declined where a piece comes from a library call or from outside: it would have to be copied.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from fuse.rewrite import effects, nested, regions, surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten
COLLECTORS = (aten.stack.default, aten.cat.default)


@register_pass(after="fuse_reductions", before="fuse_movement")
def assemble_in_place(graph: GraphModule) -> Iterator[Verdict]:
    """Let kernels write their results straight into the tensor that collects them."""
    for node in list(graph.graph.nodes):
        if node.target not in COLLECTORS or len(node.args[0]) < 2:
            continue
        if reason := obstacle(node):
            yield declined(node, reason)
        else:
            yield rewrite(node, assemble, graph, node)


def obstacle(collector: Node) -> str | None:
    """Why the pieces cannot be written in place, or None."""
    held = collector.meta["val"]
    pieces = collector.args[0]
    if not held.is_contiguous() or held.numel() == 0:
        return "the collected tensor is not contiguous"
    if any(p.meta["val"].dtype != held.dtype for p in pieces):
        return "the pieces differ in dtype"
    if any(p.meta["val"].numel() == 0 for p in pieces):
        return "a piece has no elements"
    for piece in pieces:
        producer = regions.owner(piece)
        if not regions.is_region(producer):
            return f"a piece comes from {producer.name}, which no generated kernel computes"
    if len({regions.owner(p) for p in pieces}) == 1:
        return "one kernel computes all pieces"
    return None


def assemble(graph: GraphModule, collector: Node) -> None:
    """Add one result to every producing region and collect those instead."""
    dim = _dimension(collector)
    held = collector.meta["val"]
    stacked = collector.target is aten.stack.default
    places: list[Node] = []
    for piece in collector.args[0]:
        shape = tuple(piece.meta["val"].shape)
        extent = (*shape[:dim], 1, *shape[dim:]) if stacked else shape
        places.append(_add_result(graph, piece, extent, held.stride(), unsqueeze=dim if stacked else None))
    new = surgery.insert(collector, torch.ops.fuse.assemble.default, places, dim, like=collector)
    surgery.replace(collector, new)


def _dimension(collector: Node) -> int:
    dim = collector.kwargs.get("dim", collector.args[1] if len(collector.args) > 1 else 0)
    return int(dim) % collector.meta["val"].dim()  # type: ignore[arg-type]


def _add_result(
    graph: GraphModule, piece: Node, shape: tuple[int, ...], strides: tuple[int, ...], unsqueeze: int | None
) -> Node:
    """A part of the producing region that holds ``piece`` once more, laid out as its place in the collected tensor."""
    call = regions.owner(piece)
    body = nested.called_module(call)
    assert isinstance(body, GraphModule)
    output = body.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    inner = _inner(piece, results, body)
    with body.graph.inserting_before(output):
        if unsqueeze is not None:
            inner = surgery.insert(output, aten.unsqueeze.default, inner, unsqueeze, like=inner)
        copied = surgery.insert(output, aten.clone.default, inner, like=inner)
    with surgery.fake_mode(graph.graph):
        copied.meta["val"] = torch.empty_strided(
            shape, strides, dtype=piece.meta["val"].dtype, device=piece.meta["val"].device
        )
    output.args = ((*results, copied),)
    output.meta["val"] = (*output.meta["val"], copied.meta["val"])
    call.meta["val"] = (*call.meta["val"], copied.meta["val"])
    with graph.graph.inserting_after(call):
        part = graph.graph.call_function(operator.getitem, (call, len(results)))
    part.meta.update(val=copied.meta["val"], source=call.meta.get("source", ""))
    return part


def _inner(piece: Node, results: list[Node], body: GraphModule) -> Node:
    """The node inside the region's body that computes ``piece``, views of the result copied in."""
    if piece.target is operator.getitem and regions.is_region(piece.args[0]):  # type: ignore[arg-type]
        return results[piece.args[1]]  # type: ignore[index]
    base = effects.view_base(piece)
    assert base is not None
    outer = _inner(base, results, body)
    output = body.graph.output_node()
    return surgery.insert(output, piece.target, outer, *piece.args[1:], like=piece, **piece.kwargs)  # type: ignore[arg-type]
