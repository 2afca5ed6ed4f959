"""Assertions in the steps of a loop are one for all steps, and none where an argmax proves them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

import fuse
from fuse.check.oracle import check
from fuse.testing import assert_fuses
from tests.samples import newer_torch

Step = Callable[[Tensor, int], Tensor]


class Loop(nn.Module):
    def __init__(self, step: Step, steps: int = 8) -> None:
        super().__init__()
        self.step, self.steps, self.linear = step, steps, nn.Linear(6, 6)

    def forward(self, h: Tensor) -> Tensor:
        for t in range(self.steps):
            h = torch.tanh(self.linear(h)) + self.step(h, t)
        return h


def asserts(h: Tensor, t: int) -> Tensor:
    torch._assert_async((h < 3).all())
    return h * 0.5


PROVEN: dict[str, Step] = {
    "a class of the largest": lambda h, t: one_hot(h.argmax(-1), 6).float(),
    "of more classes than there are": lambda h, t: one_hot(h.argmax(-1, keepdim=True), 9)[:, 0, :6].float(),
    "of as many as there are": lambda h, t: one_hot(h.argmax(0), len(h)).float().mT,
}


@newer_torch
@pytest.mark.parametrize("name", PROVEN)
def test_classes_that_an_argmax_found_are_not_checked(name: str) -> None:
    with torch.no_grad():
        assert_fuses(Loop(PROVEN[name]), torch.randn(4, 6), launches=1, fired={"checks_together": 8})


def test_the_states_of_all_steps_are_checked_at_once() -> None:
    with torch.no_grad():
        counts = [fuse.show(Loop(asserts, steps), (torch.randn(4, 6),)).after.launches for steps in (8, 24)]
    assert counts[0] == counts[1] <= 3
    report = check(Loop(asserts), (torch.randn(4, 6),), train=True)
    assert report.passed, report


@pytest.mark.filterwarnings("ignore:.*runs eager")
def test_a_state_that_is_refused_in_one_step_raises() -> None:
    model = Loop(asserts)
    fused = fuse.compile(model)
    with torch.no_grad():
        good, bad = torch.randn(4, 6).clamp(-1, 1), torch.full((4, 6), 9.0)
        torch.testing.assert_close(fused(good), model(good))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="nonzero value"):
                fused(bad)
        torch.testing.assert_close(fused(good), model(good))


@pytest.mark.filterwarnings("ignore:.*runs eager")
def test_classes_beyond_those_that_there_are_raise() -> None:
    model = Loop(lambda h, t: one_hot(h.argmax(-1), 4).float().repeat(1, 2)[:, :6])
    fused = fuse.compile(model)
    good, bad = torch.tensor([[9.0, 0, 0, 0, -9, -9]]), torch.tensor([[0.0, 0, 0, 0, 0, 9]])
    with torch.no_grad():
        model.linear.weight.zero_()
        model.linear.bias.copy_(torch.tensor([3.0, 0, 0, 0, -3, -3]))
        torch.testing.assert_close(fused(good), model(good))
        with pytest.raises(RuntimeError, match="smaller than num_classes"):
            fused(bad)
