"""The peak that a plan predicts is what a call of its program allocates, workspaces of kernels included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.cost.allocated import peak_allocated
from fuse.runtime.programs.program import Program

ROWS, WIDTH = 24, 64


class Model(nn.Module):
    def __init__(self, run: Callable[[Model, Tensor], object]) -> None:
        super().__init__()
        self.run, self.cell, self.norm = run, nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> object:
        return self.run(self, x)


def packed_products(m: Model, x: Tensor) -> object:
    return [torch.tanh(m.cell(torch.sigmoid(m.cell(step)))) for step in x[:2]]


def loop(m: Model, x: Tensor) -> object:
    h, hs = x[0] * 2, []
    for step in x:
        h = m.norm(torch.tanh(m.cell(h) + step))
        hs.append(h)
    return torch.stack(hs), h.softmax(1)


def calls(m: Model, x: Tensor) -> object:
    return torch.tanh(x).sort(0).values.exp().sort(1).values.sum(2)


def loop_around_a_call(m: Model, x: Tensor) -> object:
    h = x[0]
    for step in x:
        h = torch.tanh(m.cell(h) + step).sort(1).values
    return h


@pytest.mark.parametrize("run", [packed_products, loop, calls, loop_around_a_call], ids=lambda run: run.__name__)
def test_the_peak_is_what_a_call_allocates(run: Callable[[Model, Tensor], object]) -> None:
    model, x = Model(run).eval(), torch.randn(8, ROWS, WIDTH)
    predicted = fuse.show(model, (x,)).after.peak_bytes
    fused = fuse.compile(model)
    with torch.no_grad():
        fused(x)
        program = fused.compiled.program
        assert isinstance(program, Program)
        program.forget_workspaces()
        allocated = peak_allocated(lambda: fused(x))
    graph = fused.compiled.graph
    assert graph is not None
    read = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    assert predicted == pytest.approx(allocated + sum(t.numel() * t.itemsize for t in read), rel=0.05)


def test_a_result_takes_no_memory_before_a_step_makes_it() -> None:
    fused = fuse.compile(Model(lambda m, x: torch.exp(x.sort(0).values)))
    x = torch.randn(64, 4096)
    with torch.no_grad():
        expected = fused(x)
        allocated = peak_allocated(lambda: fused(x))
        torch.testing.assert_close(fused(x), expected)
    assert allocated == pytest.approx(3 * x.numel() * x.itemsize, rel=0.05)  # values and 64-bit positions
