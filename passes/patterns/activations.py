"""Activations that models write out, replaced by PyTorch's operators."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuse.rewrite.patterns.language import const
from fuse.rewrite.patterns.registry import pattern


@pattern(enabled=False, finite=True)
class ErfGelu:
    """GELU written with ``erf``.

    Source: microsoft/onnxruntime, onnxruntime/core/optimizer/gelu_fusion.cc.
    """

    def pattern(self, x: Tensor) -> Any:
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    def replace(self, x: Tensor) -> Any:
        return F.gelu(x)


@pattern(enabled=False, finite=True)
class TanhGelu:
    """GELU by its approximation with ``tanh``, as GPT-2 writes it.

    Source: microsoft/onnxruntime, onnxruntime/core/optimizer/fast_gelu_fusion.cc.
    """

    def pattern(self, x: Tensor) -> Any:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def replace(self, x: Tensor) -> Any:
        return F.gelu(x, approximate="tanh")


@pattern(enabled=False)
class BiasGelu:
    """GELU of a sum with a bias.

    Source: microsoft/onnxruntime, onnxruntime/core/optimizer/bias_gelu_fusion.cc.
    """

    def pattern(self, x: Tensor, bias: Tensor) -> Any:
        return F.gelu(x + bias, approximate=const("approximate", "none"))


@pattern(enabled=False)
class QuickGelu:
    """GELU approximated by a sigmoid, as in CLIP: x * sigmoid(c x).

    Source: microsoft/onnxruntime, onnxruntime/python/tools/transformers/fusion_quickgelu.py.
    """

    def pattern(self, x: Tensor) -> Any:
        return x * torch.sigmoid(x * const("factor", 1.702))


@pattern(enabled=False)
class SquaredRelu:
    """The square of a ReLU, as Primer and Nemotron have it.

    Source: vllm-project/vllm, vllm/model_executor/layers/activation.py.
    """

    def pattern(self, x: Tensor) -> Any:
        return torch.square(torch.relu(x))


@pattern(enabled=False, finite=True)
class HardSwish:
    """x * relu6(x + 3) / 6.

    Source: openvinotoolkit/openvino,
    src/common/transformations/src/transformations/common_optimizations/hswish_fusion.cpp.
    """

    def pattern(self, x: Tensor) -> Any:
        return x * F.relu6(x + 3) / 6

    def replace(self, x: Tensor) -> Any:
        return F.hardswish(x)


@pattern(enabled=False)
class HardSigmoid:
    """relu6(x + 3) / 6. No ``replace``: the gradient of PyTorch's operator has 1 / 6 in float32, even in float64.

    Source: openvinotoolkit/openvino,
    src/common/transformations/src/transformations/common_optimizations/hsigmoid_fusion.cpp.
    """

    def pattern(self, x: Tensor) -> Any:
        return F.relu6(x + 3) / 6


@pattern(enabled=False, finite=True)
class Mish:
    """x * tanh(softplus(x)).

    Source: openvinotoolkit/openvino,
    src/common/transformations/src/transformations/common_optimizations/mish_fusion.cpp.
    """

    def pattern(self, x: Tensor) -> Any:
        return x * torch.tanh(F.softplus(x))

    def replace(self, x: Tensor) -> Any:
        return F.mish(x)


@pattern(enabled=False)
class DynamicTanh:
    """A replacement for layer norm: tanh(alpha x) with a gain and a bias.

    Source: linkedin/Liger-Kernel, src/liger_kernel/ops/dyt.py.
    """

    def pattern(self, x: Tensor, alpha: Tensor, gain: Tensor, bias: Tensor) -> Any:
        return gain * torch.tanh(alpha * x) + bias
