"""Remove or merge casts where no bit of a result changes.

    a = x.float()                       a = x.float()                    a = xs[0].bfloat16()        w = xs.bfloat16()
    b = a.bfloat16()   ->  b = x        b = a.relu().t().half()    ->    b = xs[1].bfloat16()   ->   a = w[0]
    (x is bfloat16)                     (x is half)   b = x.relu().t()                               b = w[1]

A widening cast loses nothing, so that a cast of its result can read the original value instead. Operators that only
choose, move or negate values compute the same in the narrower dtype. Casts of all parts of a tensor become one cast of
the tensor. (``common_subexpressions`` has merged equal casts, so that a weight is cast once a call;
``constant_folding`` makes the cast of a frozen weight a constant.) Declined where the layout of the result would
change, where it would share memory with an input, and where another operator reads the widened value. (NaN stays NaN;
its other bits differ even between torch's vector and scalar code.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fuse.passes.no_ops import leave_out, obstacle
from fuse.rewrite import effects, surgery
from fuse.rewrite.dtypes import holds
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten

CHOOSING = frozenset(
    [
        *(aten.clone.default, aten.cat.default, aten.where.self, aten.relu.default, aten.neg.default, aten.abs.default),
        *(aten.maximum.default, aten.minimum.default, aten.amax.default, aten.amin.default, aten.flip.default),
        *(aten.index_select.default, aten.gather.default, aten.index.Tensor, aten.embedding.default),
    ]
)
"""Operators whose results are elements of their operands, up to the sign."""

LONGEST_CHAIN = 32
"""The most operators between a cast and the casts that it undoes."""


@register_pass(stage="clean", after="no_ops", before_gradients=False)  # gradients are rounded at each cast of eager
def simplify_casts(graph: GraphModule) -> Iterator[Verdict]:
    """Remove or merge casts where no bit of a result changes."""
    escaping = effects.escaping(graph)
    for node in [node for node in graph.graph.nodes if is_cast(node)]:
        if node._erased:
            continue
        before = operand(node)
        if is_cast(before) and holds(operand(before).meta["val"].dtype, before.meta["val"].dtype):
            yield shortened(node, operand(before), escaping)
        elif narrows(node) and is_chosen(before, node.meta["val"].dtype):
            yield moved(node, before, escaping)
    for casts in casts_of_parts(graph):
        yield joined(casts, escaping)


def is_cast(node: Node) -> bool:
    """Whether ``node`` changes the dtype, and nothing else."""
    return (
        node.target is aten._to_copy.default
        and set(node.kwargs) == {"dtype"}
        and not node.meta["val"].is_complex()
        and not operand(node).meta["val"].is_complex()
    )


def operand(node: Node) -> Node:
    """The operand of a cast ``node``."""
    found = node.args[0]
    assert isinstance(found, Node)
    return found


def shortened(node: Node, origin: Node, escaping: set[Node]) -> Verdict:
    """The verdict on a cast of an exact cast: it may read the original value."""
    first, last = origin.meta["val"], node.meta["val"]
    if first.dtype == last.dtype:
        reason = obstacle(node, origin, escaping)
        return declined(node, reason) if reason else rewrite(node, leave_out, node, origin, escaping)
    if not (last.dtype.is_floating_point or holds(first.dtype, last.dtype)):
        return declined(node, "integers may overflow in another way")
    if surgery.fake_value(node.graph, node.target, (origin,), node.kwargs).stride() != last.stride():
        return declined(node, "it changes the layout")
    return rewrite(node, start_from, node, origin, escaping)


def start_from(node: Node, origin: Node, escaping: set[Node]) -> None:
    """Replace ``node`` by a cast of ``origin``."""
    leave_out(node, surgery.insert(node, aten._to_copy.default, origin, like=node, **node.kwargs), escaping)


def narrows(node: Node) -> bool:
    """Whether ``node`` casts one floating-point dtype to a narrower one."""
    old, new = operand(node).meta["val"].dtype, node.meta["val"].dtype
    return bool(old.is_floating_point and new.is_floating_point and old != new and holds(new, old))


def is_chosen(node: Node, dtype: torch.dtype, left: int = LONGEST_CHAIN) -> bool:
    """Whether ``node`` only selects among values that were widened from ``dtype``."""
    if is_cast(node):
        return bool(operand(node).meta["val"].dtype == dtype)
    if not left or not (effects.is_view(node) or (node.target in CHOOSING and len(node.users) == 1)):
        return False
    chosen = floats(node)
    return bool(chosen) and all(is_chosen(one, dtype, left - 1) for one in chosen)


def floats(node: Node) -> list[Node]:
    """The operands that are floating-point tensors."""
    return [one for one in node.all_input_nodes if _is_float(one)]


def moved(node: Node, chosen: Node, escaping: set[Node]) -> Verdict:
    """The verdict on computing ``chosen`` in the narrow dtype."""
    chain = chain_of(chosen)
    if any(operand(one).meta["val"].stride() != one.meta["val"].stride() for one in chain if is_cast(one)):
        return declined(node, "the casts change the layout")
    if chosen.meta["val"].stride() != node.meta["val"].stride():
        return declined(node, "it changes the layout")
    if node in escaping and effects.is_view(chosen):
        return declined(node, "the result must not share memory with another tensor")
    return rewrite((*(one for one in chain if is_cast(one)), node), choose_narrow, node, chosen, escaping)


def chain_of(node: Node) -> list[Node]:
    """The nodes from the casts to ``node``, which selects among their values."""
    found = [node]
    for one in found:
        if not is_cast(one):
            found.extend(floats(one))
    return found


def choose_narrow(node: Node, chosen: Node, escaping: set[Node]) -> None:
    """Compute ``chosen`` from its casts' operands, in place of ``node``, the cast back."""

    def narrow(one: Node) -> Node:
        if not _is_float(one):
            return one
        if is_cast(one):
            return operand(one)
        args, kwargs = map_arg(one.args, narrow), map_arg(one.kwargs, narrow)
        return surgery.insert(node, one.target, *args, like=one, **kwargs)  # type: ignore[arg-type]  # an operator

    leave_out(node, narrow(chosen), escaping)


