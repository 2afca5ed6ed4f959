"""Sum what an invariant of a loop receives from every step, once for all steps.

    for t backwards: dw += t(h[t]) @ d[t]           for t backwards: keep d[t]
                                            ->      dw = t([h[0] h[1] ...]) @ [d[0] d[1] ...]

A step that computes its share by a contraction keeps the operands instead, and all steps are contracted at once: a
product sums over the rows of all steps as easily as over those of one. In Appleyard, Kocisky and Blunsom, "Optimizing
Performance of Recurrent Neural Networks on GPUs", 2016. What is no contraction is added up from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fuse import ops
from fuse.rewrite.reads import link_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Contraction:
    """A gradient that a step contracts from ``operands``, and how that is done for all steps at once."""

    operands: tuple[Node, ...]
    rule: Callable[..., Tensor]
    views: tuple[Node, ...]

    def over_steps(self, places: Sequence[int]) -> Callable[[Sequence[Tensor]], Tensor]:
        return lambda results: viewed(self.rule(*(results[place] for place in places)), self.views)


def contraction(base: Node, node: Node) -> Contraction | None:
    """How ``node``, views of ``base``, is summed over steps; None: by adding."""
    views = tuple(views_between(base, node))
    match base.target:
        case aten.mm.default:
            left, right = base.args
            if (turned := _transposed(left)) is not None:  # type: ignore[arg-type]
                return Contraction((turned, right), _product_of_rows, views)  # type: ignore[arg-type]
            return Contraction((left, right), _product, views)  # type: ignore[arg-type]
        case aten.bmm.default:
            return Contraction(tuple(base.args), _batched_product, views)  # type: ignore[arg-type]
        case aten.sum.dim_IntList if not base.kwargs and base.args[1]:
            rows, dims, *keep = base.args
            return Contraction((rows,), _Sum(tuple(dims), bool(keep and keep[0])), views)  # type: ignore[arg-type]
        case aten.embedding_dense_backward.default:
            return Contraction(tuple(base.args[:2]), _Embedding(tuple(base.args[2:])), views)  # type: ignore[arg-type]
    return None


def _transposed(node: Node) -> Node | None:
    """The matrix of which ``node`` is the transposition."""
    turned = node.target is aten.t.default or (
        node.target in (aten.transpose.int, aten.permute.default) and node.meta["val"].dim() == 2
    )
    base = node.args[0] if turned else None
    if not isinstance(base, Node) or base.meta["val"].t().stride() != node.meta["val"].stride():
        return None
    return base


def _product_of_rows(left: Tensor, right: Tensor) -> Tensor:
    """The sum of ``t(left[t]) @ right[t]``."""
    return left.reshape(-1, left.shape[2]).t() @ right.reshape(-1, right.shape[2])


def _product(left: Tensor, right: Tensor) -> Tensor:
    return _product_of_rows(left.transpose(1, 2), right)


def _batched_product(left: Tensor, right: Tensor) -> Tensor:
    steps, batch, rows, depth = left.shape
    wide = left.permute(1, 2, 0, 3).reshape(batch, rows, steps * depth)
    return torch.bmm(wide, right.permute(1, 0, 2, 3).reshape(batch, steps * depth, -1))


@dataclass(frozen=True)
class _Sum:
    dims: tuple[int, ...]
    keep: bool

    def __call__(self, rows: Tensor) -> Tensor:
        rank = rows.dim() - 1
        dims = [0, *(d % rank + 1 for d in self.dims)]
        summed = rows.sum(dims, keepdim=self.keep)
        return summed.squeeze(0) if self.keep else summed


@dataclass(frozen=True)
class _Embedding:
    arguments: tuple[Any, ...]

    def __call__(self, gradients: Tensor, indices: Tensor) -> Tensor:
        rows = gradients.reshape(-1, gradients.shape[-1])
        result: Tensor = aten.embedding_dense_backward(rows, indices.reshape(-1), *self.arguments)
        return result


def below_views(node: Node) -> Node:
    """What ``node`` is a view of."""
    while node.op == "call_function" and link_of(node) is not None and ops.is_view(node.target):  # type: ignore[arg-type]
        base = node.args[0]
        if not isinstance(base, Node) or base.meta["val"].numel() != node.meta["val"].numel():
            break
        node = base
    return node


def views_between(base: Node, node: Node) -> list[Node]:
    views: list[Node] = []
    while node is not base:
        views.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return views[::-1]


def viewed(value: Tensor, views: Sequence[Node]) -> Tensor:
    for view in views:
        value = view.target(value, *view.args[1:], **view.kwargs)  # type: ignore[operator]
    return value


def picked(number: int, base: Node, node: Node) -> Callable[[Sequence[Tensor]], Tensor]:
    views = views_between(base, node)
    return lambda results: viewed(results[number], views)
