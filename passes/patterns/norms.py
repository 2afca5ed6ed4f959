"""Norms that models write out, and norms with the operators beside them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuse.rewrite.patterns.definition import Failure, Match
from fuse.rewrite.patterns.language import const
from fuse.rewrite.patterns.registry import pattern


@pattern(enabled=False)
class RmsNorm:
    """A row divided by the root of its mean square, times a weight.

    Source: NVIDIA/TensorRT-LLM, tensorrt_llm/_torch/auto_deploy/transform/library/rms_norm.py.
    """

    def pattern(self, x: Tensor, weight: Tensor) -> Any:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + const("eps", 1e-6)))


@pattern(enabled=False)
class AddRmsNorm:
    """An RMS norm of a sum that the next residual connection also reads.

    Source: vllm-project/vllm, vllm/model_executor/layers/layernorm.py.
    """

    def pattern(self, x: Tensor, skip: Tensor, weight: Tensor) -> Any:
        total = x + skip
        scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + const("eps", 1e-6))
        return weight * (total * scale), total

    def examples(self) -> Any:
        return torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8)


@pattern(enabled=False)
class GemmaRmsNorm:
    """An RMS norm whose weight is an offset from one.

    Source: vllm-project/vllm, vllm/model_executor/layers/layernorm.py.
    """

    def pattern(self, x: Tensor, weight: Tensor) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + const("eps", 1e-6)) * (1 + weight)


@pattern(enabled=False, finite=True)
class LayerNormWrittenOut:
    """A layer norm written with means, as in the Annotated Transformer and BERT's first code.

    Source: microsoft/onnxruntime, onnxruntime/core/optimizer/layer_norm_fusion.cc.
    """

    def pattern(self, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        return weight * (centred / torch.sqrt(variance + const("eps", 1e-5))) + bias

    def check(self, m: Match) -> Failure | None:
        rows, weights = m["x"].meta["val"].shape[-1:], {m[name].meta["val"].shape for name in ("weight", "bias")}
        return None if weights == {rows} else m.fail("weight and bias are not one row", m["weight"])

    def replace(self, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return F.layer_norm(x, x.shape[-1:], weight, bias, const("eps"))


@pattern(enabled=False)
class SkipLayerNorm:
    """A layer norm of a sum that nothing else reads.

    Source: microsoft/onnxruntime, onnxruntime/python/tools/transformers/fusion_skiplayernorm.py.
    """

    def pattern(self, x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return F.layer_norm(x + skip, weight.shape, weight, bias, const("eps", 1e-5))

    def examples(self) -> Any:
        return torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8), torch.randn(8)


@pattern(enabled=False)
class BiasSkipLayerNorm:
    """A layer norm of the sum of a product's bias, the product and the residual.

    Source: microsoft/onnxruntime, onnxruntime/core/optimizer/bias_skip_layer_norm_fusion.cc.
    """

    def pattern(self, x: Tensor, linear: Tensor, skip: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return F.layer_norm(x + linear + skip, weight.shape, weight, bias, const("eps", 1e-5))

    def examples(self) -> Any:
        return torch.randn(2, 3, 8), torch.randn(8), torch.randn(2, 3, 8), torch.randn(8), torch.randn(8)


@pattern(enabled=False)
class DropoutAddLayerNorm:
    """Dropout with its mask as an argument, then the residual and the layer norm.

    Source: Dao-AILab/flash-attention, flash_attn/ops/layer_norm.py.
    """

    def pattern(self, x: Tensor, kept: Tensor, skip: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return F.layer_norm(x * kept / const("share", 0.9) + skip, weight.shape, weight, bias, const("eps", 1e-5))

    def examples(self) -> Any:
        rows = torch.randn(2, 3, 8)
        return rows, (rows > 0).float(), torch.randn(2, 3, 8), torch.randn(8), torch.randn(8)


@pattern(enabled=False)
class GroupNormSilu:
    """A group norm followed by a SiLU, as in the blocks of a diffusion U-Net.

    Source: NVIDIA/apex, apex/contrib/group_norm/group_norm.py.
    """

    def pattern(self, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return F.silu(F.group_norm(x, const("groups", 2), weight, bias, const("eps", 1e-5)))

    def examples(self) -> Any:
        return torch.randn(2, 8, 4, 4), torch.randn(8), torch.randn(8)


@pattern(enabled=False, finite=True)
class MeanVarianceNorm:
    """An instance norm: an image minus its mean, divided by its deviation, per channel.

    Source: openvinotoolkit/openvino,
    src/common/transformations/src/transformations/common_optimizations/mvn_fusion.cpp.
    """

    def pattern(self, x: Tensor) -> Any:
        centred = x - x.mean((2, 3), keepdim=True)
        return centred / torch.sqrt(centred.pow(2).mean((2, 3), keepdim=True) + const("eps", 1e-5))

    def replace(self, x: Tensor) -> Any:
        return F.instance_norm(x, eps=const("eps"))

    def examples(self) -> Any:
        return (torch.randn(2, 3, 4, 5),)


@pattern(enabled=False)
class L2Norm:
    """A row divided by its length, which is at least a small number.

    Source: NVIDIA/TensorRT-LLM, tensorrt_llm/_torch/auto_deploy/transform/library/l2_norm.py.
    """

    def pattern(self, x: Tensor) -> Any:
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + const("eps", 1e-6))
