"""Layer-normalised LSTM (Ba, Kiros and Hinton, "Layer Normalization", 2016) as a plain Python loop."""

import torch
from torch import nn

batch_size = 4
seq_length = 64
input_size = 64
hidden_size = 64


class LayerNormLSTM(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.from_input = nn.Linear(input_size, 4 * hidden_size, bias=False)
        self.from_hidden = nn.Linear(hidden_size, 4 * hidden_size)
        self.norm_input = nn.LayerNorm(4 * hidden_size)
        self.norm_hidden = nn.LayerNorm(4 * hidden_size)
        self.norm_cell = nn.LayerNorm(hidden_size)
        self.hidden_size = hidden_size

    def forward(self, x):
        """``x``: time, batch, features."""
        h = torch.zeros(x.shape[1], self.hidden_size, dtype=x.dtype)
        c = torch.zeros(x.shape[1], self.hidden_size, dtype=x.dtype)
        outputs = []
        for step in x:
            gates = self.norm_input(self.from_input(step)) + self.norm_hidden(self.from_hidden(h))
            write, forget, candidate, output = gates.chunk(4, 1)
            c = torch.sigmoid(forget) * c + torch.sigmoid(write) * torch.tanh(candidate)
            h = torch.sigmoid(output) * torch.tanh(self.norm_cell(c))
            outputs.append(h)
        return torch.stack(outputs), (h, c)


def model():
    return LayerNormLSTM(input_size, hidden_size)


def example_inputs():
    return (torch.randn(seq_length, batch_size, input_size),)
