"""The last step of a loop computes a state for nobody: it is of the loop too, and goes where none is rolled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check
from fuse.passes.dead_code import of_last_steps
from fuse.testing import assert_fuses

BATCH, WIDTH = 3, 8


class Lagging(nn.Module):
    """Each step gives what the state was, and makes the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, ys = torch.zeros(BATCH, WIDTH), []
        for step in x:
            ys.append(torch.sigmoid(h) * step)
            h = torch.tanh(self.cell(h) + step)
        return torch.stack(ys)


class Apart(nn.Module):
    """Steps with weights of their own, which no loop can have."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(steps)])

    def forward(self, x: Tensor) -> Tensor:
        ys = []
        for weight in self.weights:
            ys.append(x.exp())
            x = torch.tanh(x @ weight)
        return torch.cat(ys)


def test_the_last_step_is_of_the_loop() -> None:
    with torch.no_grad():
        report = assert_fuses(Lagging(), torch.randn(6, BATCH, WIDTH), launches=1, fired={"unused_steps": 0})
    assert [loop.trip_count for loop in report.loops] == [6]
    assert not report.loops[0].peeled


def test_gradients_of_it_are_right() -> None:
    report = check(Lagging(), (torch.randn(6, BATCH, WIDTH),), train=True)
    assert report.passed, report


def test_it_goes_where_the_loop_stays() -> None:
    with torch.no_grad():
        report = assert_fuses(Apart(6), torch.randn(BATCH, WIDTH), fired={"unused_steps": 1})
    assert report.after.by_kind.get("gemm", 0) <= 5


@given(length=st.integers(2, 7), unread=st.integers(0, 2))
@settings(max_examples=8, deadline=None)
def test_any_length_and_any_end(length: int, unread: int) -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h, c, ys = x[0], x[0] * 2, []
            for step in x:
                ys.append(h + c)
                h, c = torch.sin(h) + step, torch.cos(c)
                if unread == 2:
                    torch.exp(c)
            return torch.stack(ys) if unread else torch.stack([*ys, h])

    with torch.no_grad():
        assert_fuses(Sums(), torch.randn(length, BATCH, WIDTH))


@pytest.mark.parametrize("steps", [3, 4])
def test_few_others_are_no_loop(steps: int) -> None:
    graph = fuse.capture(Lagging(), (torch.randn(steps, BATCH, WIDTH),))
    assert bool(of_last_steps(graph)) == (steps == 4)


def test_what_no_step_needs_is_of_no_loop() -> None:
    class Unread(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for step in x:
                torch.exp(step)
            return x * 2

    graph = fuse.capture(Unread(), (torch.randn(6, WIDTH),))
    assert not of_last_steps(graph)
