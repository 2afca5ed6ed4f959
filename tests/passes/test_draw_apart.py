"""Random numbers that were drawn ahead for a loop that does not come about are read where they were drawn."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check


class Layers(nn.Module):
    """Four layers, each with weights of its own: they are no loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(torch.relu(layer(x)))
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = self.dropout(torch.tanh(self.layer(x)))
        return x


def fired(model: nn.Module) -> set[str]:
    return {firing.pass_name for firing in fuse.show(model, (torch.randn(3, 8),)).fired}


def test_a_stack_that_no_loop_reads_is_taken_away() -> None:
    torch.manual_seed(0)
    assert {"draw_ahead", "draw_apart"} <= fired(Layers().train())
    report = check(Layers().train(), (torch.randn(3, 8),), train=True)
    assert report.passed, str(report)
    assert report.observed[1] == 12  # a product, a mask and a kernel for each layer


def test_a_stack_that_a_loop_reads_stays() -> None:
    assert "draw_apart" not in fired(Recurrent().train())
