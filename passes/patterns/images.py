"""Convolutions with the operators that follow, and movement of elements in image models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuse.rewrite.patterns.language import const, either
from fuse.rewrite.patterns.registry import pattern


@pattern(enabled=False)
class ConvBatchNormRelu:
    """A convolution, the batch norm of its running statistics, and a ReLU.

    Source: microsoft/onnxruntime, onnxruntime/core/optimizer/conv_bn_fusion.cc.
    """

    def pattern(self, x: Tensor, kernel: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Any:
        y = F.conv2d(x, kernel, None, const("stride", (1, 1)), const("padding", (1, 1)))
        return torch.relu(F.batch_norm(y, mean, var, weight, bias, False, 0.1, const("eps", 1e-5)))

    def examples(self) -> Any:
        return torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3), *torch.rand(4, 8).unbind()


@pattern(enabled=False)
class ConvBatchNormTrain:
    """A convolution and the batch norm of its result, as in training without running statistics.

    Source: NVIDIA/apex, apex/contrib/groupbn/batch_norm.py.
    """

    def pattern(self, x: Tensor, kernel: Tensor, weight: Tensor, bias: Tensor) -> Any:
        y = F.conv2d(x, kernel, None, const("stride", (1, 1)), const("padding", (1, 1)))
        return torch.relu(F.batch_norm(y, None, None, weight, bias, True, 0.1, const("eps", 1e-5)))

    def examples(self) -> Any:
        return torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3), torch.randn(8), torch.randn(8)


@pattern(enabled=False)
class ConvBiasRelu:
    """A convolution with its bias and a ReLU.

    Source: NVIDIA/apex, apex/contrib/conv_bias_relu/conv_bias_relu.py.
    """

    def pattern(self, x: Tensor, kernel: Tensor, bias: Tensor) -> Any:
        return torch.relu(F.conv2d(x, kernel, bias, const("stride", (1, 1)), const("padding", (1, 1))))

    def examples(self) -> Any:
        return torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3), torch.randn(8)


@pattern(enabled=False)
class ConvAddRelu:
    """A convolution, the sum with a residual, and a ReLU.

    Source: microsoft/onnxruntime, onnxruntime/core/optimizer/conv_add_act_fusion.cc.
    """

    def pattern(self, x: Tensor, kernel: Tensor, bias: Tensor, skip: Tensor) -> Any:
        y = F.conv2d(x, kernel, bias, const("stride", (1, 1)), const("padding", (1, 1)))
        return torch.relu(y + skip)

    def examples(self) -> Any:
        return torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3), torch.randn(8), torch.randn(2, 8, 6, 6)


@pattern(enabled=False)
class SqueezeExcite:
    """An image times a gate, which two small products compute from the image's means.

    Source: huggingface/pytorch-image-models, timm/layers/squeeze_excite.py.
    """

    def pattern(self, x: Tensor, down: Tensor, b: Tensor, up: Tensor, c: Tensor) -> Any:
        hidden = torch.relu(F.conv2d(x.mean((2, 3), keepdim=True), down, b))
        gate = F.conv2d(hidden, up, c)
        return x * either(lambda: torch.sigmoid(gate), lambda: F.hardsigmoid(gate), name="gate")

    def examples(self) -> Any:
        return torch.randn(2, 8, 4, 4), torch.randn(2, 8, 1, 1), torch.randn(2), torch.randn(8, 2, 1, 1), torch.randn(8)


@pattern(enabled=False)
class PixelShuffleRelu:
    """A pixel shuffle, written as a reshape, a permute and a reshape, followed by a ReLU.

    Source: openvinotoolkit/openvino,
    src/common/transformations/src/transformations/common_optimizations/depth_to_space_fusion.cpp.
    """

    def pattern(self, x: Tensor) -> Any:
        return torch.relu(F.pixel_shuffle(x, 2))

    def examples(self) -> Any:
        return (torch.randn(2, 8, 4, 5),)


@pattern(enabled=False)
class ConcatShuffle:
    """The end of a ShuffleNet block: two halves of the channels are concatenated and shuffled.

    Source: openvinotoolkit/openvino,
    src/common/transformations/src/transformations/common_optimizations/shuffle_channels_fusion.cpp.
    """

    def pattern(self, x: Tensor, y: Tensor) -> Any:
        n, c, h, w = x.shape
        return torch.cat((x, y), 1).view(n, 2, c, h, w).transpose(1, 2).reshape(n, 2 * c, h, w)

    def replace(self, x: Tensor, y: Tensor) -> Any:
        return torch.stack((x, y), 2).flatten(1, 2)

    def examples(self) -> Any:
        return torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)


@pattern(enabled=False)
class LayerScaleAdd:
    """A residual plus a branch that is scaled by channel, as in CaiT and ConvNeXt.

    Source: huggingface/pytorch-image-models, timm/layers/layer_scale.py.
    """

    def pattern(self, x: Tensor, branch: Tensor, gamma: Tensor) -> Any:
        return x + branch * gamma

    def examples(self) -> Any:
        return torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.randn(8)
