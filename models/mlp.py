"""A multilayer perceptron with residual blocks: products between chains of small operators.

h = relu(W_in x)
h = h + W_b silu(W_a layer_norm(h))          once a block
y = log_softmax(W_out h)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

batch_size = 16
input_size = 64
hidden_size = 256
num_blocks = 3
num_classes = 10


class Block(nn.Module):
    """Residual block on (B, H), normalised before the products."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.expand = nn.Linear(size, size)
        self.contract = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.contract(functional.silu(self.expand(self.norm(x))))


class Perceptron(nn.Module):
    """Logarithmic class probabilities (B, classes) of the rows of (B, input)."""

    def __init__(self) -> None:
        super().__init__()
        self.inwards = nn.Linear(input_size, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size) for _ in range(num_blocks))
        self.outwards = nn.Linear(hidden_size, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.inwards(x))
        for block in self.blocks:
            h = block(h)
        return torch.log_softmax(self.outwards(h), dim=-1)


model = Perceptron()
example_inputs = (torch.randn(batch_size, input_size),)
