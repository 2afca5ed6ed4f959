"""Formulas for gradients that lie at one place of a dimension: no scatter, but arithmetic that any kernel holds.

    h.max(1, keepdim=True)       backward   scatter(zeros, 1, i, g)      ->    where(arange(n) == i, g, 0)
    p.gather(1, target)          backward   scatter_add(zeros, 1, i, g)  ->    0 + where(arange(n) == i, g, 0)

For the backward pass only: what forward looked up lies within the tensor, or forward raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def scattered(whole: Tensor, dim: int, index: Tensor, part: Tensor) -> Tensor:
    """``whole`` with ``part`` at place ``index`` of ``dim``.

    >>> scattered(torch.zeros(2, 3), 1, torch.tensor([[1], [2]]), torch.tensor([[5.0], [6.0]]))
    tensor([[0., 5., 0.],
            [0., 0., 6.]])
    """
    return torch.where(_here(whole, dim, index), part, whole)


def scatter_added(whole: Tensor, dim: int, index: Tensor, part: Tensor) -> Tensor:
    """``whole``, to which ``part`` is added at place ``index`` of ``dim``."""
    return whole + torch.where(_here(whole, dim, index), part, torch.zeros((), dtype=part.dtype, device=part.device))


def _here(whole: Tensor, dim: int, index: Tensor) -> Tensor:
    size = whole.shape[dim]
    places = torch.arange(size, device=whole.device)
    return places.view([size if d == dim % whole.dim() else 1 for d in range(whole.dim())]) == index


FORMULAS: dict[Any, Callable[..., Tensor]] = {aten.scatter.src: scattered, aten.scatter_add.default: scatter_added}


def formula(op: Any, args: tuple[Any, ...]) -> Callable[..., Tensor] | None:
    """How ``op(*args)`` is computed where each row has one place, or None."""
    found = FORMULAS.get(op)
    if found is None or len(args) != 4:
        return None
    whole, dim, index, part = args
    if whole.dim() == 0 or index.dim() != whole.dim() or part.shape != index.shape:
        return None
    expected = list(whole.shape)
    expected[dim] = 1
    return found if list(index.shape) == expected and whole.dtype == part.dtype else None
