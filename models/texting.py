"""TextING: a gated graph network over the words of a document, connected where they stand near each other.

    a = A (W_a h)                                messages from neighbours, A normalised co-occurrence in a window
    z, r = sigmoid(W_z a + U_z h), sigmoid(W_r a + U_r h)
    h = z * tanh(W_h a + U_h (r * h)) + (1 - z) * h                 a few times, with the same weights
    document = mean + max over words of sigmoid(f_1(h)) * tanh(f_2(h))

Zhang, Yu, Cui, Wu, Wen and Wang, "Every Document Owns Its Structure: Inductive Text Classification via Graph Neural
Networks", ACL 2020. Word vectors come as input, as the paper's GloVe vectors do.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

batch_size = 8
num_words = 40
embedding_size = 300
hidden_size = 96
num_classes = 8
num_steps = 2
window = 3


class GraphLayer(nn.Module):
    """``num_steps`` rounds of messages: states (B, N, H), adjacency (B, N, N), mask (B, N, 1)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.message = nn.Linear(size, size, bias=False)
        self.update_in, self.update_state = nn.Linear(size, size), nn.Linear(size, size)
        self.reset_in, self.reset_state = nn.Linear(size, size), nn.Linear(size, size)
        self.new_in, self.new_state = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, h: Tensor, adjacency: Tensor, mask: Tensor) -> Tensor:
        for _ in range(num_steps):
            a = torch.bmm(adjacency, self.message(h))
            z = torch.sigmoid(self.update_in(a) + self.update_state(h))
            r = torch.sigmoid(self.reset_in(a) + self.reset_state(h))
            new = torch.tanh(mask * (self.new_in(a) + self.new_state(r * h)))
            h = new * z + h * (1 - z)
        return h


class TextING(nn.Module):
    """Class scores (B, classes) of word vectors (B, N, E), adjacency (B, N, N) and mask (B, N)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(embedding_size, hidden_size)
        self.graph = GraphLayer(hidden_size)
        self.attention = nn.Linear(hidden_size, 1)
        self.embed = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(0.5)
        self.classify = nn.Linear(hidden_size, num_classes)

    def forward(self, words: Tensor, adjacency: Tensor, mask: Tensor) -> Tensor:
        mask = mask.unsqueeze(2).to(words.dtype)
        h = mask * torch.tanh(self.encode(self.dropout(words)))
        h = self.graph(h, adjacency, mask)
        h = mask * torch.sigmoid(self.attention(h)) * torch.tanh(self.embed(h))
        mean = h.sum(dim=1) / mask.sum(dim=1)
        largest = (h + (mask - 1) * 1e9).max(dim=1).values
        return self.classify(self.dropout(mean + largest))


def model() -> nn.Module:
    return TextING()


def example_inputs() -> tuple[Tensor, Tensor, Tensor]:
    lengths = num_words - torch.arange(batch_size) % (num_words // 2)
    mask = torch.arange(num_words) < lengths.unsqueeze(1)
    place = torch.arange(num_words)
    near = ((place.unsqueeze(0) - place.unsqueeze(1)).abs() < window) & mask.unsqueeze(1) & mask.unsqueeze(2)
    degree = near.sum(dim=2, keepdim=True).clamp(min=1).to(torch.float32)
    adjacency = near / degree.sqrt() / degree.transpose(1, 2).sqrt()
    return torch.randn(batch_size, num_words, embedding_size) * mask.unsqueeze(2), adjacency, mask
