"""Remove operators that change nothing, such as `x * 1`.

    y = x * 1          z = exp(x)
    z = exp(y)   ->

A constant tensor without dimensions counts as its number, so that ``x * torch.tensor(1.0)`` is removed, too. Some
operators only seem to change nothing: x + 0.0 turns -0.0 into 0.0 (x - 0.0 and x + -0.0 do not), an integer tensor
times 1.0 becomes a float tensor, a cast down and up again rounds, and the caller of a clone must get another tensor.
Declined where dtype or strides change, where the result must be a tensor of its own, and where a number is 1 because of
the call's sizes (``x / length``), since calls of other sizes would differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.kernel.sizes.sized import call_at_hand
from fuse.rewrite import effects, surgery
from fuse.rewrite.constants import given_constants
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite
from fuse.rewrite.writes import WRITES

aten = torch.ops.aten


@register_pass(stage="clean", after="common_subexpressions")
def no_ops(graph: GraphModule) -> Iterator[Verdict]:
    """Remove operators that change nothing, such as `x * 1`."""
    escaping = effects.escaping(graph)
    known = known_numbers(graph)
    sized = varying_with_sizes(graph, known)
    for node in list(graph.graph.nodes):
        if (source := unchanged_operand(node, known)) is None:
            continue
        if node in sized:
            yield declined(node, "its number depends on sizes, and calls of other sizes share the kernels of this call")
        elif reason := obstacle(node, source, escaping):
            yield declined(node, reason)
        else:
            yield rewrite(node, leave_out, node, source, escaping)


def known_numbers(graph: GraphModule) -> dict[Node, float]:
    """The values of constant tensors without dimensions."""
    known = {
        node: value.item() for node, value in given_constants(graph).items() if value is not None and _is_0d(value)
    }
    for node in graph.graph.find_nodes(op="call_function", target=aten.full.default):
        if not node.args[0] and type(node.args[1]) in (int, float):
            known[node] = torch.full((), node.args[1], dtype=node.meta["val"].dtype).item()
    return known


def _is_0d(value: Tensor) -> bool:
    return not value.dim() and not value.is_complex() and value.dtype != torch.bool


def arguments(node: Node, known: Mapping[Node, float]) -> tuple[Any, ...]:
    """The arguments of ``node``, with known tensors as numbers; a number comes after the other operand."""
    if node.target not in OF_TWO or len(node.args) != 2:
        return node.args
    x, y = (known.get(one, one) if isinstance(one, Node) else one for one in node.args)
    if not isinstance(x, Node) and isinstance(y, Node) and ops.is_commutative(node.target):
        x, y = y, x
    return (x, y) if isinstance(x, Node) else node.args


def varying_with_sizes(graph: GraphModule, known: Mapping[Node, float]) -> set[Node]:
    """Operators whose user line calls them with another number in calls of other sizes."""
    found: set[Node] = set()
    if (call := call_at_hand()) is not None:
        paddings: Counter[object] = Counter()
        for node in graph.graph.nodes:
            others = arguments(node, known)[1:] if node.target in RULES else ()
            if any(type(argument) in (int, float) or _are_numbers(argument) for argument in others):
                place = ("number", node.target, node.meta.get("source"))
                varies = call.follows_from_sizes(place, surgery.constant_key(others))
                if node.target is aten.constant_pad_nd.default:
                    paddings[place] += 1
                    varies = call.varies((*place, paddings[place]), not any(others[0]), graph) or varies
                if varies:
                    found.add(node)
    return found


def _are_numbers(argument: object) -> bool:
    return isinstance(argument, (list, tuple)) and all(type(one) is int for one in argument)


def unchanged_operand(node: Node, known: Mapping[Node, float]) -> Node | None:
    """The operand whose values ``node`` returns unchanged, or None."""
    rule = RULES.get(node.target) if isinstance(node.target, OpOverload) else None
    source = rule(*arguments(node, known), **node.kwargs) if rule and not may_be_lazy(node) else None
    return source if isinstance(source, Node) else None


def may_be_lazy(node: Node) -> bool:
    """Whether a lazily conjugated view of complex numbers may replace ``node``."""
    return bool(node.meta["val"].is_complex()) and not is_only_written(node)


def obstacle(node: Node, source: Node, escaping: set[Node]) -> str | None:
    """Why ``source`` cannot stand for ``node``, or None."""
    old, new = source.meta["val"], node.meta["val"]
    if old.dtype != new.dtype or old.device != new.device:
        return "it changes the dtype or the device"
    if old.size() != new.size() or (old.stride() != new.stride() and not is_only_written(node)):
        return "it changes the layout"
    if node in escaping and effects.root(source).op == "placeholder":
        return "the result must not share memory with an input"
    if node in escaping and (source in escaping or effects.is_view(source)):
        return "the result must not share memory with another tensor"
    if old.storage_offset() != new.storage_offset() and effects.reads_place(node):
        return "an operator reads its memory by absolute position"
    return None


def is_only_written(node: Node) -> bool:
    """Whether all readers of ``node`` only write it into other tensors, so that its strides do not matter."""
    return bool(node.users) and all(
        user.target in WRITES and user.args[1] is node and user.args[0] is not node for user in node.users
    )


def leave_out(node: Node, source: Node, escaping: set[Node]) -> None:
    """Let ``source`` stand for ``node``, as a result of the model too."""
    if node in escaping:
        escaping.add(source)
    surgery.replace(node, source)


def is_number(value: object, *accepted: float) -> bool:
    """Whether ``value`` is one of the ``accepted`` Python numbers, the sign of zero included."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return any(value == number and math.copysign(1, value) == math.copysign(1, number) for number in accepted)


