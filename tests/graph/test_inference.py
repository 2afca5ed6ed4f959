"""``torch.inference_mode`` in ``forward``: writes are captured, and results are inference tensors where eager's are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check

Forward = Callable[["Cached", Tensor], Any]


class Cached(nn.Module):
    """A model with weights, a buffer and a plain tensor that ``forward`` may write."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.function = forward
        self.linear = nn.Linear(4, 4)
        self.cache = torch.zeros(3, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def computes(self: Cached, x: Tensor) -> Any:
    return torch.tanh(self.linear(x)), x[1:]


def writes_a_cache(self: Cached, x: Tensor) -> Any:
    self.cache[:, 1:3] = x[:, :2]
    return self.linear(x) + self.cache


def writes_a_buffer(self: Cached, x: Tensor) -> Any:
    self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x - self.mean


def writes_an_argument(self: Cached, x: Tensor) -> Any:
    x[:, 0].add_(1)
    return x[:, 0]


def writes_a_result(self: Cached, x: Tensor) -> Any:
    y = self.linear(x)
    y[:, 0] = 0
    y.view(-1).add_(x.view(-1))
    return y.t(), y


def loops(self: Cached, x: Tensor) -> Any:
    h = torch.zeros(4)
    for _ in range(8):
        h = torch.tanh(self.linear(h) + x.sum(0))
    return h


def asks(self: Cached, x: Tensor) -> Any:
    return x * (2 if torch.is_inference_mode_enabled() else 3) * (5 if torch.is_grad_enabled() else 7)


def leaves_it(self: Cached, x: Tensor) -> Any:
    y = self.linear(x)
    with torch.inference_mode(False):
        z = torch.ones(4) * (2 if torch.is_inference_mode_enabled() else 3)
    return (y * z).sum()


FORWARDS: tuple[Forward, ...] = (
    computes, writes_a_cache, writes_a_buffer, writes_an_argument, writes_a_result, loops, asks, leaves_it,
)  # fmt: skip


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("forward", FORWARDS)
def test_a_decorated_forward_is_captured(forward: Forward, gradients: bool) -> None:
    model = Cached(torch.inference_mode()(forward))
    eager, fused = copy.deepcopy(model), fuse.compile(model)
    with torch.set_grad_enabled(gradients):
        for _ in range(4):
            x = torch.randn(3, 4)
            mine, theirs = fused(x.clone()), eager(x.clone())
            for one, other in zip(_tensors(mine), _tensors(theirs), strict=True):
                torch.testing.assert_close(one, other)
                assert one.is_inference() == other.is_inference()
                assert not one.requires_grad
            for one, other in ((model.cache, eager.cache), (model.mean, eager.mean)):
                torch.testing.assert_close(one, other)
                assert not one.is_inference()
    assert fused.last_run is not None
    assert not fused.last_run.fallbacks
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("forward", FORWARDS)
def test_values_are_right_against_the_oracle(forward: Forward) -> None:
    model = Cached(torch.inference_mode()(forward))
    report = check(model, (torch.randn(3, 4),))
    assert report.passed, report.problems


def test_a_part_in_inference_mode_gives_values_that_gradients_do_not_reach() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                scale = torch.sigmoid(self.scale(x))
                scale.mul_(2)
            return self.shift(x) * scale.clone()

    model = Part()
    eager, fused, x = copy.deepcopy(model), fuse.compile(model), torch.randn(3, 4)
    for _ in range(2):
        mine, theirs = fused(x), eager(x)
        torch.testing.assert_close(mine, theirs)
        mine.sum().backward()
        theirs.sum().backward()
        torch.testing.assert_close(model.shift.weight.grad, eager.shift.weight.grad)
        assert model.scale.weight.grad is None
        assert eager.scale.weight.grad is None
        assert not mine.is_inference()
    assert fused.last_run is not None
    assert not fused.last_run.fallbacks


def _tensors(result: Any) -> list[Tensor]:
    return [*result] if isinstance(result, tuple) else [result]
