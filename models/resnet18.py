"""ResNet-18: residual blocks of convolutions with batch normalisation.

    y = relu(bn(conv3x3(x)))                     the first half of a block
    x = relu(bn(conv3x3(y)) + skip(x))           skip: x itself, or bn(conv1x1(x)) where the size changes

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, table 1. By default the images are
small; ``--set image_size=224`` is the published size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

batch_size = 1
image_size = 64
num_classes = 1000
widths = (64, 128, 256, 512)
blocks_per_stage = 2


class Block(nn.Module):
    """Two 3x3 convolutions beside a skip connection: (N, C, H, W) to (N, width, H / stride, W / stride)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.skip: nn.Module | None = None
        if stride != 1 or channels != width:
            self.skip = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.skip is None else self.skip(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """Class scores (N, classes) of images (N, 3, size, size)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        blocks = []
        channels = widths[0]
        for stage, width in enumerate(widths):
            for number in range(blocks_per_stage):
                blocks.append(Block(channels, width, 2 if stage and not number else 1))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        return self.classifier(torch.flatten(self.pool(x), 1))


def model() -> nn.Module:
    return ResNet18()


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(batch_size, 3, image_size, image_size),)
