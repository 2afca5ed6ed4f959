"""A sum over steps that starts from a number starts from a tensor, so that the first step is like the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fuse.graph.capture import capture
from fuse.rewrite.pipeline import run_passes
from fuse.testing import assert_fuses


class Total(nn.Module):
    def __init__(self, start: float, steps: int) -> None:
        super().__init__()
        self.start, self.steps = start, steps

    def forward(self, x: Tensor) -> object:
        total: Tensor | float = self.start
        for t in range(self.steps):
            total = total + torch.tanh(x[t]).sum()
        return total


class Difference(Total):
    def forward(self, x: Tensor) -> object:
        total: Tensor | float = self.start
        for t in range(self.steps):
            total = total - torch.tanh(x[t]).sum()
        return total


class Alternating(Total):
    def forward(self, x: Tensor) -> object:
        return self.start - x[0] + x[1] - x[2] + x[3] - x[4]


class Halfway(Total):
    def forward(self, x: Tensor) -> object:
        first = self.start + x[0]
        return first + x[1] + x[2] + x[3], first * 2


class Wider(Total):
    def forward(self, x: Tensor) -> object:
        total = self.start + x[0].long()
        for t in range(1, self.steps):
            total = total + x[t].long()
        return total


def times(model: nn.Module, x: Tensor) -> int:
    ledger = run_passes(capture(model, (x,)), ["start_sums"])
    return sum(one.count for one in ledger.fired)


@pytest.mark.parametrize("model", [Total, Difference])
@pytest.mark.parametrize("start", [0, 0.0, -0.0, 2.5, float("nan"), float("inf")])
def test_a_sum_starts_from_a_tensor(model: type[Total], start: float) -> None:
    x = torch.randn(6, 3)
    assert times(model(start, 6), x) == 1
    assert_fuses(model(start, 6), x)


@pytest.mark.parametrize("model", [Total(0.0, 3), Alternating(0.0, 5), Halfway(0.0, 4), Wider(0.5, 5)])
def test_near_misses_stay(model: nn.Module) -> None:
    x = torch.randn(6, 3)
    assert times(model, x) == 0
    assert_fuses(model, x)
