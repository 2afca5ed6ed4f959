"""Random numbers in training: dropout's statistics, one mask for both directions, seeds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse

RATE = 0.3


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class Between(nn.Module):
    """Dropout between operators that are fused; what was dropped is seen in the result and in the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * 2 + 1, RATE) * 0.5


class InLoop(nn.Module):
    """Dropout of another place in each step of a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, xs: Tensor) -> Tensor:
        h, outputs = torch.zeros_like(xs[0]), []
        for x in xs:
            h = torch.tanh(self.layer(F.dropout(h, RATE)) + x)
            outputs.append(F.dropout(h, 0.5))
        return torch.stack(outputs)


class Noisy(nn.Module):
    """Noise made by several operators, in a loop and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, xs: Tensor) -> Tensor:
        h = torch.randn_like(xs[0]) * 0.1
        for x in xs:
            h = torch.tanh(h * self.weight + x + 0.1 * torch.randn_like(h))
        return h + torch.rand(16) + F.rrelu(h, training=True)


def test_dropout_keeps_as_many_as_it_says_and_scales_them() -> None:
    fused = fuse.compile(Between())
    x = torch.ones(400, 500, requires_grad=True)
    y = fused(x)
    y.sum().backward()
    kept = y != 0
    assert kept.float().mean().item() == pytest.approx(1 - RATE, abs=0.005)
    assert kept.float().mean(0).std().item() == pytest.approx((RATE * (1 - RATE) / 400) ** 0.5, rel=0.1)
    assert kept[:, 1:].logical_and(kept[:, :-1]).float().mean().item() == pytest.approx((1 - RATE) ** 2, abs=0.005)
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1.5 / (1 - RATE)))
    torch.testing.assert_close(x.grad, kept / (1 - RATE))  # the mask of the forward pass
    assert fused.last_run.fallbacks == ()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "between operators": (Between, (4, 16)),
    "in a loop": (InLoop, (12, 4, 16)),
    "noise": (Noisy, (12, 4, 16)),
    "attention": (lambda: nn.TransformerEncoderLayer(16, 2, 32, RATE, batch_first=True), (4, 6, 16)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_seed_gives_eagers_numbers_and_the_next_call_others(name: str) -> None:
    make, shape = MODELS[name]
    model = make()
    eager = copy.deepcopy(model)
    fused = fuse.compile(model)
    runs = []
    for run, weights in ((fused, model), (eager, eager), (fused, model)):
        x = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape).requires_grad_()
        weights.zero_grad()
        torch.manual_seed(5)
        first, second = run(x), run(x)
        (first * 2 + second).sum().backward()
        assert not torch.equal(first, second)
        runs.append([first, second, x.grad, *(p.grad for p in weights.parameters()), torch.rand(3)])
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(runs[0], runs[2], rtol=0, atol=0)
    assert fused.last_run.fallbacks == ()


def test_gradients_use_the_mask_of_their_own_call() -> None:
    fused = fuse.compile(Between())
    a, b = (torch.ones(64, 64, requires_grad=True) for _ in range(2))
    first, second = fused(a), fused(b)
    second.sum().backward()
    first.sum().backward()
    assert torch.equal(a.grad != 0, first != 0)
    assert torch.equal(b.grad != 0, second != 0)


def test_evaluation_draws_nothing() -> None:
    fused = fuse.compile(nn.Sequential(nn.Linear(8, 8), nn.Dropout(RATE), nn.Tanh())).eval()
    state = torch.get_rng_state()
    fused(torch.ones(2, 8)).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_patterns_whose_examples_are_random_take_nothing_from_the_models_generator(
    registered: Callable[..., Any],
) -> None:
    class Drawn:
        def pattern(self, x: Tensor) -> Tensor:
            return torch.sin(x) * torch.cos(x)

        def examples(self) -> tuple[Tensor, ...]:
            return (torch.randn(3, 4),)

    registered(Drawn)
    model = Between()
    torch.manual_seed(5)
    mine = fuse.compile(model)(torch.ones(4, 8))
    torch.manual_seed(5)
    torch.testing.assert_close(mine, model(torch.ones(4, 8)))