def adds_nothing(x: Node, other: object, alpha: object = 1) -> Node | None:
    """x + -0.0, and x + 0 for integers: +0.0 would turn a negative zero into a positive one."""
    zero = -0.0 if x.meta["val"].is_floating_point() else 0
    return x if is_number(other, zero) and is_number(alpha, 1) else None


def subtracts_nothing(x: Node, other: object, alpha: object = 1) -> Node | None:
    """x - 0, for floats and integers."""
    return x if is_number(other, 0) and is_number(alpha, 1) else None


def scales_by_one(x: Node, other: object) -> Node | None:
    """x * 1, x / 1, x ** 1 (integer division changes the dtype, which is checked for all)."""
    return x if is_number(other, 1) else None


def copies(x: Node, dtype: torch.dtype | None = None, **_layout: object) -> Node | None:
    """A copy without conversion (the layout is checked for all)."""
    return x if dtype in (None, x.meta["val"].dtype) else None


def joins_one(tensors: list[Node], dim: int = 0) -> Node | None:
    """cat of one tensor, and of others without elements."""
    kept = [tensor for tensor in tensors if tensor.meta["val"].numel()] or tensors
    return kept[0] if len(kept) == 1 else None


def repeats_once(x: Node, repeats: list[int]) -> Node | None:
    """repeat with all ones."""
    return x if all(count == 1 for count in repeats) else None


def flips_nothing(x: Node, dims: list[int]) -> Node | None:
    """flip of no dimension, or of dimensions of one element."""
    value = x.meta["val"]
    return x if not value.dim() or all(value.size(dim) == 1 for dim in dims) else None


def pads_nothing(x: Node, pad: list[int], value: object = 0) -> Node | None:
    """A padding of zero everywhere."""
    return x if not any(pad) else None


def overwrites_all(x: Node, source: Node, *_bounds: Any, **_options: Any) -> Node | None:
    """A write that covers the whole of ``x``."""
    return source if isinstance(source.meta["val"], Tensor) else None


OF_TWO = frozenset([aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor])
"""Operators of two tensors, either of which may be a number."""

RULES: dict[OpOverload, Callable[..., Node | None]] = {
    aten.add.Tensor: adds_nothing,
    aten.sub.Tensor: subtracts_nothing,
    aten.mul.Tensor: scales_by_one,
    aten.div.Tensor: scales_by_one,
    aten.pow.Tensor_Scalar: scales_by_one,
    aten.clone.default: copies,
    aten._to_copy.default: copies,
    aten.cat.default: joins_one,
    aten.repeat.default: repeats_once,
    aten.flip.default: flips_nothing,
    aten.constant_pad_nd.default: pads_nothing,
    aten.slice_scatter.default: overwrites_all,
    aten.copy.default: overwrites_all,
}
