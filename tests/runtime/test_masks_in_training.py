"""Elements chosen by a mask in training: their number is not learned where no gradient is taken of them, so that one
program serves any mask; a gradient that depends on the number is that of each call."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse


class Model(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.calls = 0
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def distributional(m, x):
    """The projection of a categorical value distribution: its bounds are moved apart where they are equal."""
    b = m.linear(x).detach() * 3
    low, high = b.floor().to(torch.int64), b.ceil().to(torch.int64)
    low[(high > 0) * (low == high)] -= 1
    high[(low < 9) * (low == high)] += 1
    return m.linear(x) * (low + high)


def a_number_read_later(m, x):
    """An attribute becomes an input of the graph when elements are chosen already."""
    low = x.round().to(torch.int64)
    low[x > 0] -= 1
    m.calls += 1
    return m.linear(x) * low / m.calls


def masked_inputs(m, x):
    replaced = torch.rand(x.shape) < 0.3
    y = x.clone()
    y[replaced] = torch.randn_like(x)[replaced]
    return m.linear(y)


def scaled_unseen(m, x):
    y = x.clone()
    with torch.no_grad():
        y[x > 0] *= m.scale
    return m.linear(y)


def detached(m, x):
    y = m.linear(x)
    z = x.clone()
    z[x > 0] = y.detach()[x > 0] * 2
    return y * z


def in_each_step(m, x):
    h = torch.zeros(6, 4)
    for _ in range(40):
        h = torch.tanh(m.linear(h) + x)
        d = h.detach().round()
        d[d > 0.3] += 1
        h = h * d.clamp(-1, 1)
    return h


def scaled(m, x):
    y = x.clone()
    y[x > 0] *= m.scale
    return m.linear(y)


def chosen_of_gradients(m, x):
    y = x.clone()
    y[x > 0] = m.linear(x)[x > 0] * 2
    return y


class Saves(torch.autograd.Function):
    """Its gradient reads what a mask chose."""

    @staticmethod
    def forward(ctx, x, scale, c):
        ctx.save_for_backward(c[c > 0] * 2, scale)
        return x * scale

    @staticmethod
    def backward(ctx, g):
        chosen, scale = ctx.saved_tensors
        return g * scale + chosen.sum(), g.sum() * len(chosen), None


class ChoosesAgain(Saves):
    """Its gradient chooses by the mask of the forward pass."""

    @staticmethod
    def forward(ctx, x, scale, c):
        ctx.save_for_backward(c, scale)
        d = c.clone()
        d[c > 0] *= 2
        return x * scale + d

    @staticmethod
    def backward(ctx, g):
        c, scale = ctx.saved_tensors
        return g * scale, g.sum() * c[c > 0].sum(), None


def saves(m, x):
    return Saves.apply(m.linear(x), m.scale, x)


def chooses_again(m, x):
    return ChoosesAgain.apply(m.linear(x), m.scale, x)


def checkpointed(m, x):
    def part(z: Tensor) -> Tensor:
        d = x.clone()
        d[x > 0] *= 2
        return torch.tanh(m.linear(z) * d)

    return torch.utils.checkpoint.checkpoint(part, m.linear(x), use_reentrant=False)


UNKNOWN = (distributional, a_number_read_later, masked_inputs, scaled_unseen, detached, in_each_step)
LEARNED = (scaled, chosen_of_gradients, saves, chooses_again, checkpointed)


@pytest.mark.sampled
@pytest.mark.parametrize("function", UNKNOWN + LEARNED)
def test_training_is_right_whatever_masks_choose(function: Callable[[Any, Tensor], Tensor]) -> None:
    eager = Model(function)
    model = copy.deepcopy(eager)
    fused, launches = fuse.compile(model), []
    with warnings.catch_warnings():
        warnings.simplefilter("error" if function in UNKNOWN else "ignore")
        for call in range(7):
            x = torch.full((24,), -1.0)
            x[: 3 * call + 1] = 2.0
            x = x[torch.randperm(24)].view(6, 4)
            found = []
            for one, own in ((eager, eager), (fused, model)):
                torch.manual_seed(call)
                own.zero_grad()
                result = one(x)
                result.sum().backward()
                found.append([result.detach(), *(p.grad for p in own.parameters() if p.grad is not None)])
            torch.testing.assert_close(found[1], found[0])
            launches.append(fused.last_run.launches)
    assert (0 in launches) is (function in LEARNED)
