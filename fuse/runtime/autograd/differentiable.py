"""Gradients that can be differentiated: the graphs of a call, run under autograd, one operator after another.

    y = fused(x);  g, = torch.autograd.grad(y.sum(), x, create_graph=True);  g.square().sum().backward()

    inputs           -> forward graph   -> values that the call saved, with their history
    these, tangents  -> backward graph  -> gradients, with theirs

A backward program computes gradients without a history, so that they cannot be differentiated. Run under autograd, the
graphs of the call give gradients with a history, if operators alone determine what is differentiated (a graph has no
``detach``). The forward graph runs once more on the inputs of the call. If its values differ from those that the call
saved, an input was written in between.

Autograd does not differentiate the mean and the deviation that operators of normalisation return beside their result.
Backward graphs compute with these two values, so this file computes them from the input.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from fuse import ops
from fuse.graph.signature import InputSpec

aten = torch.ops.aten

TWICE = "gradients of gradients are taken of the results of a compiled call"

LARGEST_DIFFERENCE, LARGEST_ROUNDED = 0.01, 1e-4
"""By which saved values may differ from those computed again: part of their norm, or of their number where they are no
floats; and root mean square of the difference, for sums that are all but 0. Rounding differs between a kernel and its
operators; other inputs differ by far more."""


@dataclass(frozen=True)
class InputsOfCall:
    """The inputs of a call, as its backward pass finds them; their kinds are in ``signature``.

    By position: ``leaves`` of autograd that need gradients, ``saved`` tensors, and weak references to tensors ``given``
    to the call and not saved.
    """

    signature: Sequence[InputSpec]
    leaves: dict[int, Tensor]
    saved: dict[int, Tensor]
    given: dict[int, ref[Tensor]]

    def tensors(self) -> list[Tensor] | str:
        """The tensors of all placeholders, or the reason why one of them is missing."""
        found: list[Tensor] = []
        for position, spec in enumerate(self.signature):
            tensor = self.leaves.get(position, self.saved.get(position))
            if tensor is None:
                tensor = self.given[position]()
            if tensor is None:
                return f"{spec.name} is no longer there"
            found.append(tensor)
        return found


def versions(tensors: Sequence[Tensor]) -> list[int | None]:
    """The versions of tensors, which writes change; None for tensors of inference mode, which have none.

    >>> x = torch.zeros(2)
    >>> _ = x.add_(1)
    >>> versions([x])
    [1]
    """
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def dependent(graph: GraphModule, inputs: Container[int]) -> set[int]:
    """Positions of the outputs that depend on the inputs at positions ``inputs``."""
    found: dict[Node, set[int] | None] = {}  # nodes that depend on them, with the results that do; None for all
    placeholders = graph.graph.find_nodes(op="placeholder")
    found.update((node, None) for number, node in enumerate(placeholders) if number in inputs)
    for node in graph.graph.nodes:
        read = found.keys() & node.all_input_nodes
        if node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (tuple, list)) else node.args
            return {position for position, result in enumerate(results) if result in found}
        if not read:
            continue
        positions = [i for i, argument in enumerate(node.args) if isinstance(argument, Node) and argument in found]
        part = graph.get_submodule(node.target) if node.op == "call_module" else None
        results = found[node.args[0]] if node.target is operator.getitem else None
        if results is not None:
            if node.args[1] in results:
                found[node] = None
        elif isinstance(part, GraphModule):
            if some := dependent(part, positions):
                found[node] = some
        elif node.target is aten._native_batch_norm_legit_functional.default and node.args[5] and min(positions) > 2:
            found[node] = {3, 4}  # in training, only the new running statistics depend on the old ones
        else:
            found[node] = None
    return set()


def refusal(graphs: Sequence[GraphModule]) -> str | None:
    """The reason why gradients cannot be taken of the gradients that these graphs compute, or None."""
    parts = [part for graph in graphs for part in graph.modules() if isinstance(part, GraphModule)]
    return next(filter(None, (_refusal(node) for part in parts for node in part.graph.nodes)), None)


def _refusal(node: Node) -> str | None:
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return None
    if ops.is_random(op):
        return f"{op} draws random numbers"
    if op in _STATISTICS or op in _FORMULAS or op in _DIFFERENTIABLE or op._schema.name.endswith("_backward"):
        return None
    if op.namespace not in ("aten", "prims"):
        return f"no gradient of {op} is known"
    later = [user for user in node.users if user.args[1:] != (0,) and user.users]
    if len(op._schema.returns) > 1 and any(user.meta["val"].is_floating_point() for user in later):
        return f"autograd knows gradients of the first result of {op} only"
    return None


_DIFFERENTIABLE = {
    aten.var_mean.correction,
    aten.std_mean.correction,
    aten.aminmax.default,
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
}
"""Operators whose further results have gradients, or are constants; those of backward passes have gradients or none."""


class WithStatistics(TorchFunctionMode):
    """Gives a history to further results of operators, and lets gradients of normalisation add to it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = _FORMULAS.get(func, func)(*args, **(kwargs or {}))
        statistics = _STATISTICS.get(func)
        return results if statistics is None else (results[0], *statistics(results, *args), *results[3:])


