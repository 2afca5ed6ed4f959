"""Positions of tokens: rotary embeddings in their three spellings, and sums of embeddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuse.rewrite.patterns.language import const
from fuse.rewrite.patterns.registry import pattern


@pattern(enabled=False)
class RotaryOfHalves:
    """Rotary embedding that rotates one half of a head with the other half, as in Llama's published code.

    Source: NVIDIA/TensorRT-LLM, tensorrt_llm/_torch/auto_deploy/transform/library/rope.py.
    """

    def pattern(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def examples(self) -> Any:
        return torch.randn(2, 4, 5, 8), torch.randn(5, 8), torch.randn(5, 8)


@pattern(enabled=False)
class RotaryOfPairs:
    """Rotary embedding that rotates neighbouring elements, as in GPT-J and RoFormer.

    Source: Dao-AILab/flash-attention, flash_attn/layers/rotary.py.
    """

    def pattern(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos + turned * sin

    def examples(self) -> Any:
        return torch.randn(2, 4, 5, 8), torch.randn(5, 8), torch.randn(5, 8)


@pattern(enabled=False)
class RotaryOfComplex:
    """Rotary embedding as a product of complex numbers, replaced by real ones: kernels have no complex numbers.

    Source: NVIDIA/TensorRT-LLM, tensorrt_llm/_torch/auto_deploy/transform/library/rope.py.
    """

    def pattern(self, x: Tensor, turn: Tensor) -> Any:
        return torch.view_as_real(torch.view_as_complex(x) * turn).flatten(-2)

    def replace(self, x: Tensor, turn: Tensor) -> Any:
        (a, b), (cos, sin) = x.unbind(-1), torch.view_as_real(turn).unsqueeze(-2).unbind(-1)
        return (x * cos + torch.stack((-b, a), -1) * sin).flatten(-2)

    def examples(self) -> Any:
        return torch.randn(2, 4, 5, 8, 2), torch.polar(torch.ones(5, 8), torch.randn(5, 8))


@pattern(enabled=False)
class EmbeddingLayerNorm:
    """The sum of the embeddings of words and positions, followed by a layer norm.

    Source: microsoft/onnxruntime, onnxruntime/core/optimizer/embed_layer_norm_fusion.cc.
    """

    def pattern(self, ids: Tensor, words: Tensor, at: Tensor, places: Tensor, weight: Tensor, bias: Tensor) -> Any:
        total = F.embedding(ids, words) + F.embedding(at, places)
        return F.layer_norm(total, weight.shape, weight, bias, const("eps", 1e-5))

    def examples(self) -> Any:
        ids, table = torch.randint(5, (2, 3)), torch.randn(5, 8)
        return ids, table, ids, table, torch.randn(8), torch.randn(8)


@pattern(enabled=False)
class AlibiBias:
    """ALiBi: distances times a slope for each head, added to the scores.

    Source: vllm-project/vllm, vllm/model_executor/models/bloom.py.
    """

    def pattern(self, scores: Tensor, slopes: Tensor, places: Tensor) -> Any:
        distance = (places[None, :] - places[:, None]).to(scores.dtype)
        return torch.softmax(scores + slopes[:, None, None] * distance, -1)

    def examples(self) -> Any:
        return torch.randn(2, 4, 8, 8), torch.randn(4), torch.arange(8)
