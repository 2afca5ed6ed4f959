"""A second length of the same model: what is built again, and what is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check
from fuse.runtime.cpu import compiler


class Stacked(nn.Module):
    """Two layers, each in both directions, batch first; ``units`` are those of one direction."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.ModuleList(nn.Linear(3 * units, units) for _ in range(2)) for _ in range(2))
        self.units = units

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.cells:
            forward, backward = pair
            x = torch.cat([self.one_direction(x, forward), self.one_direction(x.flip(1), backward).flip(1)], 2)
        return x

    def one_direction(self, x: Tensor, cell: nn.Module) -> Tensor:
        h = x.new_zeros(x.shape[0], self.units)
        states = []
        for t in range(x.shape[1]):
            h = torch.tanh(cell(torch.cat([x[:, t], h], 1)))
            states.append(h)
        return torch.stack(states, 1)


class Cumulative(nn.Module):
    """One loop, and nothing besides it."""

    def forward(self, x: Tensor) -> Tensor:
        h, states = x[0], []
        for step in x[1:]:
            h = h + step
            states.append(torch.tanh(h))
        return torch.stack(states)


def compiled(model: nn.Module, x: Tensor) -> Tensor:
    """A fresh ``fuse.compile`` of the model, called once."""
    with torch.no_grad():
        result: Tensor = fuse.compile(model)(x)
    return result


@pytest.mark.usefixtures("empty_cache")
def test_the_loops_of_a_second_length_are_not_compiled_again(compiled_sources: list[str]) -> None:
    model = Stacked(16)
    compiled(model, torch.randn(3, 8, 32))
    assert sum("fuse_run_team(loop_" in source for source in compiled_sources) == 1  # one for all four
    del compiled_sources[:]
    for length in (9, 40):
        report = check(model, (torch.randn(3, length, 32),))
        assert report.passed, report
        assert not report.fallbacks
    assert not any("fuse_run_team(loop_" in source for source in compiled_sources)


@pytest.mark.usefixtures("empty_cache")
def test_a_model_that_is_a_loop_and_nothing_else_compiles_nothing_for_a_second_length(
    compiled_sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Cumulative()
    compiled(model, torch.randn(8, 2, 16))
    assert compiled_sources
    del compiled_sources[:]
    x = torch.randn(30, 2, 16)
    torch.testing.assert_close(compiled(model, x), model(x))
    monkeypatch.setattr(compiler, "_loaded", {})  # as in another process: what was built lies on disk
    compiled(model, torch.randn(31, 2, 16))
    assert not compiled_sources
