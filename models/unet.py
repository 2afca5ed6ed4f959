"""U-Net: a contracting path, an expanding path, and copies across.

    down:  x = relu(conv3x3(relu(conv3x3(x)))), kept; then max_pool2x2(x)
    up:    x = cat([kept, up_convolution2x2(x)]); x = relu(conv3x3(relu(conv3x3(x))))

Ronneberger, Fischer and Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation", MICCAI 2015. With
padding, so that the segmentation has the size of the image, and batch normalisation, as in the implementations in use.
``--set width=64 --set image_size=512`` is about the published size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

batch_size = 1
image_size = 64
image_channels = 1
num_classes = 2
width = 16
depth = 4


def double_convolution(channels: int, width: int) -> nn.Sequential:
    """Twice: 3x3 convolution, batch normalisation, relu."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Class scores (N, classes, size, size) of each pixel of images (N, channels, size, size)."""

    def __init__(self) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.downs = nn.ModuleList(
            double_convolution(channels, wide)
            for channels, wide in zip([image_channels, *widths], widths, strict=False)
        )
        self.rises = nn.ModuleList(nn.ConvTranspose2d(2 * wide, wide, 2, stride=2) for wide in reversed(widths[:-1]))
        self.ups = nn.ModuleList(double_convolution(2 * wide, wide) for wide in reversed(widths[:-1]))
        self.pool = nn.MaxPool2d(2)
        self.classify = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for down in self.downs[:-1]:
            x = down(x)
            kept.append(x)
            x = self.pool(x)
        x = self.downs[-1](x)
        for rise, up in zip(self.rises, self.ups, strict=True):
            x = up(torch.cat([kept.pop(), rise(x)], dim=1))
        return self.classify(x)


def model() -> nn.Module:
    return UNet()


def example_inputs() -> tuple[Tensor]:
    return (torch.randn(batch_size, image_channels, image_size, image_size),)