def _of_layer_norm(
    results: Sequence[Tensor], x: Tensor, shape: Sequence[int], weight: object, bias: object, eps: float
) -> tuple[Tensor, Tensor]:
    return _mean_and_deviation(results, x, range(x.dim() - len(shape), x.dim()), eps)


def _of_group_norm(
    results: Sequence[Tensor],
    x: Tensor,
    weight: object,
    bias: object,
    n: int,
    c: int,
    size: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    return _mean_and_deviation(results, x.reshape(n, groups, c * size // groups), [2], eps)


def _of_batch_norm(
    results: Sequence[Tensor],
    x: Tensor,
    weight: object,
    bias: object,
    mean: object,
    var: object,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    if not training:
        return results[1], results[2]
    return _mean_and_deviation(results, x, [i for i in range(x.dim()) if i != 1], eps)


def _mean_and_deviation(results: Sequence[Tensor], x: Tensor, dims: Sequence[int], eps: float) -> tuple[Tensor, Tensor]:
    """The mean, and one by the standard deviation, in the layouts of ``results``."""
    var, mean = torch.var_mean(x.to(results[1].dtype), list(dims), correction=0)
    return mean.reshape(results[1].shape), (var + eps).rsqrt().reshape(results[2].shape)


_FORMULAS: dict[Any, Callable[..., Any]] = {
    **get_decompositions([aten.native_batch_norm_backward, aten.native_group_norm_backward]),
    torch.ops.fuse.assemble.default: torch.cat,
}
"""Formulas that autograd differentiates, of operators whose gradients it does not have, or takes without statistics."""

_STATISTICS: dict[Any, Callable[..., tuple[Tensor, ...]]] = {
    aten.native_layer_norm.default: _of_layer_norm,
    aten.native_group_norm.default: _of_group_norm,
    aten.native_batch_norm.default: _of_batch_norm,
    aten._native_batch_norm_legit_functional.default: _of_batch_norm,
    aten._native_batch_norm_legit.no_stats: lambda results, x, weight, bias, *more: _of_batch_norm(
        results, x, weight, bias, None, None, *more
    ),
    aten._native_batch_norm_legit_no_training.default: lambda results, *_: (results[1], results[2]),
    aten.log_sigmoid_forward.default: lambda results, x: ((-x.abs()).exp().reshape(results[1].shape),),
}


def same_values(again: Sequence[Tensor], saved: Sequence[Tensor]) -> list[Tensor] | None:
    """The values that a call saved, with the history of those computed ``again``; None where these are others, but for
    rounding. Inputs and results of the call keep their own history, and the hooks in it.

    >>> x = torch.ones(8, requires_grad=True)
    >>> same_values([2 * x], [torch.full((8,), 2.0)]), same_values([2 * x], [torch.zeros(8)])
    ([tensor([2., 2., 2., 2., 2., 2., 2., 2.], grad_fn=<MulBackward0>)], None)
    """
    pairs = list(zip(again, saved, strict=True))
    if not all(_same(one, other) for one, other in pairs if one.requires_grad):
        return None
    return [one if one.requires_grad and not other.requires_grad else other for one, other in pairs]


def _same(again: Tensor, saved: Tensor) -> bool:
    if again.shape != saved.shape or again.dtype != saved.dtype:
        return False
    again, saved = again.detach(), saved.detach()
    if not (again.is_floating_point() or again.is_complex()):
        return bool((again != saved).sum() <= LARGEST_DIFFERENCE * again.numel())
    wide = torch.complex128 if again.is_complex() else torch.float64
    one, other = again.to(wide), saved.to(wide)
    equal = (one == other) | ((one != one) & (other != other))  # infinities and NaN
    difference = torch.where(equal, 0, one - other).norm()
    norm = torch.where(other.isfinite(), other, 0).norm()
    return bool(difference <= LARGEST_DIFFERENCE * norm + LARGEST_ROUNDED * other.numel() ** 0.5)
