"""Models that several tests use."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Cell(nn.Module):
    """Three launches a step; what a step reads of ``x`` and the state are of equal shape."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.recurrent = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], x.shape[2])
        for t in range(x.shape[1]):
            h = torch.tanh(self.recurrent(h) + x[:, t])
        return h
