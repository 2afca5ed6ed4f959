"""ALBERT: a transformer encoder whose layers all share one set of weights, with a head for one of two tasks.

    e = layer_norm(word[ids] + position + segment[types])        size E, smaller than H
    x = W e                                                      factorised embedding: E to H
    x = layer_norm(x + W_o attention(x, mask))                   the same layer, L times,
    x = layer_norm(x + W_2 gelu(W_1 x))                          normalised after each sum

    question answering:  start, end = W x, a score for each position
    classification:      W tanh(W_p x[first])

Lan et al., "ALBERT: A Lite BERT for Self-supervised Learning of Language Representations", ICLR 2020. As in the
implementations in use, attention is written out, gelu is its tanh form in single operators, and every layer casts the
attention mask anew and turns it into 0 or -10000: the small operators, and the cast, that a platform has to deal with.

``--set size=base`` and ``--set size=large`` are the published sizes, ``--set task=classification`` is the other head.

With ``--set packed=True`` several texts share a row, and the mask holds the number of each token's text, which sees
itself only. Every layer casts these numbers to the dtype of its input, where neighbours become equal in bfloat16: the
fault that ``fuse precision`` is to name. ``--set cast_in_layers=False`` is the model mended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    embedding: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int


SIZES = {
    "small": Size(embedding=64, hidden=128, layers=3, heads=4, intermediate=512, vocabulary=1000),
    "base": Size(embedding=128, hidden=768, layers=12, heads=12, intermediate=3072, vocabulary=30000),
    "large": Size(embedding=128, hidden=1024, layers=24, heads=16, intermediate=4096, vocabulary=30000),
}

task = "question_answering"
size = "small"
batch_size = 2
seq_length = 32
embedding_size = SIZES[size].embedding
hidden_size = SIZES[size].hidden
num_layers = SIZES[size].layers
num_heads = SIZES[size].heads
intermediate_size = SIZES[size].intermediate
vocab_size = SIZES[size].vocabulary
max_positions = 512
num_segments = 2
num_classes = 2
norm_epsilon = 1e-12
packed = False
cast_in_layers = True
text_length = 8
first_text = 30001


def gelu(x: Tensor) -> Tensor:
    """The tanh form of gelu, one operator at a time."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Embeddings(nn.Module):
    """Token and segment numbers, both (B, S), to vectors (B, S, H)."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(vocab_size, embedding_size, padding_idx=0)
        self.position = nn.Embedding(max_positions, embedding_size)
        self.segment = nn.Embedding(num_segments, embedding_size)
        self.norm = nn.LayerNorm(embedding_size, eps=norm_epsilon)
        self.to_hidden = nn.Linear(embedding_size, hidden_size)
        self.register_buffer("positions", torch.arange(max_positions), persistent=False)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        positions = self.positions[: input_ids.shape[1]]
        embedded = self.word(input_ids) + self.segment(token_type_ids) + self.position(positions)
        return self.to_hidden(self.norm(embedded))


def of_other_texts(texts: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether query and key (B, 1, S, S) are of different texts; ``texts`` (B, S) holds the number of each token's."""
    if cast_in_layers:
        texts = texts.to(dtype)
    return texts[:, None, :, None] != texts[:, None, None, :]


class Attention(nn.Module):
    """Multi-head self-attention on (B, S, H), written out; the mask (B, S) is 1 for tokens and 0 for padding."""

    def __init__(self) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} is no multiple of num_heads {num_heads}")
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, S, H) to (B, heads, S, H / heads)."""
        batch, length, _ = x.shape
        return x.view(batch, length, num_heads, hidden_size // num_heads).transpose(1, 2)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        query, key, value = (self.split_heads(project(x)) for project in (self.query, self.key, self.value))
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(hidden_size // num_heads)
        if packed:
            scores = scores.masked_fill(of_other_texts(attention_mask, x.dtype), -10000.0)
        else:
            mask = attention_mask[:, None, None, :].to(x.dtype)
            scores = scores + (1.0 - mask) * -10000.0
        context = torch.matmul(torch.softmax(scores, dim=-1), value)
        return self.output(context.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and feed-forward on (B, S, H), each added to its input and then normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.attention_norm = nn.LayerNorm(hidden_size, eps=norm_epsilon)
        self.expand = nn.Linear(hidden_size, intermediate_size)
        self.contract = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=norm_epsilon)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x, attention_mask))
        return self.output_norm(x + self.contract(gelu(self.expand(x))))


class Encoder(nn.Module):
    """Embeddings, then the one layer, ``num_layers`` times."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.layer = Layer()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        x = self.embeddings(input_ids, token_type_ids)
        for _ in range(num_layers):
            x = self.layer(x, attention_mask)
        return x


class QuestionAnswering(nn.Module):
    """Scores of every position, (B, S) each, to be the answer's first and its last token."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.span = nn.Linear(hidden_size, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> dict[str, Tensor]:
        scores = self.span(self.encoder(input_ids, attention_mask, token_type_ids))
        start, end = scores.unbind(dim=-1)
        return {"start_logits": start, "end_logits": end}


class Classification(nn.Module):
    """Scores (B, classes) of the whole text, from its first token."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.pooler = nn.Linear(hidden_size, hidden_size)
        self.classifier = nn.Linear(hidden_size, num_classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        x = self.encoder(input_ids, attention_mask, token_type_ids)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


HEADS = {"question_answering": QuestionAnswering, "classification": Classification}


def model() -> nn.Module:
    return HEADS[task]()


def example_inputs() -> dict[str, Tensor]:
    """Random tokens; the first half is one segment, the second the other, and the last quarter of every row but the
    first is padding."""
    real_tokens = torch.ones(batch_size, seq_length, dtype=torch.int64)
    real_tokens[1:, seq_length - seq_length // 4 :] = 0
    if packed:
        real_tokens = first_text + torch.arange(batch_size * seq_length).view(batch_size, seq_length) // text_length
    second_segment = (torch.arange(seq_length) >= seq_length // 2).to(torch.int64)
    return {
        "input_ids": torch.randint(1, vocab_size, (batch_size, seq_length)) * (real_tokens > 0),
        "attention_mask": real_tokens,
        "token_type_ids": second_segment.repeat(batch_size, 1),
    }
