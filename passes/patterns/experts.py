"""Routing of tokens to experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuse.rewrite.patterns.language import const
from fuse.rewrite.patterns.registry import pattern


@pattern(enabled=False, finite=True)
class TopExperts:
    """The renormalised probabilities of the likeliest experts: a softmax over their logits alone.

    Source: NVIDIA/TensorRT-LLM, tensorrt_llm/_torch/auto_deploy/transform/library/moe_routing.py.
    """

    def pattern(self, logits: Tensor) -> Any:
        weights, chosen = torch.topk(torch.softmax(logits, -1), const("experts", 2), -1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def replace(self, logits: Tensor) -> Any:
        weights, chosen = torch.topk(logits, const("experts"), -1)
        return torch.softmax(weights, -1), chosen

    def examples(self) -> Any:
        return (torch.randn(5, 8),)


@pattern(enabled=False)
class BiasedExperts:
    """Experts chosen by corrected sigmoids and weighted by uncorrected ones, as in DeepSeek-V3.

    Source: vllm-project/vllm, vllm/model_executor/layers/fused_moe/fused_moe.py.
    """

    def pattern(self, logits: Tensor, correction: Tensor) -> Any:
        scores = torch.sigmoid(logits)
        chosen = torch.topk(scores + correction, const("experts", 2), -1)[1]
        weights = scores.gather(-1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen

    def examples(self) -> Any:
        return torch.randn(5, 8), torch.randn(8)
