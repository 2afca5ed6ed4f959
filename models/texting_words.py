"""TextING from raw strings: words are looked up and graphs are built in ``forward``, in Python, before the network.

    texts -> words -> numbers, and edges between words that stand near each other          host: dicts and loops
          -> embedding -> gated graph layer, a few times -> classes                         device: models/texting.py

The network is that of Zhang, Yu, Cui, Wu, Wen and Wang, ACL 2020. ``fuse show`` prints where the host work ends, and
``fuse.pipeline`` does it for the next batches while this one computes.
"""

from __future__ import annotations

import random
import re

import torch
from torch import Tensor, nn

batch_size = 8
num_words = 40
vocabulary_size = 2000
embedding_size = 300
hidden_size = 96
num_classes = 8
num_steps = 2
window = 3


class TextINGOfWords(nn.Module):
    """Class scores (B, classes) of texts: a list of strings."""

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary = {f"w{i}": i + 2 for i in range(vocabulary_size)}  # 0: no word, 1: an unknown one
        self.embedding = nn.Embedding(vocabulary_size + 2, embedding_size, padding_idx=0)
        self.encode = nn.Linear(embedding_size, hidden_size)
        self.message = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gates = nn.ModuleList([nn.Linear(2 * hidden_size, hidden_size) for _ in range(3)])
        self.attention = nn.Linear(hidden_size, 1)
        self.embed = nn.Linear(hidden_size, hidden_size)
        self.classify = nn.Linear(hidden_size, num_classes)

    def forward(self, texts: list[str]) -> Tensor:
        words = [re.findall(r"\w+", text.lower())[:num_words] for text in texts]
        numbers = torch.tensor([self.numbers(line) for line in words])
        adjacency = torch.tensor([self.edges(line) for line in words])

        mask = (numbers != 0).unsqueeze(2).to(torch.float32)
        h = mask * torch.tanh(self.encode(self.embedding(numbers)))
        update, reset, new = self.gates
        for _ in range(num_steps):
            a = torch.bmm(adjacency, self.message(h))
            z = torch.sigmoid(update(torch.cat([a, h], 2)))
            r = torch.sigmoid(reset(torch.cat([a, h], 2)))
            h = z * torch.tanh(mask * new(torch.cat([a, r * h], 2))) + (1 - z) * h
        h = mask * torch.sigmoid(self.attention(h)) * torch.tanh(self.embed(h))
        mean = h.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        largest = (h + (mask - 1) * 1e9).max(dim=1).values
        return self.classify(mean + largest)

    def numbers(self, words: list[str]) -> list[int]:
        """The words' places in the vocabulary, filled up."""
        found = [self.vocabulary.get(word, 1) for word in words]
        return found + [0] * (num_words - len(found))

    def edges(self, words: list[str]) -> list[list[float]]:
        """How often two words stand in one window, by the root of both words' sums; a word that returns is one node."""
        places = {word: place for place, word in reversed(list(enumerate(words)))}
        counts = [[0.0] * num_words for _ in range(num_words)]
        for i, word in enumerate(words):
            for other in words[max(0, i - window + 1) : i + window]:
                counts[places[word]][places[other]] += 1.0
        scales = [(sum(row) or 1.0) ** -0.5 for row in counts]
        return [
            [count * a * b for count, b in zip(row, scales, strict=True)] for row, a in zip(counts, scales, strict=True)
        ]


def model() -> nn.Module:
    return TextINGOfWords()


def texts(seed: int = 0) -> list[str]:
    """As many texts as a batch has, of words of which some return; a few are not in the vocabulary."""
    draw = random.Random(seed)
    return [
        " ".join(
            f"w{int(vocabulary_size * 1.02 * draw.random() ** 3)}"
            for _ in range(draw.randint(num_words // 2, num_words))
        )
        for _ in range(batch_size)
    ]


def example_inputs() -> tuple[list[str]]:
    return (texts(),)
