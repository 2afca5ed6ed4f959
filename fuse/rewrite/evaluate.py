"""Evaluate nodes that depend on no input, at rewriting time.

Each operator runs in float64 on its rounded operands, and its result is rounded to its own dtype; integers stay exact.
A tensor of equal elements is stored as one element expanded (all strides 0), so that ``zeros(100_000, 100_000) + 1``
costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from fuse import ops
from fuse.devices import HOST
from fuse.graph.outputs import worked_out
from fuse.rewrite import effects

aten = torch.ops.aten

FILLS = frozenset([aten.full.default, aten.zeros.default, aten.ones.default])
"""Operators whose result has equal elements; their first argument is the size."""

BIT_PATTERNS = frozenset([aten.view.dtype, aten.nextafter.default, aten.frexp.Tensor])
"""Operators whose result in float64, rounded, differs from the result in a narrower dtype."""

OTHER_ELEMENTS = frozenset(
    [aten.view_as_real.default, aten.view_as_complex.default, aten._conj.default, aten._neg_view.default]
)
"""Views whose elements differ from those of their base."""

EVALUABLE_KINDS = frozenset(["pointwise", "movement", "reduction", "view"])


def can_evaluate(node: Node) -> bool:
    """Whether evaluation in float64 and rounding gives the result of ``node``, for known operands."""
    return (
        isinstance(node.target, OpOverload)
        and ops.kind(node.target) in EVALUABLE_KINDS
        and node.target not in BIT_PATTERNS | OTHER_ELEMENTS
        and effects.is_pure(node)
        and isinstance(node.meta["val"], Tensor)
        and node.meta["val"].layout == torch.strided
    )


def evaluate(node: Node, values: dict[Node, Tensor | None], largest: int = 0) -> Tensor | None:
    """The value of ``node`` on the CPU; None if it, or an intermediate value, is too large.

    Too large is more than ``largest`` bytes and more than its operands. ``values`` has the given values, and receives
    every value found. Everything that ``node`` depends on must be given or evaluable.
    """
    return worked_out(node, values, lambda one: _value(one, values, largest))


def laid_out(value: Tensor, stride: Sequence[int]) -> Tensor:
    """``value`` with other strides; a stride of 0 repeats one element.

    >>> laid_out(torch.ones(2, 3), (0, 1)).stride(), laid_out(torch.ones(2, 3), (1, 2)).stride()
    ((0, 1), (1, 2))
    """
    if value.stride() == tuple(stride):
        return value
    size = [1 if step == 0 else extent for extent, step in zip(value.size(), stride, strict=True)]
    once = value[tuple(slice(0, extent) for extent in size)]
    return torch.empty_strided(size, stride, dtype=value.dtype).copy_(once).expand(value.size())


def is_uniform(value: Tensor) -> bool:
    """Whether ``value`` is stored as one element, expanded."""
    return value.numel() > 0 and not any(value.stride())


def _value(node: Node, values: dict[Node, Tensor | None], largest: int) -> Tensor | None:
    operands = {operand: value for operand in node.all_input_nodes if (value := values[operand]) is not None}
    val = node.meta["val"]
    if len(operands) < len(node.all_input_nodes):
        return None
    if val.numel() and (node.target in FILLS or (operands and all(map(is_uniform, operands.values())))):
        element = _element(node, operands)
        if element is not None:
            return element.expand(val.size())
    given = sum(value.nbytes for value in operands.values() if not is_uniform(value))
    made = [val, *filter(is_uniform, operands.values())]  # an expanded element may become a full tensor
    if max(tensor.numel() * tensor.element_size() for tensor in made) > max(largest, given):
        return None
    value = _run(node, operands.__getitem__)
    return _compressed(laid_out(value, val.stride()))


def _element(node: Node, operands: dict[Node, Tensor]) -> Tensor | None:
    """The one element of a result that is uniform because its operands are; None if it need not be uniform."""
    assert isinstance(node.target, OpOverload)
    if node.target in FILLS:
        return _run(node, operands.__getitem__, size=[])
    if effects.is_view(node):
        return _first(operands[node.all_input_nodes[0]])
    if ops.is_pointwise(node.target) or node.target in (aten.clone.default, aten._to_copy.default):
        return _run(node, lambda operand: _first(operands[operand]))
    return None


def _run(node: Node, value_of: Callable[[Node], Tensor], size: list[int] | None = None) -> Tensor:
    """Run ``node`` on the CPU in float64, and round. ``size`` replaces the first argument."""
    args = node.args if size is None else (size, *node.args[1:])
    return rounded(node, *map_arg((args, dict(node.kwargs)), value_of))


def rounded(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Run the operator of ``node`` with these arguments on the CPU in float64, and round."""

    def translated(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return argument.double() if argument.is_floating_point() else argument
        if isinstance(argument, torch.dtype) and argument.is_floating_point:
            return torch.float64
        return HOST if isinstance(argument, torch.device) else argument

    assert isinstance(node.target, OpOverload)
    kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
    with unset_fake_temporarily(), torch.no_grad():
        result: Tensor = node.target(*map_aggregate(args, translated), **map_aggregate(kwargs, translated))
        return result.to(node.meta["val"].dtype)


def _first(value: Tensor) -> Tensor:
    return value.as_strided((), (), value.storage_offset())


def _compressed(value: Tensor) -> Tensor:
    """``value`` stored as one element, expanded, if all elements are equal bit by bit."""
    if value.numel() == 0 or value.is_complex():
        return value
    first = _first(value)
    same = (value == first) | ((value != value) & (first != first))
    if value.is_floating_point():
        same &= value.signbit() == first.signbit()
    return first.clone().expand(value.size()) if bool(same.all()) else value
