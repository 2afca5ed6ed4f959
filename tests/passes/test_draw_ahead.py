"""Loops that draw random numbers in each step become one kernel; the numbers are eager's, in eager's order."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check

STEPS, BATCH, WIDTH = 9, 3, 8


class Dropped(nn.Module):
    """Dropout on the state of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25)

    def forward(self, xs: Tensor) -> Tensor:
        h, outputs = xs.new_zeros(BATCH, WIDTH), []
        for x in xs:
            h = torch.tanh(x + self.recurrent(self.dropout(h)))
            outputs.append(h)
        return torch.stack(outputs)


class Twice(Dropped):
    """Dropout of two kinds in a step, and noise."""

    def forward(self, xs: Tensor) -> Tensor:
        h = xs.new_zeros(BATCH, WIDTH)
        for x in xs:
            h = torch.tanh(F.dropout(x, 0.5) + self.recurrent(self.dropout(h)))
            h = h + 0.1 * torch.randn_like(h)
        return h


class Sampled(Dropped):
    """Noise in the middle of a step, behind the layers that say how much."""

    def forward(self, xs: Tensor) -> Tensor:
        h = xs.new_zeros(BATCH, WIDTH)
        for x in xs:
            mean = self.recurrent(h)
            z = mean + torch.randn_like(mean) * torch.exp(self.recurrent(x))
            h = torch.tanh(x + z * h)
        return h


class Between(Dropped):
    """Another draw, whose numbers depend on values, between two steps."""

    def forward(self, xs: Tensor) -> Tensor:
        h = xs.new_zeros(BATCH, WIDTH)
        for x in xs:
            h = torch.tanh(x + self.recurrent(self.dropout(h)))
            h = h * torch.bernoulli(torch.sigmoid(h))
        return h


class Returned(Dropped):
    def forward(self, xs: Tensor) -> list[Tensor]:
        h, masks = xs.new_zeros(BATCH, WIDTH), []
        for x in xs:
            masks.append(torch.rand_like(h))
            h = torch.tanh(x + h * masks[-1])
        return [h, *masks]


def fired(model: nn.Module, train: bool = True) -> set[str]:
    report = fuse.show(model, (torch.randn(STEPS, BATCH, WIDTH),), train=train)
    return {firing.pass_name for firing in report.fired}


@pytest.mark.parametrize("model", [Dropped, Twice, Sampled])
def test_loops_with_dropout_are_one_kernel_forward_and_backward(model: type[Dropped]) -> None:
    torch.manual_seed(0)
    report = check(model(), (torch.randn(STEPS, BATCH, WIDTH, requires_grad=True),), train=True)
    assert report.passed, str(report)
    assert report.reference == "float64"
    draws = STEPS * (1 if model is Dropped else 3)
    assert report.observed[1] <= draws + 6
    assert report.observed_backward is not None
    assert report.observed_backward[1] <= 10


def test_numbers_are_eagers_and_differ_from_call_to_call() -> None:
    model = Dropped()
    twin, fused, xs = copy.deepcopy(model), fuse.compile(model), torch.randn(STEPS, BATCH, WIDTH)
    torch.manual_seed(3)
    mine = [fused(xs), fused(xs), torch.rand(2)]
    torch.manual_seed(3)
    theirs = [twin(xs), twin(xs), torch.rand(2)]
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.equal(mine[0], mine[1])
    torch.manual_seed(3)
    torch.testing.assert_close(fused(xs), mine[0], rtol=0, atol=0)


def test_nothing_is_dropped_in_evaluation() -> None:
    assert "draw_ahead" not in fired(Dropped().eval(), train=False)


@pytest.mark.parametrize("model", [Between, Returned])
def test_near_misses_draw_where_they_did(model: type[Dropped]) -> None:
    torch.manual_seed(0)
    assert "draw_ahead" not in fired(model())
    report = check(model(), (torch.randn(STEPS, BATCH, WIDTH),), train=True)
    assert report.passed, str(report)
