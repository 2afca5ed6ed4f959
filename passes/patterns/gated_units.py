"""Gated linear units: one half of a row times an activation of the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuse.rewrite.patterns.language import const
from fuse.rewrite.patterns.registry import pattern


@pattern(enabled=False)
class GluOfHalves:
    """One half of a tensor times the sigmoid of the other half, written with slices.

    Source: openvinotoolkit/openvino,
    src/common/transformations/src/transformations/common_optimizations/glu_fusion.cpp.
    """

    def pattern(self, x: Tensor) -> Any:
        first, second = x.chunk(2, -1)
        return first * torch.sigmoid(second)


@pattern(enabled=False)
class SiluAndMul:
    """SwiGLU of one product's halves.

    Source: vllm-project/vllm, vllm/model_executor/layers/activation.py.
    """

    def pattern(self, x: Tensor) -> Any:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


@pattern(enabled=False)
class GeluAndMul:
    """GeGLU of one product's halves, with the exact GELU or the one by tanh.

    Source: vllm-project/vllm, vllm/model_executor/layers/activation.py.
    """

    def pattern(self, x: Tensor) -> Any:
        gate, up = x.chunk(2, -1)
        return F.gelu(gate, approximate=const("approximate", "none")) * up


@pattern(enabled=False)
class GatedGelu:
    """GeGLU of two products, as Gemma has it.

    Source: linkedin/Liger-Kernel, src/liger_kernel/ops/geglu.py.
    """

    def pattern(self, gate: Tensor, up: Tensor) -> Any:
        return F.gelu(gate, approximate="tanh") * up


@pattern(enabled=False)
class GatedSilu:
    """SwiGLU of two products, as Llama has it.

    Source: linkedin/Liger-Kernel, src/liger_kernel/ops/swiglu.py.
    """

    def pattern(self, gate: Tensor, up: Tensor) -> Any:
        return F.silu(gate) * up


@pattern(enabled=False)
class BiasSplitGelu:
    """GeGLU of the halves of a sum with a bias, as diffusion models have it.

    Source: microsoft/onnxruntime, onnxruntime/python/tools/transformers/fusion_biassplitgelu.py.
    """

    def pattern(self, x: Tensor, bias: Tensor) -> Any:
        value, gate = (x + bias).chunk(2, -1)
        return value * F.gelu(gate)
