"""Replace a masked update by a `where` over all elements.

    a = y[mask]
    b = a * 2                ->    x' = where(mask, y * 2, x)
    x' = index_put(x, mask, b)

The number of elements that a mask chooses depends on values. So no kernel can contain the operators that compute on the
chosen elements, and each number of elements needs a program of its own. ``where`` has neither problem. A number or a
row that is written to all chosen elements is rewritten in the same way. Declined where an operator in between is not
elementwise, where it could raise on an element that is not chosen (a division of integers), where another operator
reads the chosen elements, and where the strides of the result would change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.graph.fakes.fake_operators import mode_of
from fuse.graph.values.masked_elements import mask_of
from fuse.rewrite import surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten

WRITES = frozenset({aten.index_put.default, aten._index_put_impl.default, aten._unsafe_index_put.default})
MAY_RAISE = frozenset({aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default})


@register_pass(stage="clean", after="transposed_convolutions", before_gradients=False)  # 0 * inf where not chosen
def masks_to_where(graph: GraphModule) -> Iterator[Verdict]:
    """Replace a masked update by a `where` over all elements."""
    for node in list(graph.graph.nodes):
        if node.target not in WRITES or (mask := mask_of(node.args[1])) is None:
            continue
        between = operators_between(operand(node, 2), mask)
        if reason := obstacle(node, mask, between):
            yield declined(node, reason)
        else:
            yield rewrite([*between, node], chosen_when_written, node, mask, between)


def operand(node: Node, position: int) -> Node:
    """The operand at that position, which is a tensor."""
    found = node.args[position]
    assert isinstance(found, Node)
    return found


def operators_between(value: Node, mask: Node) -> list[Node]:
    """The operators from the elements chosen by ``mask`` to ``value``, in program order."""
    rank = value.meta["val"].dim()
    found: set[Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if node in found or not is_chosen(node, rank):
            continue
        found.add(node)
        if not takes(node, mask):
            waiting.extend(node.all_input_nodes)
    return sorted(found)


def is_chosen(node: Node, rank: int) -> bool:
    """Whether a value on the way to one of ``rank`` dimensions has one element for each chosen element."""
    held = node.meta["val"]
    return node.op == "call_function" and isinstance(held, Tensor) and held.dim() == rank and held.dim() > 0


def takes(node: Node, mask: Node) -> bool:
    """Whether ``node`` is a tensor indexed by ``mask``."""
    return node.target is aten.index.Tensor and mask_of(node.args[1]) is mask


def obstacle(node: Node, mask: Node, between: Sequence[Node]) -> str | None:
    """Why ``where`` cannot stand for the write ``node``, or None."""
    target, value = operand(node, 0).meta["val"], operand(node, 2).meta["val"]
    accumulates = len(node.args) > 3 and bool(node.args[3])
    inner = target.dim() - mask.meta["val"].dim()
    if value.dim() > inner:  # one value for each chosen element
        if not any(takes(one, mask) for one in between):
            return "the written values are not chosen by the same mask"
        for one in between:
            if takes(one, mask):
                continue
            if not ops.is_pointwise(one.target) or isinstance(one.meta["val"], tuple):
                return f"{one.name} computes more than element by element"
            if one.target in MAY_RAISE and not one.meta["val"].is_floating_point():
                return f"{one.name} may raise on elements that are not chosen"
            if any(n.meta["val"].dim() >= value.dim() and n not in between for n in one.all_input_nodes):
                return f"{one.name} reads elements that the mask did not choose"
        readers = {user for one in between for user in one.users} - {*between, node}
        if any(one.target not in WRITES or mask_of(one.args[1]) is not mask for one in readers):
            return "another operator reads the chosen elements"
    elif accumulates:
        return "one value is added to all chosen elements"
    made = expected(target, mask.meta["val"], value)
    if made is None or made.stride() != node.meta["val"].stride() or made.dtype != node.meta["val"].dtype:
        return "the result would have other strides"
    return None


def expected(target: Any, mask: Any, value: Any) -> Any:
    """Fake result of ``where``; None if the shapes do not broadcast."""
    inner = target.dim() - mask.dim()
    try:
        torch.broadcast_shapes(value.shape[1 if value.dim() > inner else 0 :], target.shape[mask.dim() :])
    except RuntimeError:
        return None
    with mode_of(target):
        if value.dim() > inner:
            value = torch.empty((*mask.shape, *value.shape[1:]), dtype=value.dtype)
        return torch.where(mask.reshape(*mask.shape, *[1] * inner), value, target)


def chosen_when_written(node: Node, mask: Node, between: Sequence[Node]) -> None:
    """Put ``where`` in place of the write ``node``, and compute its value for all elements."""
    target, value, accumulates = operand(node, 0), operand(node, 2), node.args[3:]
    everywhere: dict[Node, Node] = {}
    inner = target.meta["val"].dim() - mask.meta["val"].dim()
    if value.meta["val"].dim() > inner:
        for one in between:
            if takes(one, mask):
                everywhere[one] = contiguous(operand(one, 0), node)
            elif callable(one.target):
                args, kwargs = torch.fx.node.map_arg((one.args, one.kwargs), lambda n: everywhere.get(n, n))
                everywhere[one] = surgery.insert(node, one.target, *args, like=one, **kwargs)
        value = everywhere[value]
    if any(accumulates):
        value = surgery.insert(node, aten.add.Tensor, target, value)
    for _ in range(inner):
        mask = surgery.insert(node, aten.unsqueeze.default, mask, -1)
    surgery.replace(node, surgery.insert(node, aten.where.self, mask, value, target))


def contiguous(node: Node, before: Node) -> Node:
    """``node``, or a contiguous copy: the elements that a mask chooses lie one after another, whatever they are chosen
    from."""
    if node.meta["val"].is_contiguous():
        return node
    return surgery.insert(before, aten.clone.default, node, memory_format=torch.contiguous_format)
