"""A greedy decoder: each step reads the token that the step before chose.

    h = GRU(embedding[token], h);  token = argmax(W h), padding after the end

Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine Translation", 2014; the
state comes from an encoder.
"""

import torch
from torch import nn

batch_size = 4
longest = 64
vocabulary = 500
embedding_size = 64
hidden_size = 128
begin_token, end_token, padding_token = 1, 2, 0


class GreedyDecoder(nn.Module):
    def __init__(self, vocabulary, embedding_size, hidden_size, longest):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding_size)
        self.cell = nn.GRUCell(embedding_size, hidden_size)
        self.to_scores = nn.Linear(hidden_size, vocabulary)
        self.longest = longest

    def forward(self, h):
        """``h``: batch, hidden. Returns tokens and their log-probabilities: batch, time."""
        token = torch.full((h.shape[0],), begin_token)
        ended = torch.zeros(h.shape[0], dtype=torch.bool)
        tokens, likelihoods = [], []
        for _ in range(self.longest):
            h = self.cell(self.embedding(token), h)
            likelihood, chosen = torch.log_softmax(self.to_scores(h), dim=1).max(dim=1)
            token = torch.where(ended, padding_token, chosen)
            tokens.append(token)
            likelihoods.append(torch.where(ended, 0.0, likelihood))
            ended = ended | (token == end_token)
        return torch.stack(tokens, dim=1), torch.stack(likelihoods, dim=1)


def model():
    return GreedyDecoder(vocabulary, embedding_size, hidden_size, longest)


def example_inputs():
    return (torch.randn(batch_size, hidden_size),)
