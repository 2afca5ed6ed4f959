"""Turn a chain of writes that fill a tensor into one `stack` or `cat`.

    o1 = select_scatter(o0, h0, 1, 0)
    o2 = select_scatter(o1, h1, 1, 1)      ->     o3 = stack([h0, h1, h2], 1)
    o3 = select_scatter(o2, h2, 1, 2)

``out[:, t] = h`` in a loop has the form at the left once it is functional: every step copies the whole of ``out``. Each
intermediate tensor must be read by the next write only. Of two writes to one position the later one counts. Positions
that no write fills come from the original tensor. ``slice_scatter`` chains become ``cat``. A tensor with permuted
strides is collected in its memory order, and permuted afterwards.

Declined where writes overlap in part, and where they fill less than half of the tensor. A tensor that is read between
two writes ends a chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse.graph.strides import contiguous_strides, inverse, memory_order
from fuse.rewrite import effects, surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite
from fuse.rewrite.writes import WRITES, dimension, only_a_place, piece, span, written

aten = torch.ops.aten


@register_pass(stage="clean", after="forward_writes")
def collect_writes(graph: GraphModule) -> Iterator[Verdict]:
    """Turn a chain of writes that fill a tensor into one `stack` or `cat`."""
    for last in list(graph.graph.nodes):
        if last.target not in WRITES or _next_write(last) is not None:
            continue
        chain = writes_up_to(last)
        if len(chain) < 2:
            continue
        if reason := obstacle(chain):
            yield declined(chain, reason)
        else:
            yield rewrite(chain, collect, chain)


def writes_up_to(last: Node) -> list[Node]:
    """The chain of writes up to ``last``, in order: each writes to the result of the one before, in one dimension."""
    chain = [last]
    while True:
        before = chain[-1].args[0]
        if not isinstance(before, Node) or _next_write(before) is not chain[-1]:
            return chain[::-1]
        chain.append(before)


def _next_write(node: Node) -> Node | None:
    """The write that continues the chain after ``node``, which nothing else reads."""
    writes = [user for user in node.users if user.target is node.target and user.args[0] is node]
    if node.target not in WRITES or len(writes) != 1 or dimension(writes[0]) != dimension(node):
        return None
    return writes[0] if all(user is writes[0] or _is_place(user, writes[0]) for user in node.users) else None


def _is_place(view: Node, write: Node) -> bool:
    """Whether ``view`` only names the place that ``write`` copies to."""
    return effects.is_view(view) and list(view.users) == [write.args[1]] and only_a_place(view)


def obstacle(chain: list[Node]) -> str | None:
    """Why the chain cannot be one collection, or None."""
    held = chain[-1].meta["val"]
    written_to = sorted(newest(chain))
    if any(start >= end for start, end in written_to):
        return "a write has gaps, or no elements"
    if any(end > start for (_, end), (start, _) in pairwise(written_to)):
        return "writes overlap in part"
    if len(gaps(chain)) > len(written_to):
        return "most positions are not written"
    order = memory_order(held)
    if held.permute(order).stride() != contiguous_strides([held.shape[d] for d in order]):
        return "the tensor that is filled has gaps in memory"
    inside = order_of_pieces(chain[-1])
    if held.dim() > 3 and not all(_lies(written(write).meta["val"], inside) for write in chain):
        return "a write has another layout than its tensor"  # as a piece, it could impose channels_last on the result
    return None


def order_of_pieces(last: Node) -> list[int]:
    """The order in memory of a written part; a single position lacks the written dimension."""
    order, dim = memory_order(last.meta["val"]), dimension(last)
    return order if last.target is aten.slice_scatter.default else [d - (d > dim) for d in order if d != dim]


def _lies(value: Tensor, order: list[int]) -> bool:
    return value.dim() == len(order) and value.permute(order).is_contiguous()


def newest(chain: list[Node]) -> dict[tuple[int, int], Node]:
    """The last write to each place."""
    return {span(write): write for write in chain}


def gaps(chain: list[Node]) -> list[tuple[int, int]]:
    """The places that no write fills: single positions where writes fill single positions, otherwise stretches."""
    last = chain[-1]
    spans = [(0, 0), *sorted(newest(chain)), (last.meta["val"].shape[dimension(last)],) * 2]
    between = [(end, start) for (_, end), (start, _) in pairwise(spans) if start > end]
    if last.target is aten.select_scatter.default:
        return [(at, at + 1) for start, end in between for at in range(start, end)]
    return between


def collect(chain: list[Node]) -> None:
    """Replace the chain by one ``stack`` or ``cat`` of its written values, in order of position."""
    last = chain[-1]
    whole = last.target is aten.slice_scatter.default
    pieces = {place: piece(write, last) for place, write in newest(chain).items()}
    for start, end in gaps(chain):
        arguments = (dimension(last), start, end) if whole else (dimension(last), start)
        view = aten.slice.Tensor if whole else aten.select.int
        pieces[start, end] = surgery.insert(last, view, chain[0].args[0], *arguments)
    op = aten.cat.default if whole else aten.stack.default
    collected = [_permuted(pieces[place], order_of_pieces(last), last) for place in sorted(pieces)]
    order = memory_order(last.meta["val"])
    made = surgery.insert(last, op, collected, order.index(dimension(last)), like=last)
    surgery.replace(last, _permuted(made, inverse(order), last))


def _permuted(node: Node, order: list[int], before: Node) -> Node:
    return node if order == sorted(order) else surgery.insert(before, aten.permute.default, node, order, like=before)
