"""PyTorch's own transformer encoder, whose fast path is one opaque dispatch a layer.

    x = x + attention(norm(x))
    x = x + W_2 gelu(W_1 norm(x))

Vaswani et al., "Attention Is All You Need", NeurIPS 2017; normalised before the products. ``--set masked=True`` gives
a padding mask.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

batch_size = 2
seq_length = 32
hidden_size = 128
num_heads = 4
num_layers = 3
intermediate_size = 512
masked = False


class Encoder(nn.Module):
    """Encoded positions (B, S, H) of embedded ones (B, S, H); ``padding`` (B, S) is true where there is no token."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            hidden_size, num_heads, intermediate_size, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(hidden_size), enable_nested_tensor=False)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


def model() -> nn.Module:
    return Encoder()


def example_inputs() -> tuple[Tensor, ...]:
    x = torch.randn(batch_size, seq_length, hidden_size)
    if not masked:
        return (x,)
    lengths = seq_length - torch.arange(batch_size) * (seq_length // (2 * batch_size))
    return x, torch.arange(seq_length) >= lengths.unsqueeze(1)
