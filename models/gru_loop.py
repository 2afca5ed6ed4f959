"""A GRU written as a plain Python loop over time.

    r = sigmoid(W_xr x_t + b_xr + W_hr h + b_hr)
    z = sigmoid(W_xz x_t + b_xz + W_hz h + b_hz)
    n = tanh(W_xn x_t + b_xn + r * (W_hn h + b_hn))
    h = (1 - z) * n + z * h

The reset gate sits inside the candidate's recurrent part, as in ``torch.nn.GRU``, so the two products cannot simply be
added. Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder", EMNLP 2014.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

seq_length = 64
batch_size = 4
input_size = 128
hidden_size = 128


class Model(nn.Module):
    """One GRU layer, time first: (T, B, input) to the outputs (T, B, H) and the last state (B, H)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.from_input = nn.Linear(input_size, 3 * hidden_size)
        self.from_hidden = nn.Linear(hidden_size, 3 * hidden_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        steps, batch, _ = x.shape
        h = torch.zeros(batch, self.hidden_size, dtype=x.dtype, device=x.device)
        outputs = []
        for step in range(steps):
            reset_x, update_x, candidate_x = self.from_input(x[step]).chunk(3, dim=1)
            reset_h, update_h, candidate_h = self.from_hidden(h).chunk(3, dim=1)
            r = torch.sigmoid(reset_x + reset_h)
            z = torch.sigmoid(update_x + update_h)
            n = torch.tanh(candidate_x + r * candidate_h)
            h = (1 - z) * n + z * h
            outputs.append(h)
        return torch.stack(outputs), h


def tuned() -> nn.Module:
    """What experts tuned by hand for the same work."""
    return nn.GRU(input_size, hidden_size)


def get_init_inputs() -> list[int]:
    return [input_size, hidden_size]


def get_inputs() -> list[Tensor]:
    return [torch.randn(seq_length, batch_size, input_size)]
