"""Attention in the spellings of published models.

None of these is needed, because the pass ``fuse_attention`` makes one kernel of two products and the operators between
them. A ``replace`` by PyTorch's own attention is given if the two agree for finite values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuse.rewrite.patterns.definition import Failure, Match
from fuse.rewrite.patterns.language import const, many
from fuse.rewrite.patterns.registry import pattern


@pattern(enabled=False, finite=True)
class PlainAttention:
    """softmax(q k^T / c) v.

    Source: pytorch/pytorch, torch/_inductor/fx_passes/fuse_attention.py.
    """

    def pattern(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.softmax(q @ k.mT * const("scale", 0.25), -1) @ v

    def replace(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return F.scaled_dot_product_attention(q, k, v, scale=const("scale"))

    def examples(self) -> Any:
        return _heads()


@pattern(enabled=False)
class BiasedAttention:
    """Attention with a tensor that is added to the scaled scores: a mask, ALiBi's slopes, a window.

    Source: microsoft/onnxruntime, onnxruntime/python/tools/transformers/fusion_attention.py.
    """

    def pattern(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return torch.softmax(q @ k.mT * const("scale", 0.25) + bias, -1) @ v

    def examples(self) -> Any:
        return *_heads(), torch.randn(2, 1, 1, 8)


@pattern(enabled=False)
class UnscaledAttention:
    """Attention of T5: scores that are not scaled, with a learned bias by relative position.

    Source: microsoft/onnxruntime, onnxruntime/python/tools/transformers/onnx_model_t5.py.
    """

    def pattern(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return torch.softmax(q @ k.mT + bias, -1) @ v

    def examples(self) -> Any:
        return *_heads(), torch.randn(1, 4, 8, 8)


@pattern(enabled=False)
class FilledAttention:
    """Attention whose masked scores are filled with a number, as early causal and window masks do.

    Source: pytorch/pytorch, torch/_inductor/fx_passes/fuse_attention.py.
    """

    def pattern(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Any:
        scores = q @ k.mT * const("scale", 0.25)
        return torch.softmax(scores.masked_fill(hidden, const("least", -1e9)), -1) @ v

    def examples(self) -> Any:
        return *_heads(), torch.ones(8, 8).triu(1) > 0


@pattern(enabled=False)
class DroppedAttention:
    """Attention with dropout, whose mask is an argument.

    Source: NVIDIA/apex, apex/contrib/multihead_attn/self_multihead_attn_func.py.
    """

    def pattern(self, q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Any:
        return torch.softmax(q @ k.mT * const("scale", 0.25), -1) * kept @ v

    def examples(self) -> Any:
        return *_heads(), torch.rand(2, 4, 8, 8).round()


@pattern(enabled=False)
class CappedAttention:
    """Attention whose scores are capped by tanh, as in Gemma 2.

    Source: Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py.
    """

    def pattern(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        scores = q @ k.mT * const("scale", 0.25)
        return torch.softmax(torch.tanh(scores * const("inverse", 0.02)) * const("cap", 50.0), -1) @ v

    def examples(self) -> Any:
        return _heads()


@pattern(enabled=False, finite=True)
class GroupedQueryAttention:
    """Attention whose keys and values are repeated for the queries of a group.

    Source: microsoft/onnxruntime, onnxruntime/core/optimizer/group_query_attention_fusion.cc.
    """

    def pattern(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        k, v = (one[:, :, None].expand(-1, -1, q.shape[1] // k.shape[1], -1, -1).reshape(q.shape) for one in (k, v))
        return torch.softmax(q @ k.mT * const("scale", 0.25), -1) @ v

    def check(self, m: Match) -> Failure | None:
        heads = [m[name].meta["val"].shape[1] for name in "qk"]
        return None if heads[0] > heads[1] else m.fail("each query has keys of its own", m["k"])

    def replace(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return F.scaled_dot_product_attention(q, k, v, scale=const("scale"), enable_gqa=True)

    def examples(self) -> Any:
        return torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)


@pattern(enabled=False)
class CachedAttention:
    """Attention over cached keys and values and those of this step, which are returned as the next cache.

    Source: microsoft/onnxruntime, onnxruntime/python/tools/transformers/fusion_bart_attention.py.
    """

    def pattern(self, q: Tensor, keys: Any = many(2), values: Any = many(2)) -> Any:
        k, v = torch.cat(keys, 2), torch.cat(values, 2)
        return torch.softmax(q @ k.mT * const("scale", 0.25), -1) @ v, k, v

    def examples(self) -> Any:
        past, step = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 1, 16)
        return step, [past, step], [past, step]


@pattern(enabled=False)
class LinearAttention:
    """Attention without a softmax: q (k^T v), keys and values first.

    Source: openvinotoolkit/openvino,
    src/common/transformations/src/transformations/common_optimizations/fuse_linear_attention.cpp.
    """

    def pattern(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return q @ (k.mT @ v) / (q @ k.sum(-2, keepdim=True).mT + const("eps", 1e-6))

    def examples(self) -> Any:
        return _heads()


@pattern(enabled=False)
class ScaledMaskedSoftmax:
    """The softmax of attention, with a scale and scores filled by a mask.

    Source: NVIDIA/apex, apex/transformer/functional/fused_softmax.py.
    """

    def pattern(self, scores: Tensor, hidden: Tensor) -> Any:
        return torch.softmax((scores * const("scale", 0.25)).masked_fill(hidden, const("least", -1e4)), -1)

    def examples(self) -> Any:
        return torch.randn(2, 4, 8, 8), torch.rand(2, 1, 8, 8) > 0.5


def _heads() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 16)
