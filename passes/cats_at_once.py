"""Turn a tensor that grows by a piece in every step into one concatenation.

    o1 = cat([o0, h1])
    o2 = cat([o1, h2])          ->          o3 = cat([o0, h1, h2, h3])
    o3 = cat([o2, h3])

Grown step by step, a result of T steps is copied T times, and no two steps of the loop have the same sizes. Each
intermediate tensor must be read by the next concatenation only, along the same dimension. A tensor that every step
reads, such as the keys of a decoder, stays as it is. Declined where the strides would change.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from fuse.loops.collectors import dimension_of, pieces_of
from fuse.loops.rolling import LEAST_STEPS
from fuse.rewrite import surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten


@register_pass(stage="clean", after="forward_pieces")
def cats_at_once(graph: GraphModule) -> Iterator[Verdict]:
    """Turn a tensor that grows by a piece in every step into one concatenation."""
    inner = {node for node in graph.graph.nodes if _is_read_by_a_cat(node)}
    for last in list(graph.graph.find_nodes(op="call_function", target=aten.cat.default)):
        if last in inner:
            continue
        pieces, cats = pieces_through(last, inner)
        if cats < LEAST_STEPS:
            continue
        made = surgery.fake_value(graph.graph, aten.cat.default, (pieces, dimension_of(last)), {})
        if made.stride() != last.meta["val"].stride():
            yield declined(last, "the strides would change")
        else:
            yield rewrite(last, concatenate, last, pieces)


def _is_read_by_a_cat(node: Node) -> bool:
    """Whether ``node`` is a concatenation that another one alone reads, once and along the same dimension."""
    if node.target is not aten.cat.default or len(node.users) != 1:
        return False
    (reader,) = node.users
    if reader.target is not aten.cat.default or pieces_of(reader).count(node) != 1:
        return False
    same = node.meta["val"].dtype == reader.meta["val"].dtype and node.meta["val"].dim() == reader.meta["val"].dim()
    return same and dimension_of(node) == dimension_of(reader)


def pieces_through(last: Node, inner: set[Node]) -> tuple[list[Node], int]:
    """The pieces of ``last`` and of the concatenations among them, in order, and the number of concatenations."""
    found: list[Node] = []
    cats, waiting = 0, [last]
    while waiting:
        piece = waiting.pop()
        if piece is last or piece in inner:
            cats += 1
            waiting.extend(reversed(pieces_of(piece)))
        else:
            found.append(piece)
    return found, cats


def concatenate(last: Node, pieces: list[Node]) -> None:
    surgery.replace(last, surgery.insert(last, aten.cat.default, pieces, dimension_of(last)))
