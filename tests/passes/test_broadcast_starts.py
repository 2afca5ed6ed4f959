"""Loops read the numbers that their states start from: nothing fills tensors with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.testing import assert_fuses

BATCH, WIDTH = 3, 20
NAME = "broadcast_starts"


class Model(nn.Module):
    def __init__(self, run: Callable[[Model, Tensor], object]) -> None:
        super().__init__()
        self.run, self.cell, self.norm = run, nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> object:
        return self.run(self, x)


def zeros(m: Model, x: Tensor) -> object:
    h = torch.zeros(BATCH, WIDTH)
    for step in x:
        h = torch.tanh(m.cell(h) + step)
    return h


def like_a_part_of_the_input(m: Model, x: Tensor) -> object:
    h = torch.full_like(x[0], -0.0)
    for step in x:
        h = m.norm(m.cell(h) + step)
    return h


def view_of_ones(m: Model, x: Tensor) -> object:
    h = x.new_ones(WIDTH).expand(BATCH, WIDTH)
    for step in x:
        h = torch.tanh(m.cell(h) + step)
    return h


def two_numbers_and_integers(m: Model, x: Tensor) -> object:
    h, c, n = x.new_full((BATCH, WIDTH), 2.5), torch.zeros(BATCH, WIDTH), torch.ones(BATCH, dtype=torch.long)
    for step in x:
        h = torch.tanh(m.cell(h) + step * n.unsqueeze(1))
        c, n = 0.5 * c + h, h.argmax(1) + n % 3
    return h, c, n


def not_a_number(m: Model, x: Tensor) -> object:
    h, kept = torch.full((BATCH, WIDTH), float("inf")), torch.full((BATCH, 1), float("nan"))
    for step in x:
        h, kept = torch.tanh(m.cell(h).nan_to_num(0.5) + step), kept + h[:, :1]
    return h, kept


RUNS = {zeros: 1, like_a_part_of_the_input: 1, view_of_ones: 1, two_numbers_and_integers: 3, not_a_number: 2}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("length", [5, 9])
def test_a_loop_of_filled_states_is_one_launch(run: Callable[[Model, Tensor], object], length: int) -> None:
    with torch.no_grad():
        assert_fuses(Model(run).eval(), torch.randn(length, BATCH, WIDTH), launches=1, fired={NAME: RUNS[run]})


def test_states_that_are_returned_too_are_memory_of_the_callers() -> None:
    def run(m: Model, x: Tensor) -> object:
        first = h = torch.zeros(BATCH, WIDTH)
        for step in x:
            h = torch.tanh(m.cell(h) + step)
        return first, h

    with torch.no_grad():
        assert_fuses(Model(run).eval(), torch.randn(6, BATCH, WIDTH), launches=2, fired={NAME: 1})


@pytest.mark.usefixtures("unranked")
def test_loops_of_libraries_start_from_memory() -> None:
    def run(m: Model, x: Tensor) -> object:
        h = torch.zeros(BATCH, WIDTH)
        for step in x:
            h = torch.tanh(m.cell(h) + step).sort(1).values
        return h

    with torch.no_grad():
        report = assert_fuses(Model(run).eval(), torch.randn(6, BATCH, WIDTH), fired={NAME: 0})
    assert "the loop has no kernel, so its first states must be in memory" in [one.reason for one in report.rejected]


def test_lengths_that_are_declared_start_from_the_number_too() -> None:
    model = Model(zeros).eval()
    fused = fuse.compile(model, dynamic_shapes={"x": {0: torch.export.Dim("T")}})
    with torch.no_grad():
        for length in (9, 40, 64):
            x = torch.randn(length, BATCH, WIDTH)
            torch.testing.assert_close(fused(x), model(x))
    assert fused.last_run.launches == 1


@pytest.mark.parametrize(
    "start",
    [
        lambda: torch.full((BATCH, WIDTH), 1 + 2j).imag,
        lambda: torch.full((BATCH, WIDTH), 1 + 2j).conj().imag,
        lambda: torch.view_as_real(torch.full((BATCH, WIDTH), 1 + 2j))[..., 0],
        lambda: torch.full((BATCH, WIDTH), 1065353216, dtype=torch.int32).view(torch.float32),
        lambda: torch.full((BATCH, WIDTH), float("nan")),
        lambda: torch.full((BATCH, WIDTH), -0.0),
    ],
)
def test_numbers_that_a_view_reads_otherwise_are_eagers(start: Callable[[], Tensor]) -> None:
    def run(m: Model, x: Tensor) -> object:
        h = start()
        for t in range(8):
            h = torch.tanh(m.cell(h) + x[t])
        return h

    model, x = Model(run), torch.randn(8, BATCH, WIDTH)
    fused = fuse.compile(model)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), equal_nan=True)
    assert not fused.last_run.fallbacks
