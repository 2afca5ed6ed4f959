"""Light gated recurrent unit over 1024 steps.

Ravanelli et al., "Light Gated Recurrent Units for Speech Recognition", 2018. No reset gate, a rectified candidate,
batch normalisation of the input's share: the layer of a public report of a compile that takes a quarter of an hour
(https://github.com/pytorch/pytorch/issues/97155).
"""

import torch
from torch import nn

batch_size = 4
seq_length = 1024
input_size = 80
hidden_size = 128


class LiGRU(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.from_input = nn.Linear(input_size, 2 * hidden_size, bias=False)
        self.from_hidden = nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.norm = nn.BatchNorm1d(2 * hidden_size)
        self.hidden_size = hidden_size

    def forward(self, x):
        """``x``: batch, time, features. Returns every state and the last one."""
        batch, time, _ = x.shape
        projected = self.norm(self.from_input(x).reshape(batch * time, -1)).reshape(batch, time, -1)
        h = torch.zeros(batch, self.hidden_size, dtype=x.dtype)
        states = []
        for t in range(time):
            candidate, update = (projected[:, t] + self.from_hidden(h)).chunk(2, 1)
            update = torch.sigmoid(update)
            h = update * h + (1 - update) * torch.relu(candidate)
            states.append(h)
        return torch.stack(states, dim=1), h


def model():
    return LiGRU(input_size, hidden_size)


def example_inputs():
    return (torch.randn(batch_size, seq_length, input_size),)
