from __future__ import annotations

import torch
from torch import Tensor, nn


class UnusedChain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.tanh(torch.sin(x) + torch.cos(x))
        return x * 2


class UnusedNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        return x * torch.rand(3)


class UnusedArgument(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * 2


def test_an_unused_chain_goes_as_one_rewrite(rewritten):
    result = rewritten(UnusedChain(), torch.randn(3), passes=["dead_code"])
    assert result.fired == {"dead_code": 1}
    assert result.launches == 1
    assert result.ledger.fired[0].launches_saved == 4


def test_unused_random_numbers_are_still_drawn(rewritten):
    result = rewritten(UnusedNoise(), torch.randn(3), passes=["dead_code"])
    assert sum(fired.launches_saved for fired in result.ledger.fired) == 0
    assert result.count("rand") == 2
    assert result.reasons == {"its result is unused, but it draws random numbers or has an unknown effect": 1}


def test_unused_arguments_stay_placeholders(rewritten):
    result = rewritten(UnusedArgument(), torch.randn(3), torch.randn(3), passes=["dead_code"])
    assert len(result.graph.graph.find_nodes(op="placeholder")) == 2
