"""Linear-chain conditional random field: the forward algorithm and Viterbi decoding as plain Python loops.

Lafferty, McCallum and Pereira, "Conditional Random Fields", 2001.
"""

import torch
from torch import nn

batch_size = 16
seq_length = 128
tags = 32
decode = False  # True: best paths by Viterbi; False: the log of the partition function


class CRF(nn.Module):
    def __init__(self, tags):
        super().__init__()
        self.start = nn.Parameter(torch.empty(tags).uniform_(-0.1, 0.1))
        self.end = nn.Parameter(torch.empty(tags).uniform_(-0.1, 0.1))
        self.transitions = nn.Parameter(torch.empty(tags, tags).uniform_(-0.1, 0.1))

    def forward(self, emissions, mask):
        """``emissions``: time, batch, tags; ``mask``: time, batch, true where there is a token."""
        return self.viterbi(emissions, mask) if decode else self.log_partition(emissions, mask)

    def log_partition(self, emissions, mask):
        score = self.start + emissions[0]
        for t in range(1, emissions.shape[0]):
            longer = torch.logsumexp(score.unsqueeze(2) + self.transitions, dim=1) + emissions[t]
            score = torch.where(mask[t].unsqueeze(1), longer, score)
        return torch.logsumexp(score + self.end, dim=1)

    def viterbi(self, emissions, mask):
        score = self.start + emissions[0]
        pointers = []
        for t in range(1, emissions.shape[0]):
            best, came_from = (score.unsqueeze(2) + self.transitions).max(dim=1)
            score = torch.where(mask[t].unsqueeze(1), best + emissions[t], score)
            pointers.append(came_from)
        tag = (score + self.end).argmax(dim=1)
        path = [tag]
        for t in reversed(range(len(pointers))):
            previous = pointers[t].gather(1, tag.unsqueeze(1)).squeeze(1)
            tag = torch.where(mask[t + 1], previous, tag)
            path.append(tag)
        return torch.stack(path[::-1])


def model():
    return CRF(tags)


def example_inputs():
    lengths = torch.arange(batch_size) % seq_length + seq_length // 2
    mask = torch.arange(seq_length).unsqueeze(1) < lengths
    return torch.randn(seq_length, batch_size, tags), mask
