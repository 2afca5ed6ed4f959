"""MobileNetV2: inverted residual blocks of cheap convolutions.

    y = relu6(bn(conv1x1(x)))                    widen
    y = relu6(bn(depthwise3x3(y)))               filter each channel by itself
    x = x + bn(conv1x1(y))                       narrow, no activation; the sum where the sizes agree

Sandler, Howard, Zhu, Zhmoginov and Chen, "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018, table 2.
By default the images are small; ``--set image_size=224`` is the published size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

batch_size = 1
image_size = 64
num_classes = 1000
stages = (  # expansion, channels, blocks, stride of the first
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
first_channels = 32
last_channels = 1280


def convolution(channels: int, width: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, batch normalisation, relu6."""
    padding = (kernel - 1) // 2
    conv = nn.Conv2d(channels, width, kernel, stride, padding, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU6(inplace=True))


class InvertedResidual(nn.Module):
    """Widen, filter, narrow: (N, C, H, W) to (N, width, H / stride, W / stride)."""

    def __init__(self, channels: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        self.adds = stride == 1 and channels == width
        hidden = channels * expansion
        widen = [] if expansion == 1 else [convolution(channels, hidden)]
        self.layers = nn.Sequential(
            *widen,
            convolution(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


class MobileNetV2(nn.Module):
    """Class scores (N, classes) of images (N, 3, size, size)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [convolution(3, first_channels, 3, 2)]
        channels = first_channels
        for expansion, width, blocks, stride in stages:
            for number in range(blocks):
                layers.append(InvertedResidual(channels, width, stride if number == 0 else 1, expansion))
                channels = width
        layers.append(convolution(channels, last_channels))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last_channels, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean([2, 3]))


def model() -> nn.Module:
    return MobileNetV2()


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(batch_size, 3, image_size, image_size),)
