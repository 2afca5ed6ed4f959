"""Writes that autograd does not see: the tensor gets other values, and its gradient stays what it was.

    with torch.no_grad():                  made  = clamp_min(norm, eps)
        norm.clamp_min_(eps)       ->      norm' = with_gradient_of(made, norm)

``F.cosine_similarity`` keeps its norms from zero in this way. The recorded operators do not show it. So a record that
is differentiated again has an operator for it, which returns the values of its first operand, and passes the gradient
to its second. Declined for writes that draw random numbers or change the layout, and for views made under ``no_grad``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph

from fuse import ops

WITH_GRADIENT_OF: OpOverload = torch.ops.fuse.with_gradient_of.default


def functional_form_of_unseen(op: OpOverload, args: tuple[Any, ...]) -> OpOverload | None:
    """The functional form of an operator that writes its first operand behind autograd's back; None for others."""
    if torch.is_grad_enabled() or not ops.mutates(op) or torch.Tag.inplace_view in op.tags:
        return None
    written = [argument for argument in op._schema.arguments if argument.alias_info and argument.alias_info.is_write]
    if written != op._schema.arguments[:1] or not isinstance(args[0], Tensor) or not args[0].requires_grad:
        return None
    functional = ops.functional_form(op)
    return None if functional is None or ops.is_random(functional) else functional


class WithGradientOf(torch.autograd.Function):
    """The operator, where autograd runs."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, earlier: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.alias.default(made)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def take_out(graph: Graph) -> None:
    """Let the values stand for themselves, in a record whose gradients autograd has taken itself."""
    for node in graph.find_nodes(op="call_function", target=WITH_GRADIENT_OF):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
