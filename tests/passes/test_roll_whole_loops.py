"""The input's products stay in the step where their weights stay in cache, and leave it where they do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fuse.check.oracle import check
from fuse.testing import assert_fuses

STEPS = 6


class Recurrence(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.states = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = x[0]
        for step in x:
            h = torch.tanh(self.inputs(step) + self.states(h))
        return h


class Normalised(Recurrence):
    def forward(self, x: Tensor) -> Tensor:
        h = x[0]
        for step in x:
            h = torch.softmax(self.inputs(step) + self.states(h), 1)
        return h


class NothingToProject(Recurrence):
    def forward(self, x: Tensor) -> Tensor:
        h = x[0]
        for step in x:
            h = torch.tanh(step + self.states(h))
        return h


@pytest.mark.parametrize(("width", "batch"), [(16, 1), (16, 3), (1024, 8)])
def test_products_of_the_input_stay_in_the_step(width: int, batch: int) -> None:
    x = torch.randn(STEPS, batch, width)
    assert_fuses(Recurrence(width), x, launches=1, fired={"roll_whole_loops": 1, "merge_shared_weight_gemms": 0})


def test_large_weights_and_few_rows_are_one_product_before_the_loop() -> None:
    x = torch.randn(STEPS, 2, 1024)
    fired = {"roll_whole_loops": 0, "merge_shared_weight_gemms": 1, "roll_loops": 1}
    assert_fuses(Recurrence(1024), x, launches=2, fired=fired, rejected={"roll_whole_loops": 1})


def test_a_loop_without_products_of_inputs_is_rolled_at_once() -> None:
    assert_fuses(NothingToProject(16), torch.randn(STEPS, 3, 16), fired={"roll_whole_loops": 1, "roll_loops": 0})


def test_beside_reductions_products_of_the_input_leave_the_step() -> None:
    fired = {"roll_whole_loops": 0, "merge_shared_weight_gemms": 1, "roll_loops": 1}
    assert_fuses(Normalised(64), torch.randn(STEPS, 3, 64), launches=2, fired=fired)


def test_products_that_take_less_time_than_a_launch_stay_beside_reductions() -> None:
    fired = {"roll_whole_loops": 1, "merge_shared_weight_gemms": 0}
    assert_fuses(Normalised(16), torch.randn(STEPS, 3, 16), launches=1, fired=fired)


class JoinedWithAConstant(nn.Module):
    """A step reads its state in a concatenation; all states, the first one included, are stacked and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.states = nn.Linear(9, 8)

    def forward(self, h: Tensor) -> Tensor:
        states = [h]
        for step in range(STEPS):
            h = h + torch.tanh(self.states(torch.cat([h, torch.full_like(h[:, :1], step / STEPS)], 1)))
            states.append(h)
        return torch.stack(states)


def test_states_are_stacked_behind_the_first_and_concatenated_in_each_step() -> None:
    assert_fuses(JoinedWithAConstant(), torch.randn(3, 8), launches=2, fired={"roll_whole_loops": 1})


class Clockwork(nn.Module):
    """Parts of the state are updated every step, every second and every fourth: Koutnik et al., "A Clockwork RNN",
    2014."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, xs: Tensor) -> Tensor:
        h, kept = torch.zeros_like(xs[0]), []
        for t, x in enumerate(xs):
            updated = 4 * sum(t % period == 0 for period in (1, 2, 4))
            h = torch.cat([torch.tanh(x + self.linear(h))[:, :updated], h[:, updated:]], 1)
            kept.append(h)
        return torch.stack(kept)


def test_a_step_that_updates_the_whole_state_concatenates_nothing_with_it() -> None:
    """Its other piece has no elements, which no kernel reads."""
    xs = torch.randn(20, 3, 12)
    xs[1, 0, 0], xs[2, 1, 1] = torch.nan, -0.0
    with torch.no_grad():
        assert_fuses(Clockwork(), xs, launches=1, fired={"roll_whole_loops": 1})
    assert check(Clockwork(), (torch.randn(20, 3, 12),), train=True).passed
