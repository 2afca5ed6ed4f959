from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

PASSES = ["common_subexpressions"]


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + 1) * torch.tanh(x + 1)


class Swapped(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.maximum(x, y) / torch.maximum(y, x)


class SwappedLayouts(nn.Module):
    """The order of the operands decides the strides of the sum."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y.t()).exp() - (y.t() + x).exp()


class OnlyOneIsAResult(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.exp(x), torch.exp(x) * 2


class OneOrTrue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.full((2,), 1), torch.full((2,), True)])


class SignsOfZero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.copysign(x, 0.0) + torch.copysign(x, -0.0)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.rand_like(x) - torch.rand_like(x)


class Subtraction(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y) * (y - x)


class BothAreResults(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.exp(x), torch.exp(x)


class ViewsOfBothAreResults(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.exp(x)[1:], torch.exp(x)[:1]


class WrittenBackAndReturned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.state.copy_(x * 3)
        return x * 3


def test_equal_chains_run_once(rewritten):
    result = rewritten(Twice(), torch.randn(4), passes=PASSES)
    assert result.fired == {"common_subexpressions": 2}
    assert result.launches == 3
    assert result.ledger.fired[0].launches_saved == 2


def test_operands_of_a_commutative_operator_may_be_swapped(rewritten):
    assert rewritten(Swapped(), torch.randn(4), torch.randn(4), passes=PASSES).launches == 2


def test_an_inner_value_may_become_a_result(rewritten):
    assert rewritten(OnlyOneIsAResult(), torch.randn(4), passes=PASSES).launches == 2


@pytest.mark.parametrize("model", [OneOrTrue, SignsOfZero, Noise])
def test_what_only_looks_equal_stays(rewritten, model):
    assert rewritten(model(), torch.tensor([0.0, 1.0, float("nan")]), passes=PASSES).fired == {}


def test_subtraction_does_not_commute(rewritten):
    assert rewritten(Subtraction(), torch.randn(3), torch.randn(3), passes=PASSES).fired == {}


def test_strides_that_follow_from_the_order_of_operands_stay(rewritten):
    rewritten(SwappedLayouts(), torch.randn(3, 3), torch.randn(3, 3), passes=PASSES)


@pytest.mark.parametrize("model", [BothAreResults, ViewsOfBothAreResults, WrittenBackAndReturned])
def test_two_results_stay_two_tensors(rewritten, model):
    result = rewritten(model(), torch.randn(3), passes=PASSES)
    assert result.fired == {}
    assert "both are results of the model and must stay distinct tensors" in result.reasons


@torch.library.custom_op("fuse_tests::chatty", mutates_args=())
def chatty(x: Tensor) -> Tensor:
    return x + 1


@chatty.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return chatty(x) * chatty(x)


def test_operators_of_unknown_effect_run_as_often_as_written(rewritten):
    assert rewritten(Unknown(), torch.randn(3), passes=PASSES).fired == {}
