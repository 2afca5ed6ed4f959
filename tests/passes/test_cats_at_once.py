"""A tensor that grows by a piece in every step is one concatenation, so that the loop around it rolls."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check
from fuse.testing import assert_fuses

WIDTH = 8


class Grown(nn.Module):
    """States of all steps, as ``static_scan`` of DreamerV3 in PyTorch collects them."""

    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        self.dim, self.linear = dim, nn.Linear(WIDTH, WIDTH)

    def forward(self, xs: Tensor) -> Tensor:
        h = torch.tanh(xs[0])
        states = h.clone().unsqueeze(self.dim)
        for x in xs[1:]:
            h = torch.tanh(x + self.linear(h))
            states = torch.cat([states, h.unsqueeze(self.dim)], self.dim)
        return states


class Prepended(Grown):
    def forward(self, xs: Tensor) -> Tensor:
        h = states = xs[0]
        for x in xs[1:]:
            h = torch.tanh(x + self.linear(h))
            states = torch.cat([h, states], -1)
        return states


class Read(Grown):
    """Every step reads all states so far."""

    def forward(self, xs: Tensor) -> Tensor:
        h = xs[0]
        states = h.unsqueeze(0)
        for x in xs[1:]:
            h = torch.tanh(x + states.amax(0))
            states = torch.cat([states, h.unsqueeze(0)])
        return states


class InTurn(Grown):
    """Grows along another dimension in every second step."""

    def forward(self, xs: Tensor) -> Tensor:
        states = xs[0]
        for t, x in enumerate(xs[1:]):
            dim = t % 2
            states = torch.cat([states, x.mean() + states.narrow(dim, 0, 1).detach() * 0], dim)
        return states


class Twice(Grown):
    """Doubles in every step."""

    def forward(self, xs: Tensor) -> Tensor:
        states = torch.tanh(xs[0])
        for _ in range(5):
            states = torch.cat([states, states])
        return states


def count(model: nn.Module, xs: Tensor) -> int:
    return sum(one.count for one in fuse.show(model, (xs,)).fired if one.pass_name == "cats_at_once")


@pytest.mark.parametrize("model", [Grown(), Grown(1), Grown(-1), Prepended()])
def test_a_tensor_that_grows_is_one_concatenation(model: nn.Module) -> None:
    counts = []
    for steps in (9, 20):
        xs = torch.randn(steps, 3, WIDTH)
        assert count(model, xs) == 1
        with torch.no_grad():
            counts.append(fuse.show(model, (xs,)).after.launches)
    assert counts[0] == counts[1] <= 4
    report = check(model, (torch.randn(9, 3, WIDTH),), train=True)
    assert report.passed, report


def test_states_that_grow_are_collected_by_the_loop() -> None:
    with torch.no_grad():
        assert_fuses(Grown(), torch.randn(12, 3, WIDTH), fired={"cats_at_once": 1, "roll_whole_loops": 1})


def test_gradients_of_states_that_grow_do_not_grow_in_launches() -> None:
    counts = []
    for steps in (20, 33):
        model, xs = Grown(), torch.randn(steps, 3, WIDTH, requires_grad=True)
        fused = fuse.compile(copy.deepcopy(model))
        for one in (model, fused):
            one(xs).square().sum().backward()
        torch.testing.assert_close(fused.linear.weight.grad, model.linear.weight.grad)
        counts.append((fused.last_run.launches, fused.last_run.backward.launches))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("model", [Read(), InTurn(), Twice()])
def test_near_misses_stay(model: nn.Module) -> None:
    xs = torch.randn(8, 3, WIDTH)
    assert count(model, xs) == 0
    with torch.no_grad():
        torch.testing.assert_close(fuse.compile(model)(xs), model(xs))


def test_strides_stay_those_of_eager() -> None:
    class Images(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            grown = x
            for _ in range(5):
                grown = torch.cat([grown, torch.relu(x)], 1)
            return grown

    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    made = fuse.compile(Images())(x)
    expected = Images()(x)
    assert made.stride() == expected.stride()
    assert torch.equal(made, expected)
