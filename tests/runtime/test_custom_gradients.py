"""Gradients of the user's own: autograd functions and custom operators keep theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class Rounded(torch.autograd.Function):
    """Rounds forward; the gradient passes straight through where it is small, and is counted in Python."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < ctx.limit), None


class Reversed(torch.autograd.Function):
    """Two results, setup apart, a gradient that is not used, and one result without gradient."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * y, (x > y).float()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return -gradient * y, 5 * gradient * x


@torch.library.custom_op("fuse_tests::scaled_sine", mutates_args=())
def scaled_sine(x: Tensor, scale: float) -> Tensor:
    return torch.from_numpy(__import__("numpy").sin(x.detach().numpy())) * scale


@scaled_sine.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


def _own_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return 7 * gradient * scaled_sine(x, ctx.scale), None  # not the sine's: eager's is this one, too


scaled_sine.register_autograd(_own_gradient, setup_context=_save)


@torch.library.custom_op("fuse_tests::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x.clone()


without_fake.register_autograd(lambda ctx, gradient: 3 * gradient)


class Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer, x)


def _in_a_loop(layer: nn.Module, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    for t in range(9):
        h = torch.tanh(layer(h) + Rounded.apply(x * 2 + t * 0.1, 1.5))
    return h


def _two_results(layer: nn.Module, x: Tensor) -> Tensor:
    product, mask = Reversed.apply(layer(x).tanh(), x)
    return product.sigmoid() + mask


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "a function": lambda layer, x: Rounded.apply(layer(x) * 3, 1.0).tanh() + x,
    "a function of two results": _two_results,
    "a function in a loop": _in_a_loop,
    "a custom operator": lambda layer, x: scaled_sine(layer(x).relu() + 0.1, 2.0).tanh(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("door", ["compile", "dynamo"])
def test_own_gradients_are_kept(name: str, door: str) -> None:
    torch._dynamo.reset()
    model = Function(FUNCTIONS[name])
    eager = copy.deepcopy(model)
    compiled = fuse.compile(model) if door == "compile" else torch.compile(model, backend="fuse")
    x = torch.randn(4, 8, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    for _ in range(2):
        torch.testing.assert_close(compiled(x), eager(twin))
        compiled(x).square().sum().backward()
        eager(twin).square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    if door == "compile":
        assert compiled.last_run.fallbacks == ()
        assert compiled.last_run.backward.fallbacks == ()


def test_a_custom_operator_that_says_nothing_of_its_result_stays_a_call_of_its_own() -> None:
    model = Function(lambda layer, x: without_fake(layer(x)) * 2)
    fused = fuse.compile(model)
    fused(torch.ones(2, 8)).sum().backward()
    assert (fused.last_run.fallbacks, fused.last_run.aten) == ((), 1)
    torch.testing.assert_close(model.layer.bias.grad, torch.full((8,), 12.0))
