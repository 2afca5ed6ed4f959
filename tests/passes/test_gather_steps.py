"""Steps of one tensor side by side are a part of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn


class Stack(nn.Module):
    def __init__(self, pick: Callable[[Tensor, Tensor], list[Tensor]], dim: int = 0) -> None:
        super().__init__()
        self.pick = pick
        self.dim = dim

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack(self.pick(x, y), self.dim)


GATHERED: dict[str, tuple[Callable[[Tensor, Tensor], list[Tensor]], tuple[int, int, int]]] = {
    "in order": (lambda x, y: [x[1], x[2], x[3], x[4]], (0, 0, 1)),  # a copy, because it is a result
    "backwards": (lambda x, y: [x[4], x[3], x[2], x[1]], (0, 1, 0)),
    "with another": (lambda x, y: [y[0], *(x[k] for k in range(5)), y[1]], (1, 0, 0)),
    "every second": (lambda x, y: [x[0], x[2], x[4], x[6]], (0, 0, 1)),
    "every second, backwards": (lambda x, y: [y[0], x[7], x[5], x[3], x[1]], (1, 1, 0)),
    "far, then near": (lambda x, y: [x[5], x[0], x[1], x[2], x[3]], (1, 0, 0)),
    "far, then spaced": (lambda x, y: [x[5], x[0], x[2], x[4], x[6]], (1, 0, 0)),
    "turning": (lambda x, y: [x[k] for k in (0, 1, 2, 3, 4, 3, 2, 1, 0)], (1, 1, 0)),
}


@pytest.mark.parametrize("name", GATHERED)
def test_steps_become_a_part(name: str, rewritten: Callable[..., object]) -> None:
    pick, counts = GATHERED[name]
    result = rewritten(Stack(pick), torch.randn(8, 3), torch.randn(2, 3), passes=["gather_steps"])
    assert result.fired == {"gather_steps": 1}
    assert (result.count("cat"), result.count("flip"), result.count("clone")) == counts
    assert result.count("stack") == 0


NEAR_MISSES: dict[str, Callable[[Tensor, Tensor], list[Tensor]]] = {
    "few": lambda x, y: [x[0], x[1], x[2], y[0]],
    "every second": lambda x, y: [x[0], x[2], x[4], x[1], x[3]],
    "of two tensors": lambda x, y: [x[0], x[1], y[0], y[1]],
    "one again and again": lambda x, y: [x[1], x[1], x[1], x[1]],
    "along another dimension": lambda x, y: [x[:3, 0], x[:3, 1], x[:3, 2]],
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay(name: str, rewritten: Callable[..., object]) -> None:
    result = rewritten(Stack(NEAR_MISSES[name]), torch.randn(8, 3), torch.randn(2, 3), passes=["gather_steps"])
    assert result.fired == {}


def test_a_stack_along_the_last_dimension_is_declined(rewritten: Callable[..., object]) -> None:
    pick = GATHERED["in order"][0]
    result = rewritten(Stack(pick, 1), torch.randn(8, 3), torch.randn(2, 3), passes=["gather_steps"])
    assert result.reasons == {"the steps do not lie along the first dimension": 1}
