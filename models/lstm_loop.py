"""An LSTM written as a plain Python loop over time.

    gates = W_x x_t + b_x + W_h h + b_h          two products, one sum
    i, f, g, o = sigmoid, sigmoid, tanh, sigmoid of the quarters of gates
    c = f * c + i * g
    h = o * tanh(c)

Eager PyTorch dispatches 12 operators a step, views apart, and 3 more in all: 771 for 64 steps.
Hochreiter and Schmidhuber, "Long Short-Term Memory", Neural Computation 9(8), 1997; the gates as in ``torch.nn.LSTM``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

seq_length = 64
batch_size = 4
input_size = 128
hidden_size = 128


class Model(nn.Module):
    """One LSTM layer, time first: (T, B, input) to the outputs (T, B, H) and the last state (h, c), each (B, H)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.from_input = nn.Linear(input_size, 4 * hidden_size)
        self.from_hidden = nn.Linear(hidden_size, 4 * hidden_size)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        steps, batch, _ = x.shape
        h = torch.zeros(batch, self.hidden_size, dtype=x.dtype, device=x.device)
        c = torch.zeros(batch, self.hidden_size, dtype=x.dtype, device=x.device)
        outputs = []
        for step in range(steps):
            gates = self.from_input(x[step]) + self.from_hidden(h)
            i, f, g, o = gates.chunk(4, dim=1)
            i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
            c = f * c + i * g
            h = o * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs), (h, c)


def tuned() -> nn.Module:
    """What experts tuned by hand for the same work."""
    return nn.LSTM(input_size, hidden_size)


def get_init_inputs() -> list[int]:
    return [input_size, hidden_size]


def get_inputs() -> list[Tensor]:
    return [torch.randn(seq_length, batch_size, input_size)]
