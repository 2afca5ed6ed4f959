"""A selective state-space block: the recurrence of Mamba as a plain Python loop.

    h = exp(dt A) h + dt B x         dt, B and C are computed from the input: what is kept is selected
    y = C h + D x

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, algorithm 2 and figure 3.
"""

import math

import torch
from torch import nn
from torch.nn import functional

batch_size = 4
seq_length = 64
model_size = 64
expansion = 2
state_size = 16
window = 4


class SelectiveScan(nn.Module):
    def __init__(self, model_size, expansion, state_size, window):
        super().__init__()
        inner = expansion * model_size
        rank = math.ceil(model_size / 16)
        self.sizes = [rank, state_size, state_size]
        self.to_inner = nn.Linear(model_size, 2 * inner, bias=False)
        self.convolution = nn.Conv1d(inner, inner, window, groups=inner, padding=window - 1)
        self.select = nn.Linear(inner, rank + 2 * state_size, bias=False)
        self.to_step = nn.Linear(rank, inner)
        self.log_decay = nn.Parameter(torch.log(torch.arange(1.0, state_size + 1).repeat(inner, 1)))
        self.skip = nn.Parameter(torch.ones(inner))
        self.from_inner = nn.Linear(inner, model_size, bias=False)

    def forward(self, x):
        """``x``: batch, time, features."""
        x, gate = self.to_inner(x).chunk(2, dim=2)
        x = self.convolution(x.transpose(1, 2))[:, :, : x.shape[1]].transpose(1, 2)
        x = functional.silu(x)
        return self.from_inner(self.scan(x) * functional.silu(gate))

    def scan(self, x):
        step, write, read = self.select(x).split(self.sizes, dim=2)
        step = functional.softplus(self.to_step(step))
        decay = -torch.exp(self.log_decay)
        h = torch.zeros(x.shape[0], *decay.shape, dtype=x.dtype)
        outputs = []
        for t in range(x.shape[1]):
            kept = torch.exp(step[:, t].unsqueeze(2) * decay)
            written = (step[:, t] * x[:, t]).unsqueeze(2) * write[:, t].unsqueeze(1)
            h = kept * h + written
            outputs.append((h @ read[:, t].unsqueeze(2)).squeeze(2))
        return torch.stack(outputs, dim=1) + self.skip * x


def model():
    return SelectiveScan(model_size, expansion, state_size, window)


def example_inputs():
    return (torch.randn(batch_size, seq_length, model_size),)
