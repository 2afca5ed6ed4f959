"""RNNSearch: machine translation with a bidirectional GRU encoder and an attention GRU decoder, loops in plain Python.

    forwards, backwards = GRUs over the source; annotations = [forwards | backwards]
    e = v tanh(W_s s + U annotations)            a score for each source position
    context = softmax(e, padding left out) annotations
    s = GRU([embedding of the last word | context], s)
    next word from maxout([s | embedding | context])

Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly Learning to Align and Translate", ICLR 2015.
With ``--set decode=greedy`` the decoder reads the words it chose itself instead of the reference (teacher forcing);
``--set size=published`` is the paper's size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    vocabulary: int
    embedding: int
    hidden: int
    maxout: int


SIZES = {"small": Size(500, 64, 96, 48), "published": Size(30000, 620, 1000, 500)}

size = "small"
decode = "teacher"  # or "greedy"
batch_size = 4
source_length = 20
target_length = 18
begin_token = 1


class Cell(nn.Module):
    """A GRU step: input (B, I) and state (B, H) to the next state."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.from_input = nn.Linear(inputs, 3 * hidden)
        self.from_state = nn.Linear(hidden, 3 * hidden)

    def forward(self, x: Tensor, s: Tensor) -> Tensor:
        reset_x, update_x, new_x = self.from_input(x).chunk(3, dim=1)
        reset_s, update_s, new_s = self.from_state(s).chunk(3, dim=1)
        reset = torch.sigmoid(reset_x + reset_s)
        update = torch.sigmoid(update_x + update_s)
        new = torch.tanh(new_x + reset * new_s)
        return (1 - update) * new + update * s


class Encoder(nn.Module):
    """Annotations (B, S, 2H) of source words (B, S); ``mask`` (B, S) is true where there is a word."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.hidden = size.hidden
        self.embedding = nn.Embedding(size.vocabulary, size.embedding)
        self.forwards = Cell(size.embedding, size.hidden)
        self.backwards = Cell(size.embedding, size.hidden)

    def forward(self, source: Tensor, mask: Tensor) -> Tensor:
        words = self.embedding(source)
        positions = range(source.shape[1])
        read = self.read(self.forwards, words, mask, positions)
        back = self.read(self.backwards, words, mask, reversed(positions))[::-1]
        return torch.cat([torch.stack(read, dim=1), torch.stack(back, dim=1)], dim=2)

    def read(self, cell: Cell, words: Tensor, mask: Tensor, positions) -> list[Tensor]:
        s = words.new_zeros(words.shape[0], self.hidden)
        states = []
        for t in positions:
            s = torch.where(mask[:, t : t + 1], cell(words[:, t], s), s)
            states.append(s)
        return states


class Decoder(nn.Module):
    """Scores (B, T, vocabulary) of the next words, and the attention (B, T, S) paid to the source."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.embedding)
        self.first_state = nn.Linear(size.hidden, size.hidden)
        self.query = nn.Linear(size.hidden, size.hidden, bias=False)
        self.key = nn.Linear(2 * size.hidden, size.hidden)
        self.score = nn.Linear(size.hidden, 1, bias=False)
        self.cell = Cell(size.embedding + 2 * size.hidden, size.hidden)
        self.to_maxout = nn.Linear(3 * size.hidden + size.embedding, 2 * size.maxout)
        self.to_words = nn.Linear(size.maxout, size.vocabulary)

    def forward(self, annotations: Tensor, mask: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        hidden = annotations.shape[2] // 2
        s = torch.tanh(self.first_state(annotations[:, 0, hidden:]))
        keys = self.key(annotations)
        word = torch.full_like(target[:, 0], begin_token)
        scores, attentions = [], []
        for t in range(target.shape[1]):
            embedded = self.embedding(word)
            energy = self.score(torch.tanh(self.query(s).unsqueeze(1) + keys)).squeeze(2)
            attention = torch.softmax(energy.masked_fill(~mask, float("-inf")), dim=1)
            context = torch.bmm(attention.unsqueeze(1), annotations).squeeze(1)
            s = self.cell(torch.cat([embedded, context], dim=1), s)
            pairs = self.to_maxout(torch.cat([s, embedded, context], dim=1))
            best = pairs.view(pairs.shape[0], -1, 2).max(dim=2).values
            score = self.to_words(best)
            word = target[:, t] if decode == "teacher" else score.argmax(dim=1)
            scores.append(score)
            attentions.append(attention)
        return torch.stack(scores, dim=1), torch.stack(attentions, dim=1)


class RNNSearch(nn.Module):
    """Source words (B, S), their mask and target words (B, T) to scores of target words and the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(SIZES[size])
        self.decoder = Decoder(SIZES[size])

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.decoder(self.encoder(source, mask), mask, target)


def model() -> nn.Module:
    return RNNSearch()


def example_inputs() -> tuple[Tensor, Tensor, Tensor]:
    words = SIZES[size].vocabulary
    lengths = source_length - torch.arange(batch_size) % (source_length // 2)
    mask = torch.arange(source_length) < lengths.unsqueeze(1)
    source = torch.randint(2, words, (batch_size, source_length)) * mask
    return source, mask, torch.randint(2, words, (batch_size, target_length))
