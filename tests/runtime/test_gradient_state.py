"""``.grad`` of parameters is eager's after each call: a call that reads or changes it itself is not captured."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse

Effect = Callable[["Model", Tensor], Any]


class Model(nn.Module):
    def __init__(self, effect: Effect) -> None:
        super().__init__()
        self.linear, self.inner, self.effect = nn.Linear(4, 4), nn.Linear(4, 4), effect
        self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        found = self.effect(self, x)
        y = torch.tanh(self.linear(x)) * 2
        return y * found if type(found) is float else self.accumulate(y) if found == "accumulate" else y

    def accumulate(self, y: Tensor) -> Tensor:
        found: Tensor = Accumulating.apply(y, self.inner)
        return found


class Accumulating(torch.autograd.Function):
    """As in reversible networks: the backward pass runs a module, and accumulates the gradients of its weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Any:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.module(x), grads[0])
        return x.grad, None


def _removes(model: Model, x: Tensor) -> None:
    model.linear.weight.grad = None


def _fills(model: Model, x: Tensor) -> None:
    if model.linear.weight.grad is not None:
        model.linear.weight.grad.zero_()


def _removes_all(model: Model, x: Tensor) -> None:
    model.zero_grad()


def _asks(model: Model, x: Tensor) -> float:
    return 1.0 if model.linear.weight.grad is None else 2.0


def _accumulates(model: Model, x: Tensor) -> None:
    with torch.enable_grad():
        model.inner(x).square().sum().backward()


def _steps(model: Model, x: Tensor) -> None:
    model.optimizer.zero_grad()
    _accumulates(model, x)
    model.optimizer.step()


def _accumulates_later(model: Model, x: Tensor) -> str:
    return "accumulate"


EFFECTS = [_removes, _fills, _removes_all, _asks, _accumulates, _steps, _accumulates_later]


def _state(model: Model) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for parameter in model.parameters():
        assert parameter.grad is None or type(parameter.grad) is Tensor  # no fake tensor of a capture
        found += [parameter.detach(), parameter.grad]
    return found


@pytest.mark.filterwarnings("ignore:Model runs eager", "ignore:Model ran eager")
@pytest.mark.parametrize("effect", EFFECTS)
def test_gradients_that_forward_reads_or_changes_are_eagers(effect: Effect) -> None:
    eager = Model(effect)
    model = copy.deepcopy(eager)
    fused = fuse.compile(model)
    for call in range(6):
        x = torch.randn(2, 4)
        with torch.set_grad_enabled(call % 3 != 0):
            expected, found = eager(x), fused(x)
        torch.testing.assert_close(found, expected)
        if expected.requires_grad:
            expected.square().mean().backward()
            found.square().mean().backward()
        for one, other in zip(_state(model), _state(eager), strict=True):
            torch.testing.assert_close(one, other)


def test_gradients_that_share_memory_do_not_keep_a_model_eager() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    shared = torch.zeros(16)
    for layer in (model[0], model[2]):
        layer.weight.grad = torch.empty(0).set_(shared.untyped_storage(), 0, (4, 4), (4, 1))
    fused = fuse.compile(model)
    fused(torch.randn(2, 4)).sum().backward()
    assert fused.last_run is not None
    assert not fused.last_run.fallbacks


@pytest.mark.filterwarnings("ignore:Model runs eager")
def test_a_gradient_that_is_none_may_be_read() -> None:
    """As layers that keep averages do, in case an optimizer has them; each call asks again."""
    eager = Model(_asks)
    model = copy.deepcopy(eager)
    fused = fuse.compile(model)
    for call in range(5):
        x = torch.randn(2, 4)
        for one in (eager, model):
            one.linear.weight.grad = torch.ones(4, 4) if call == 3 else None
        torch.testing.assert_close(fused(x), eager(x))
        assert fused.last_run is not None
        assert bool(fused.last_run.fallbacks) is (call == 3)
