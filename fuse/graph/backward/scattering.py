"""Formulas for gradients at one position of a dimension: elementwise arithmetic, which any kernel can contain, not
scatter.

    h.max(1, keepdim=True)       backward   scatter(zeros, 1, i, g)      ->    where(arange(n) == i, g, 0)
    p.gather(1, target)          backward   scatter_add(zeros, 1, i, g)  ->    0 + where(arange(n) == i, g, 0)
    nll_loss(p, target)          backward   nll_loss_backward(g, ...)    ->    where(arange(n) == target, -w * g, 0)
    h[mask] = row                backward   sum(index(g, [mask]), 0)     ->    sum(where(mask, g, 0), 0)

Only for the backward pass: there all positions are within the tensor, because the forward pass would have raised.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

aten = torch.ops.aten


def scattered(whole: Tensor, dim: int, index: Tensor, part: Tensor) -> Tensor:
    """``whole`` with ``part`` at position ``index`` of ``dim``.

    >>> scattered(torch.zeros(2, 3), 1, torch.tensor([[1], [2]]), torch.tensor([[5.0], [6.0]]))
    tensor([[0., 5., 0.],
            [0., 0., 6.]])
    """
    return torch.where(_here(whole, dim, index), part, whole)


def scatter_added(whole: Tensor, dim: int, index: Tensor, part: Tensor) -> Tensor:
    """``whole`` with ``part`` added at position ``index`` of ``dim``."""
    return whole + torch.where(_here(whole, dim, index), part, torch.zeros((), dtype=part.dtype, device=part.device))


def of_target(
    gradient: Tensor,
    whole: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    total: Tensor,
) -> Tensor:
    """The gradient of the negative log-likelihood loss, for one row, many rows, or images.

    ``gradient``: of the loss. ``whole``: the log-probabilities, for the shape. ``ignored``: the target without a loss.
    ``total``: the sum of weights, by which a mean is divided.

    >>> of_target(torch.ones(()), torch.zeros(2, 3), torch.tensor([1, 7]), None, 2, 7, torch.ones(()))
    tensor([[ 0., -1.,  0.],
            [ 0.,  0.,  0.]])
    """
    dim = 0 if whole.dim() == 1 else 1
    place = target.view([1]) if whole.dim() == 1 else target.unsqueeze(1)
    if reduction == _MEAN:
        gradient = gradient / total
    if gradient.dim():
        gradient = gradient.unsqueeze(dim)
    if weight is not None:
        gradient = gradient * weight.view([-1 if d == dim else 1 for d in range(whole.dim())])
    here = _here(whole, dim, place) & (place != ignored)
    return torch.where(here, -gradient, torch.zeros((), dtype=whole.dtype, device=whole.device))


def chosen_by_mask(gradient: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """``gradient[mask]`` for use in a sum over the chosen elements only: all elements, with zeros where not chosen.

    >>> chosen_by_mask(torch.ones(2, 2), [torch.tensor([[True, False], [False, True]])])
    tensor([1., 0., 0., 1.])
    """
    dim, mask = _only_mask(indices)
    shape = [1] * dim + list(mask.shape) + [1] * (gradient.dim() - dim - mask.dim())
    chosen = torch.where(mask.reshape(shape), gradient, torch.zeros((), dtype=gradient.dtype, device=gradient.device))
    return chosen.flatten(dim, dim + mask.dim() - 1)


def _is_summed(gradient: Tensor, indices: Sequence[Tensor | None]) -> bool:
    """Whether this is the gradient of one value that was written to all elements chosen by a mask: autograd sums it."""
    node = torch._C._current_autograd_node()
    if node is None or node.name() not in _WRITES or len(node.next_functions) != 2 or _runs_python():
        return False
    dim, mask = _only_mask(indices)
    if sum(one is not None for one in indices) != 1 or mask.dtype is not torch.bool or not mask.dim():
        return False
    values, place = node.next_functions[1]
    shape = tuple(values._input_metadata[place].shape) if values is not None else None
    behind = gradient.dim() - dim - mask.dim()
    return shape is not None and (len(shape) <= behind or shape[-behind - 1] == 1)


def _runs_python() -> bool:
    """Whether a ``torch.autograd.Function`` of the user's runs backward: the node of a write into a view may contain
    one."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not BackwardCFunction.apply.__code__:
        frame = frame.f_back
    return frame is not None


def _only_mask(indices: Sequence[Tensor | None]) -> tuple[int, Tensor]:
    return next((dim, one) for dim, one in enumerate(indices) if one is not None)


def _here(whole: Tensor, dim: int, index: Tensor) -> Tensor:
    size = whole.shape[dim]
    positions = torch.arange(size, device=whole.device)
    return positions.view([size if d == dim % whole.dim() else 1 for d in range(whole.dim())]) == index


_MEAN = 1
"""ATen's number for ``reduction="mean"``."""

FORMULAS: dict[Any, Callable[..., Tensor]] = {aten.scatter.src: scattered, aten.scatter_add.default: scatter_added}
_WRITES = ("IndexPutBackward0", "torch::autograd::CopySlices")
"""Autograd's nodes of ``index_put`` into a tensor, and into a view."""

LOSSES = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)


def formula(op: Any, args: tuple[Any, ...]) -> Callable[..., Tensor] | None:
    """The function that computes ``op(*args)`` if each row has one position; otherwise None."""
    if op in LOSSES:
        return of_target
    if op is aten.index.Tensor:
        return chosen_by_mask if _is_summed(*args) else None
    found = FORMULAS.get(op)
    if found is None or len(args) != 4:
        return None
    whole, dim, index, part = args
    if whole.dim() == 0 or index.dim() != whole.dim() or part.shape != index.shape:
        return None
    expected = list(whole.shape)
    expected[dim] = 1
    return found if list(index.shape) == expected and whole.dtype == part.dtype else None
