"""Loops that sample classes in each step become one kernel; classes and the generator's state are eager's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, OneHotCategoricalStraightThrough
from torch.nn import functional

import fuse
from fuse.check.oracle import check
from tests.samples import newer_torch

BATCH, GROUPS, CLASSES, WIDTH = 3, 4, 5, 8
STATE = GROUPS * CLASSES


class WorldModel(nn.Module):
    """The recurrent state-space model of Dreamer: a GRU and classes sampled straight through, observed or imagined."""

    def __init__(self, observed: bool) -> None:
        super().__init__()
        self.observed = observed
        self.joined = nn.Sequential(nn.Linear(STATE + 2, WIDTH), nn.ELU())
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.prior = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ELU(), nn.Linear(WIDTH, STATE))
        self.posterior = nn.Sequential(nn.Linear(WIDTH + 6, WIDTH), nn.ELU(), nn.Linear(WIDTH, STATE))

    def forward(self, actions: Tensor, embedded: Tensor, firsts: Tensor) -> list[Tensor]:
        h, z = actions.new_zeros(BATCH, WIDTH), actions.new_zeros(BATCH, STATE)
        deterministic, stochastic, priors, posteriors = [], [], [], []
        for t in range(len(actions)):
            keep = (1 - firsts[t]).unsqueeze(-1)
            h, z = h * keep, z * keep
            h = self.cell(self.joined(torch.cat([z, actions[t]], -1)), h)
            priors.append(self.prior(h))
            posteriors.append(self.posterior(torch.cat([h, embedded[t]], -1)))
            logits = (posteriors if self.observed else priors)[-1].view(BATCH, GROUPS, CLASSES)
            z = Independent(OneHotCategoricalStraightThrough(logits=logits), 1).rsample().view(BATCH, STATE)
            deterministic.append(h)
            stochastic.append(z)
        return [torch.stack(kept) for kept in (deterministic, stochastic, priors, posteriors)]


def inputs(steps: int) -> tuple[Tensor, ...]:
    torch.manual_seed(steps)
    return torch.randn(steps, BATCH, 2), torch.randn(steps, BATCH, 6), (torch.rand(steps, BATCH) < 0.1).float()


def ran(model: nn.Module, args: tuple[Tensor, ...], seed: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    torch.manual_seed(seed)
    results = model(*args)
    torch.stack([one.square().sum() for one in results]).sum().backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return results, gradients, torch.get_rng_state()


@pytest.mark.parametrize("observed", [True, False])
def test_a_world_model_is_one_kernel_for_all_steps(observed: bool) -> None:
    model = WorldModel(observed)
    counts = []
    for steps in (9, 20):
        args = inputs(steps)
        fused = fuse.compile(copy.deepcopy(model))
        for seed in range(2):
            expected, found = ran(model, args, seed), ran(fused, args, seed)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        run = fused.last_run
        assert not run.fallbacks
        assert not run.backward.fallbacks
        counts.append((run.launches - steps, run.backward.launches))  # a draw for each step
    (few, few_backward), (many, many_backward) = counts
    assert many <= few
    assert many_backward <= few_backward


@newer_torch
def test_a_world_model_is_right() -> None:
    report = check(WorldModel(True), inputs(7), train=True)
    assert report.passed, report


class Chain(nn.Module):
    """A chain of states drawn from the rows of a matrix."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = {"num_samples": 1, "replacement": True, **how}

    def forward(self, rates: Tensor, states: Tensor) -> Tensor:
        found = []
        for _ in range(8):
            samples = torch.multinomial(rates[states], **self.how)
            states = samples[:, 0]
            found.append(samples)
        return torch.stack(found)


class NoiseInBetween(Chain):
    def forward(self, rates: Tensor, states: Tensor) -> Tensor:
        found = []
        for _ in range(8):
            states = torch.multinomial(rates[states], 1)[:, 0]
            found.append(torch.bernoulli(rates[states] / 9))
        return torch.stack(found)


def fired(model: nn.Module, args: tuple[Tensor, ...]) -> int:
    return sum(one.count for one in fuse.show(model, args).fired if one.pass_name == "classes_by_argmax")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_chain_of_classes_is_eagers(dtype: torch.dtype) -> None:
    rates, states = torch.rand(6, 6).to(dtype), torch.tensor([0, 5, 2])
    assert fired(Chain(), (rates, states)) == 1
    fused = fuse.compile(Chain())
    for seed in range(4):
        torch.manual_seed(seed)
        expected, after = Chain()(rates, states), torch.rand(())
        torch.manual_seed(seed)
        assert torch.equal(fused(rates, states), expected)
        assert torch.equal(torch.rand(()), after)
    assert not fused.last_run.fallbacks


@pytest.mark.parametrize("model", [Chain(num_samples=2), NoiseInBetween()])
def test_near_misses_are_left_to_the_library(model: nn.Module) -> None:
    rates, states = torch.rand(6, 6), torch.tensor([0, 5, 2])
    assert fired(model, (rates, states)) == 0
    torch.manual_seed(0)
    expected = model(rates, states)
    torch.manual_seed(0)
    assert torch.equal(fuse.compile(model)(rates, states), expected)


@pytest.mark.filterwarnings("ignore:.*runs eager")
@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan"), None])
def test_rates_that_the_library_refuses_are_refused(bad: float | None) -> None:
    rates, states = torch.rand(6, 6) + 0.1, torch.tensor([0, 5, 2])
    fused = fuse.compile(Chain())
    fused(rates, states)
    assert fused.last_run.launches == 8 + 3  # draws, their stack, the loop, the check
    worse = rates.clone()
    if bad is None:
        worse[:] = 0
    else:
        worse[:, 3] = bad
    for _ in range(2):
        with pytest.raises(RuntimeError, match="probabilit"):
            fused(worse, states)
    torch.manual_seed(1)
    expected = Chain()(rates, states)
    torch.manual_seed(1)
    assert torch.equal(fused(rates, states), expected)


def test_one_sample_outside_of_a_loop_stays_one_call() -> None:
    class Once(nn.Module):
        def forward(self, rates: Tensor) -> Tensor:
            return torch.multinomial(functional.softmax(rates, -1), 1)

    assert fired(Once(), (torch.randn(4, 5),)) == 0
