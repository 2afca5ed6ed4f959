"""Eight-bit numbers around a product, and low-rank products beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuse.rewrite.patterns.language import const
from fuse.rewrite.patterns.registry import pattern


@pattern(enabled=False, finite=True)
class FakeQuantise:
    """Numbers rounded to eight bits and back.

    Source: openvinotoolkit/openvino,
    src/common/transformations/src/transformations/common_optimizations/convert_quantize_dequantize.cpp.
    """

    def pattern(self, x: Tensor) -> Any:
        return torch.clamp(torch.round(x * const("inverse", 32.0)), -128, 127) * const("scale", 0.03125)


@pattern(enabled=False)
class DynamicQuantise:
    """A row rounded to eight bits, and its scale, taken from the row's largest number.

    Source: microsoft/onnxruntime, onnxruntime/core/optimizer/dynamic_quantize_matmul_fusion.cc.
    """

    def pattern(self, x: Tensor) -> Any:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
        return torch.round(x / scale).to(torch.int8), scale


@pattern(enabled=False)
class DequantisedProduct:
    """A product with a weight of eight bits, then scaled by column.

    Source: pytorch/pytorch, torch/_inductor/fx_passes/quantization.py.
    """

    def pattern(self, x: Tensor, weight: Tensor, scale: Tensor) -> Any:
        return x @ weight.to(x.dtype).t() * scale

    def examples(self) -> Any:
        return torch.randn(4, 8), torch.randint(-128, 127, (6, 8)).to(torch.int8), torch.rand(6)


@pattern(enabled=False)
class RmsNormQuantise:
    """An RMS norm rounded to eight bits.

    Source: NVIDIA/TensorRT-LLM, tensorrt_llm/_torch/auto_deploy/transform/library/fuse_rmsnorm_quant_fp8.py.
    """

    def pattern(self, x: Tensor, weight: Tensor, scale: Tensor) -> Any:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + const("eps", 1e-6)) * weight
        return torch.clamp(torch.round(normed / scale), -128, 127).to(torch.int8)

    def examples(self) -> Any:
        return torch.randn(4, 8), torch.randn(8), torch.rand(1) + 0.1


@pattern(enabled=False)
class LowRankSum:
    """A product plus a scaled low-rank product (LoRA).

    Source: openvinotoolkit/openvino,
    src/common/transformations/src/transformations/common_optimizations/lora_subgraph_fusion.cpp.
    """

    def pattern(self, x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Any:
        return x @ weight + x @ down @ up * const("scale", 2.0)

    def examples(self) -> Any:
        return torch.randn(5, 8), torch.randn(8, 6), torch.randn(8, 2), torch.randn(2, 6)