def casts_of_parts(graph: GraphModule) -> Iterator[Sequence[Node]]:
    """Groups of two or more casts, to one dtype, of views of one tensor."""
    found: dict[tuple[Node, torch.dtype], list[Node]] = {}
    for node in graph.graph.nodes:
        if is_cast(node) and effects.is_view(operand(node)):
            found.setdefault((effects.root(operand(node)), node.meta["val"].dtype), []).append(node)
    return (casts for casts in found.values() if len(casts) > 1)


def joined(casts: Sequence[Node], escaping: set[Node]) -> Verdict:
    """The verdict on one cast of the whole tensor in place of casts of its parts."""
    base = effects.root(operand(casts[0]))
    parts = [operand(cast) for cast in casts]
    whole = base.meta["val"]
    if not isinstance(whole, Tensor) or whole.dtype != parts[0].meta["val"].dtype:
        return declined(casts, "the whole tensor has another dtype")
    if any(cast in escaping for cast in casts):
        return declined(casts, "a cast is a result, which must not share memory with another tensor")
    if sum(part.meta["val"].numel() for part in parts) < whole.numel():
        return declined(casts, "the whole tensor is larger than its parts together")
    strides = [(part.meta["val"].stride(), cast.meta["val"].stride()) for part, cast in zip(parts, casts, strict=True)]
    if not _is_dense(whole) or any(old != new for old, new in strides):
        return declined(casts, "it changes the layout")
    return rewrite(casts, cast_whole, base, casts)


def cast_whole(base: Node, casts: Sequence[Node]) -> None:
    """Cast ``base``, and replace each of ``casts`` by its view of the result."""
    after = base.next
    while after.op == "placeholder":
        after = after.next
    whole = surgery.insert(after, aten._to_copy.default, base, like=casts[0], **casts[0].kwargs)
    copies: dict[Node, Node] = {base: whole}
    for cast in casts:
        surgery.replace(cast, _same_view(operand(cast), copies))


def _same_view(view: Any, copies: dict[Node, Node]) -> Node:
    """A copy of ``view``, with the views between it and the base, on the base's copy."""
    chain: list[Node] = []
    while view not in copies:
        chain.append(view)
        view = effects.view_base(view) or view.args[0]
    for one in reversed(chain):
        args = (copies[view], *one.args[1:])
        copies[one] = surgery.insert(one, one.target, *args, like=one, **one.kwargs)  # type: ignore[arg-type]  # FX types targets loosely
        view = one
    return copies[view]


def _is_float(node: Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, Tensor) and val.is_floating_point()


def _is_dense(value: Tensor) -> bool:
    """Whether a cast keeps its strides."""
    return value.is_contiguous() or torch.empty_like(value, dtype=torch.bool).stride() == value.stride()
