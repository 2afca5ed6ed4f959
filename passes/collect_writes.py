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
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fuse.rewrite import surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten
WRITES = (aten.select_scatter.default, aten.slice_scatter.default)


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
        if not isinstance(before, Node) or before.target is not last.target or len(before.users) != 1:
            return chain[::-1]
        if _dimension(before) != _dimension(last):
            return chain[::-1]
        chain.append(before)


def _next_write(node: Node) -> Node | None:
    """The write that continues the chain after ``node``."""
    user = next(iter(node.users), None)
    continues = user is not None and user.target is node.target and user.args[0] is node and len(node.users) == 1
    return user if continues and _dimension(user) == _dimension(node) else None


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
    collected = surgery.fake_value(chain[-1].graph, _collector(chain), (pieces_of(chain), dim), {})
    if collected.dtype != held.dtype:
        return "a write converts to another dtype"
    if collected.stride() != held.stride():
        return "the tensor that is filled has a layout of its own"
    return None


def pieces_of(chain: list[Node]) -> list[Node]:
    """What the chain writes, in order of position."""
    return [_written(write) for write in sorted(chain, key=_span)]


def _written(write: Node) -> Node:
    """The value that is written; of a copy into the layout of its place, what is copied: the collection copies too."""
    piece: Node = write.args[1]  # type: ignore[assignment]
    if piece.target is not aten.copy.default:
        return piece
    source: Node = piece.args[1]  # type: ignore[assignment]
    copied, value = piece.meta["val"], source.meta["val"]
    return source if value.shape == copied.shape and value.dtype == copied.dtype else piece


def collect(chain: list[Node]) -> None:
    """Replace the chain by one collection."""
    last = chain[-1]
    new = surgery.insert(last, _collector(chain), pieces_of(chain), _dimension(last), like=last)
    surgery.replace(last, new)


def _collector(chain: list[Node]) -> OpOverload:
    return aten.stack.default if chain[-1].target is aten.select_scatter.default else aten.cat.default  # type: ignore[no-any-return]


def _argument(node: Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _dimension(node: Node) -> int:
    default = None if node.target is aten.select_scatter.default else 0
    return int(_argument(node, 2, "dim", default)) % node.meta["val"].dim()


def _span(node: Node) -> tuple[int, int]:
    """First position written and the one after the last; an empty span for a write with steps."""
    extent = node.meta["val"].shape[_dimension(node)]
    if node.target is aten.select_scatter.default:
        index = _argument(node, 3, "index", None) % extent
        return index, index + 1
    bounds = slice(_argument(node, 3, "start", None), _argument(node, 4, "end", None), _argument(node, 5, "step", 1))
    start, end, step = bounds.indices(extent)
    return (start, end) if step == 1 else (start, start)
