"""BERT-CRF: a transformer encoder that tags each word, with a conditional random field on top, as a plain Python loop.

    x = layer_norm(word + position + segment)
    x = layer_norm(x + W_o attention(x, mask));  x = layer_norm(x + W_2 gelu(W_1 x))       a few layers
    emissions = W x
    negative log likelihood = log of the sum over all tag paths - score of the right path  (the forward algorithm)

Devlin et al., "BERT", NAACL 2019; Lafferty, McCallum and Pereira, "Conditional Random Fields", ICML 2001. With
``--set decode=True`` the best path by Viterbi instead of the loss; with ``--set use_crf=False`` the cross entropy of
each tag by itself. ``--set size=base`` is the published encoder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    intermediate: int


SIZES = {"small": Size(1000, 128, 2, 4, 512), "base": Size(28996, 768, 12, 12, 3072)}

size = "small"
decode = False
use_crf = True
batch_size = 4
seq_length = 32
num_tags = 9
max_positions = 512


class Layer(nn.Module):
    """Attention and a feed-forward part on (B, S, H), normalised after each sum."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.query, self.key, self.value = (nn.Linear(size.hidden, size.hidden) for _ in range(3))
        self.output = nn.Linear(size.hidden, size.hidden)
        self.attention_norm = nn.LayerNorm(size.hidden, eps=1e-12)
        self.expand = nn.Linear(size.hidden, size.intermediate)
        self.contract = nn.Linear(size.intermediate, size.hidden)
        self.output_norm = nn.LayerNorm(size.hidden, eps=1e-12)

    def split(self, x: Tensor) -> Tensor:
        """(B, S, H) to (B, heads, S, H / heads)."""
        return x.view(x.shape[0], x.shape[1], self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1]) + bias
        mixed = torch.matmul(torch.softmax(scores, dim=-1), value)
        mixed = mixed.permute(0, 2, 1, 3).contiguous().view(x.shape)
        x = self.attention_norm(x + self.output(mixed))
        return self.output_norm(x + self.contract(functional.gelu(self.expand(x))))


class Encoder(nn.Module):
    """Encoded words (B, S, H) of word numbers (B, S); ``mask`` (B, S) is true where there is a word."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.word = nn.Embedding(size.vocabulary, size.hidden, padding_idx=0)
        self.position = nn.Embedding(max_positions, size.hidden)
        self.segment = nn.Embedding(2, size.hidden)
        self.norm = nn.LayerNorm(size.hidden, eps=1e-12)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        positions = torch.arange(words.shape[1], device=words.device)
        x = self.word(words) + self.position(positions) + self.segment(torch.zeros_like(words))
        x = self.norm(x)
        bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * -10000.0
        for layer in self.layers:
            x = layer(x, bias)
        return x


class CRF(nn.Module):
    """Linear-chain conditional random field over ``tags``; emissions (B, S, tags), tags and mask (B, S)."""

    def __init__(self, tags: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.empty(tags).uniform_(-0.1, 0.1))
        self.end = nn.Parameter(torch.empty(tags).uniform_(-0.1, 0.1))
        self.transitions = nn.Parameter(torch.empty(tags, tags).uniform_(-0.1, 0.1))

    def forward(self, emissions: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        """The mean negative log likelihood of ``tags``."""
        return (self.log_partition(emissions, mask) - self.path_score(emissions, tags, mask)).mean()

    def path_score(self, emissions: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        kept = mask.to(emissions.dtype)
        words = emissions.gather(2, tags.unsqueeze(2)).squeeze(2) * kept
        moves = self.transitions[tags[:, :-1], tags[:, 1:]] * kept[:, 1:]
        last = tags.gather(1, mask.sum(dim=1, keepdim=True) - 1).squeeze(1)
        return self.start[tags[:, 0]] + words.sum(dim=1) + moves.sum(dim=1) + self.end[last]

    def log_partition(self, emissions: Tensor, mask: Tensor) -> Tensor:
        score = self.start + emissions[:, 0]
        for t in range(1, emissions.shape[1]):
            longer = torch.logsumexp(score.unsqueeze(2) + self.transitions + emissions[:, t].unsqueeze(1), dim=1)
            score = torch.where(mask[:, t].unsqueeze(1), longer, score)
        return torch.logsumexp(score + self.end, dim=1)

    def decode(self, emissions: Tensor, mask: Tensor) -> Tensor:
        """The best tags (B, S), found by Viterbi's algorithm."""
        score = self.start + emissions[:, 0]
        pointers = []
        for t in range(1, emissions.shape[1]):
            best, came_from = (score.unsqueeze(2) + self.transitions).max(dim=1)
            score = torch.where(mask[:, t].unsqueeze(1), best + emissions[:, t], score)
            pointers.append(came_from)
        tag = (score + self.end).argmax(dim=1)
        path = [tag]
        for t in range(len(pointers) - 1, -1, -1):
            previous = pointers[t].gather(1, tag.unsqueeze(1)).squeeze(1)
            tag = torch.where(mask[:, t + 1], previous, tag)
            path.append(tag)
        return torch.stack(path[::-1], dim=1)


class Tagger(nn.Module):
    """The loss of tags (B, S) for words (B, S), or the best tags."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(SIZES[size])
        self.dropout = nn.Dropout(0.1)
        self.emit = nn.Linear(SIZES[size].hidden, num_tags)
        self.crf = CRF(num_tags)

    def forward(self, words: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        emissions = self.emit(self.dropout(self.encoder(words, mask)))
        if not use_crf:
            return functional.cross_entropy(emissions.transpose(1, 2), tags.where(mask, -100))
        return self.crf.decode(emissions, mask) if decode else self.crf(emissions, tags, mask)


def model() -> nn.Module:
    return Tagger()


def example_inputs() -> tuple[Tensor, Tensor, Tensor]:
    lengths = seq_length - torch.arange(batch_size) * (seq_length // (2 * batch_size))
    mask = torch.arange(seq_length) < lengths.unsqueeze(1)
    words = torch.randint(1, SIZES[size].vocabulary, (batch_size, seq_length)) * mask
    return words, torch.randint(0, num_tags, (batch_size, seq_length)), mask
