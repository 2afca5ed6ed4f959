"""``module.to`` in ``forward``: where nothing is converted it does nothing, else the call runs eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse


class Converts(nn.Module):
    def __init__(self, to: Any) -> None:
        super().__init__()
        self.experts, self.target = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)]), to

    def forward(self, x: Tensor) -> Tensor:
        self.experts.to(self.target or x.device)
        for expert in self.experts:
            x = torch.relu(expert(x.type_as(next(expert.parameters()))))
        return x


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("to", [None, "cpu", torch.float32])
def test_a_conversion_of_nothing_is_nothing(to: Any, train: bool) -> None:
    model = Converts(to).train(train)
    original, weights = nn.Module._apply, list(model.parameters())
    eager, fused, x = copy.deepcopy(model), fuse.compile(model), torch.randn(6, 4)
    with torch.set_grad_enabled(train):
        torch.testing.assert_close(fused(x), eager(x))
    assert fused.last_run is not None
    assert fused.last_run.fallbacks == ()
    assert nn.Module._apply is original
    assert all(mine is before for mine, before in zip(model.parameters(), weights, strict=True))


@pytest.mark.filterwarnings("ignore:.* runs eager")
def test_a_conversion_is_eagers() -> None:
    model = Converts(torch.float64).eval()
    eager, fused, x = copy.deepcopy(model), fuse.compile(model), torch.randn(6, 4)
    for _ in range(3):
        torch.testing.assert_close(fused(x), eager(x))
        assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert fused.last_run is not None
    assert fused.last_run.fallbacks == ()  # by now they are what they are converted to
