"""Sum the gradient of a loop's invariant over all steps at once.

    for t backwards: dw += t(h[t]) @ d[t]           for t backwards: keep d[t]
                                            ->      dw = t([h[0] h[1] ...]) @ [d[0] d[1] ...]

If a step computes its term by a contraction, the loop collects the operands instead, and one contraction serves all
steps: a product can sum over the rows of all steps (Appleyard, Kocisky and Blunsom, "Optimizing Performance of
Recurrent Neural Networks on GPUs", 2016). Other terms are added up from step to step, and so are sums of many rows
(:mod:`fuse.gradients.reversing`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fuse import ops
from fuse.gradients.convolving import gradient_of_weight
from fuse.loops.reads import is_link
from fuse.rewrite.matrix_products import transposed

aten = torch.ops.aten


@dataclass(frozen=True)
class GradientTerm:
    """One of the values whose sum is a gradient: ``views`` of ``base``, outermost last."""

    base: Node
    views: tuple[Node, ...]

    def viewed(self, value: Tensor) -> Tensor:
        """The views applied to ``value``, the sum of ``base`` over steps."""
        for view in self.views:
            operator: Any = view.target
            value = operator(value, *view.args[1:], **view.kwargs)
        return value


def terms_of(node: Node) -> list[GradientTerm]:
    """The terms of the sum ``node``, through views of all elements; one term if it is no sum."""
    found: list[GradientTerm] = []
    worklist: list[tuple[Node, tuple[Node, ...]]] = [(node, ())]
    while worklist:
        node, views = worklist.pop()
        while (base := base_of_all(node)) is not None:
            node, views = base, (node, *views)
        if node.target is aten.add.Tensor and not node.kwargs and all(_alike(a, node) for a in node.args):
            worklist += [(operand, views) for operand in node.all_input_nodes * (2 // len(node.all_input_nodes))]
        else:
            found.append(GradientTerm(node, views))
    return found


def _alike(operand: object, node: Node) -> bool:
    if not isinstance(operand, Node):
        return False
    one, other = operand.meta["val"], node.meta["val"]
    return bool(one.shape == other.shape and one.dtype == other.dtype)


def base_of_all(node: Node) -> Node | None:
    """The base of ``node``, if it is a view of all elements of that."""
    if node.op != "call_function" or not is_link(node) or not ops.is_view(node.target):
        return None
    base = node.args[0]
    if not isinstance(base, Node) or base.meta["val"].numel() != node.meta["val"].numel():
        return None
    return base


@dataclass(frozen=True)
class Contraction:
    """A contraction of ``operands`` for all steps at once: ``rule`` gets them stacked, steps first.

    ``of_sum``, if there is one, gives the same result from the sum of the single operand over steps.
    """

    operands: tuple[Node, ...]
    rule: Callable[..., Tensor]
    of_sum: Callable[[Tensor], Tensor] | None = None


def contraction(node: Node) -> Contraction | None:
    """The contraction that computes the sum of ``node`` over steps, or None."""
    args: tuple[Any, ...] = node.args
    match node.target:
        case aten.mm.default:
            left, right = args
            if (turned := transposed(left)) is not None:
                return Contraction((turned, right), _product_of_rows)
            return Contraction((left, right), _product)
        case aten.bmm.default:
            return Contraction(args, _batched_product)
        case aten.sum.dim_IntList if not node.kwargs and args[1]:
            rows, dims, *keep = args
            of_step = tuple(dims), bool(keep and keep[0])
            return Contraction((rows,), _Sum(*of_step), _SumOfStep(*of_step))
        case aten.embedding_dense_backward.default if not args[4]:  # gradients are not scaled by the frequency of words
            return Contraction(args[:2], _Embedding(args[2:]))
        case aten.index_put.default | aten._index_put_impl.default:
            return _index_put(node)
        case aten.index_add.default if not node.kwargs and _is_zeros(args[0]):
            whole, dim, index, source = args
            rule = _AddedAt(_Zeros.like(whole), dim)
            return Contraction((index, source), rule)
        case operator.getitem if (of_weight := gradient_of_weight(node)) is not None:
            gradient, image, convolved = of_weight
            return Contraction((gradient, image), convolved)
    return None


def _index_put(node: Node) -> Contraction | None:
    """The contraction for ``index_put`` with ``accumulate`` into zeros, or None."""
    args: tuple[Any, ...] = node.args
    whole, indices, values, *more = args
    accumulated = more[0] if more else node.kwargs.get("accumulate", False)
    used = [dim for dim, index in enumerate(indices) if index is not None]
    given = [indices[dim] for dim in used]
    known = all(isinstance(i, Node) and i.meta["val"].dtype in (torch.int64, torch.int32) for i in given)
    if not (accumulated and _is_zeros(whole) and known) or len({i.meta["val"].shape for i in given}) != 1:
        return None
    return Contraction((*given, values), _IndexPut(_Zeros.like(whole), tuple(used)))


def _is_zeros(node: object) -> bool:
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    if node.target in (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default):
        return True
    return node.target in (aten.full.default, aten.full_like.default, aten.new_full.default) and bool(
        node.args[-1] == 0
    )


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
class _SumOfStep:
    dims: tuple[int, ...]
    keep: bool

    def __call__(self, rows: Tensor) -> Tensor:
        return rows.sum(self.dims, keepdim=self.keep)


@dataclass(frozen=True)
class _Embedding:
    arguments: tuple[Any, ...]

    def __call__(self, gradients: Tensor, indices: Tensor) -> Tensor:
        rows = gradients.reshape(-1, gradients.shape[-1])
        result: Tensor = aten.embedding_dense_backward(rows, indices.reshape(-1), *self.arguments)
        return result


@dataclass(frozen=True)
class _Zeros:
    size: torch.Size
    dtype: torch.dtype

    @classmethod
    def like(cls, node: Node) -> _Zeros:
        return cls(node.meta["val"].shape, node.meta["val"].dtype)

    def made(self, device: torch.device) -> Tensor:
        return torch.zeros(self.size, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class _IndexPut:
    """``index_put`` with ``accumulate`` into zeros, with an index for each of ``dims``."""

    whole: _Zeros
    dims: tuple[int, ...]

    def __call__(self, *operands: Tensor) -> Tensor:
        *given, values = operands
        indices: list[Tensor | None] = [None] * (self.dims[-1] + 1)
        for dim, index in zip(self.dims, given, strict=True):
            indices[dim] = index
        first, last = self.dims[0], self.dims[-1]
        together = len(self.dims) == last + 1 - first
        whole = self.whole.made(values.device)
        added: Tensor = aten.index_put(whole, indices, values.movedim(0, first if together else 0), True)
        return added


@dataclass(frozen=True)
class _AddedAt:
    """``index_add`` into zeros, along ``dim``."""

    whole: _Zeros
    dim: int

    def __call__(self, index: Tensor, source: Tensor) -> Tensor:
        dim = self.dim % len(self.whole.size)
        rows = source.movedim(0, dim).flatten(dim, dim + 1)
        added: Tensor = aten.index_add(self.whole.made(source.device), dim, index.reshape(-1), rows)
        return added
