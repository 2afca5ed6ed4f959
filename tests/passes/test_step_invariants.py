"""What all steps compute alike is computed once, before the loop; what two states have in common at first is not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fuse.testing import assert_fuses

STEPS, BATCH, WIDTH = 6, 3, 8


class SameInAllSteps(nn.Module):
    """Each step computes the weight anew."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(BATCH, WIDTH)
        for step in x:
            h = torch.tanh(step + h @ self.weight.softmax(1))
        return h


class ConstantInAllSteps(nn.Module):
    """Each step makes the same mask."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(BATCH, WIDTH)
        for step in x:
            h = torch.tanh(step + h) * torch.ones(BATCH, WIDTH).triu()
        return h


class AlikeAtFirst(nn.Module):
    """Two states start alike, so that the first step computes 0.9 * 0 twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = b = torch.zeros(BATCH, WIDTH)
        for step in x:
            a, b = 0.9 * a + step, torch.sin(0.9 * b - step)
        return a, b


def steps() -> Tensor:
    return torch.randn(STEPS, BATCH, WIDTH)


def test_what_all_steps_compute_alike_leaves_the_loop() -> None:
    with torch.no_grad():
        report = assert_fuses(SameInAllSteps(), steps(), launches=1, fired={"step_invariants": STEPS - 1})
    assert [loop.trip_count for loop in report.loops] == [STEPS]
    assert report.loops[0].peeled == 0


def test_a_constant_of_all_steps_is_folded_before_the_loop() -> None:
    report = assert_fuses(ConstantInAllSteps(), steps(), launches=1, fired={"constant_folding": 1})
    assert report.loops[0].peeled == 0


def test_two_states_that_begin_alike_stay_two() -> None:
    report = assert_fuses(AlikeAtFirst(), steps(), launches=1, fired={"step_invariants": 0})
    assert [loop.trip_count for loop in report.loops] == [STEPS]
    assert report.loops[0].peeled == 0
