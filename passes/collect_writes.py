"""Turn a chain of writes into one collection.

    o1 = select_scatter(o0, h0, 1, 0)
    o2 = select_scatter(o1, h1, 1, 1)      ->     o3 = stack([h0, h1, h2], 1)
    o3 = select_scatter(o2, h2, 1, 2)

What ``out[:, t] = h`` in a loop becomes in functional form: as it stands, every step copies the whole of ``out``. The
chain must write every position exactly once, each intermediate tensor being read by the next write only.
``slice_scatter`` chains become ``cat``.

Declined where a position is missing or written twice. A tensor that is read between two writes ends a chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._prims_common import make_contiguous_strides_for
from torch.fx import GraphModule, Node

from fuse.rewrite import effects, surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten
WRITES = (aten.select_scatter.default, aten.slice_scatter.default)
COPIES = (aten.copy.default, aten.fill.Tensor)


@register_pass(after="view_chains", before=("merge_shared_weight_gemms", "merge_sibling_gemms", "fuse_pointwise"))
def collect_writes(graph: GraphModule) -> Iterator[Verdict]:
    """Turn a chain of writes that fill a tensor into one stack or cat."""
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
    """The writes that ``last`` ends, first one first: each reads only the one before, along the same dimension."""
    chain = [last]
    while True:
        before = chain[-1].args[0]
        if not isinstance(before, Node) or _next_write(before) is not chain[-1]:
            return chain[::-1]
        chain.append(before)


def _next_write(node: Node) -> Node | None:
    """The write that continues the chain after ``node``, which nothing else reads."""
    writes = [user for user in node.users if user.target is node.target and user.args[0] is node]
    if node.target not in WRITES or len(writes) != 1 or _dimension(writes[0]) != _dimension(node):
        return None
    return writes[0] if all(user is writes[0] or _is_place(user, writes[0]) for user in node.users) else None


def _is_place(view: Node, write: Node) -> bool:
    """Whether ``view`` only says where ``write`` puts a copy: its values are read by nobody."""
    copied = write.args[1]
    return (
        isinstance(copied, Node)
        and copied.target in COPIES
        and copied.args[0] is view
        and copied.args[1] is not view
        and effects.is_view(view)
        and list(view.users) == [copied]
    )


def obstacle(chain: list[Node]) -> str | None:
    """Why the chain does not fill its tensor exactly once, or None."""
    held = chain[-1].meta["val"]
    dim = _dimension(chain[-1])
    spans = sorted(_span(write) for write in chain)
    at = 0
    for start, end in spans:
        if start != at or end <= start:
            return "a position is written twice or not at all"
        at = end
    if at != held.shape[dim]:
        return "not every position is written"
    if held.stride() != make_contiguous_strides_for(held.shape):
        return "the tensor that is filled is not contiguous"
    if held.dim() > 3 and not all(_written(write).meta["val"].is_contiguous() for write in chain):
        return "a write has another layout than its tensor"  # collected, it could impose channels_last on the whole
    return None


def _written(write: Node) -> Node:
    """The value that is written, before it is copied into the layout of its place: the collection does that."""
    value: Node = write.args[1]  # type: ignore[assignment]
    return value.args[1] if value.target in COPIES else value  # type: ignore[return-value]


def collect(chain: list[Node]) -> None:
    """Replace the chain by one collection of what it writes, in order of position."""
    last = chain[-1]
    pieces = [_piece(write, last) for write in sorted(chain, key=_span)]
    op = aten.stack.default if last.target is aten.select_scatter.default else aten.cat.default
    surgery.replace(last, surgery.insert(last, op, pieces, _dimension(last), like=last))


def _piece(write: Node, last: Node) -> Node:
    """What ``write`` writes, in the dtype of the tensor and as large as its place."""
    piece, place = _written(write), write.args[1].meta["val"]  # type: ignore[union-attr]
    dtype = write.meta["val"].dtype
    if piece.meta["val"].dtype != dtype:
        piece = surgery.insert(last, aten._to_copy.default, piece, like=write, dtype=dtype)
    if piece.meta["val"].shape != place.shape:
        piece = surgery.insert(last, aten.expand.default, piece, list(place.shape), like=write)
    return piece


def _argument(node: Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _dimension(node: Node) -> int:
    default = None if node.target is aten.select_scatter.default else 0
    rank: int = node.meta["val"].dim()
    return int(_argument(node, 2, "dim", default)) % rank


def _span(node: Node) -> tuple[int, int]:
    """First position written and the one after the last; an empty span for a write with steps."""
    extent = node.meta["val"].shape[_dimension(node)]
    if node.target is aten.select_scatter.default:
        index = _argument(node, 3, "index", None) % extent
        return index, index + 1
    bounds = slice(_argument(node, 3, "start", None), _argument(node, 4, "end", None), _argument(node, 5, "step", 1))
    start, end, step = bounds.indices(extent)
    return (start, end) if step == 1 else (start, start)
