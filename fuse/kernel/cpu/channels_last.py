"""Tiling of a channels-last convolution: tiles of a few output pixels times blocks of output channels.

    conv2d(x, w, padding=1)     ->     for images, some output rows, parts of the output channels (threads):
                                           field = the rows of x that they read, with zeros for padding
                                           for blocks of 64 output channels, tiles of 6 pixels:
                                               sums = {field from each tap on}[pixels] @ w[taps, block]

``channels_last.h`` has these loops. The weight is the right operand of the product. It is packed in the call, or before
it (``freeze=True``), and then read in place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fuse.kernel.config import Config, by_cost
from fuse.kernel.cpu.product_frame import (
    ALIGNMENT,
    HEADERS,
    PANEL,
    Operand,
    ProductFrame,
    Right,
    Tiling,
    aligned,
    halves,
    threads_for,
    window_text,
)
from fuse.kernel.values import PatchRows, Product

LARGEST_FIELD = 256 * 1024
"""Most bytes that a thread copies of an image at once; they share the L2 cache with a block of weights."""
SCHEDULE = (
    "rows of the padded image, blocks of output channels, tiles of output pixels, no im2col matrix; the operators "
    "after the convolution run on each tile while it is in cache"
)
PIXELS_AT_ONCE = 6
"""Output pixels of a tile, whose sums fill the vector registers."""
VECTORS_A_CYCLE = 0.5
"""Vectors copied in the time of one vector multiply-add."""


@dataclass(frozen=True)
class ChannelsLastShare:
    """The work of one task: this number of output rows, for one of ``splits`` parts of the output channels."""

    rows: int
    splits: int


@dataclass(frozen=True)
class ConvolutionCosts:
    """Predicted costs of a convolution, by share. The output channels are ``blocks`` of ``width``.

    ``in_place``: the image is read in place, without a copy.

    >>> import torch
    >>> from fuse.kernel.values import Input
    >>> image = Input((1, 64, 56, 56), torch.float32, 0, (64 * 3136, 1, 56 * 64, 64))
    >>> patches = PatchRows((1, 3136, 576), torch.float32, image, (3, 3), (56, 56), (1, 1), (1, 1), (1, 1))
    >>> ConvolutionCosts(patches, blocks=1, width=64).best(threads=2)
    ChannelsLastShare(rows=14, splits=1)
    """

    patches: PatchRows
    blocks: int
    width: int
    in_place: bool = False

    def seen(self, rows: int) -> tuple[int, int]:
        """Rows and columns of the padded image that this number of output rows reads."""
        p = self.patches
        extents = zip((rows, p.output_size[1]), p.stride, p.taps, p.dilation, strict=True)
        down, across = ((extent - 1) * s + (t - 1) * d + 1 for extent, s, t, d in extents)
        return down, across

    def numbers(self, rows: int) -> int:
        """Elements of the field for this number of output rows; 0 if the image is read in place."""
        return 0 if self.in_place else math.prod(self.seen(rows)) * self.patches.source.shape[1]

    def tasks(self, share: ChannelsLastShare) -> int:
        """Number of shares in all images."""
        return self.patches.source.shape[0] * -(-self.patches.output_size[0] // share.rows) * share.splits

    def cycles(self, share: ChannelsLastShare, threads: int) -> float:
        """Predicted cycles of the busiest thread: its multiply-adds, one vector a cycle, and its copies."""
        tasks = -(-self.tasks(share) // threads)
        tiles = -(-share.rows * self.patches.output_size[1] // PIXELS_AT_ONCE) * PIXELS_AT_ONCE
        multiplied = tiles * -(-self.blocks // share.splits) * self.width // PANEL * self.patches.shape[2]
        return tasks * multiplied + -(-tasks // share.splits) * self.numbers(share.rows) / PANEL / VECTORS_A_CYCLE

    def best(self, threads: int, rank: int = 0) -> ChannelsLastShare:
        """The share with this rank by predicted cycles, among those whose field stays in the cache."""
        rows = halves(self.patches.output_size[0])
        itemsize = self.patches.dtype.itemsize
        rows = [number for number in rows if self.numbers(number) * itemsize <= LARGEST_FIELD] or rows[-1:]
        splits = [number for number in (1, 2, 4, 8) if number <= self.blocks]
        if self.patches.by_channel:  # the weight is large: each block is packed for as many places as possible
            splits = [self.blocks]
        shares = [ChannelsLastShare(number, parts) for number in rows for parts in splits]
        return by_cost(shares, lambda share: self.cycles(share, threads), rank)


def tiling(product: Product, image: Operand, right: Right, frame: ProductFrame, config: Config) -> Tiling:
    """The tiling of a convolution of ``image`` with the weights ``right`` [taps * channels, outputs]."""
    patches = product.left
    assert isinstance(patches, PatchRows)
    width, itemsize, outputs = right.panels * PANEL, product.dtype.itemsize, product.shape[2]
    images, channels, height, across = patches.source.shape
    in_place = patches.by_channel or (
        not any(patches.padding) and image.strides[1] == 1 and image.strides[3] == channels
    )
    of = ConvolutionCosts(patches, -(-outputs // width), width, in_place)
    threads = threads_for(math.prod(patches.shape) * outputs, of.tasks(ChannelsLastShare(1, of.blocks)), config)
    share = of.best(threads, config.share)
    threads = min(threads, of.tasks(share))
    field = aligned(of.numbers(share.rows) * itemsize)
    sizes = ", ".join(map(str, (images, channels, outputs, height, across, *image.strides)))
    how = f"{window_text(patches)}, {share.rows}, {int(patches.by_channel)}"
    lines = [
        f"    const fuse_channel_window window = {{{sizes}, {how}}};",
        f"    const {right.text};",
        f"    fuse_places(fuse_panels_{right.panels}, {image.text}, window, right, {share.splits},",
        f"                       {frame.workspace}, {threads}, {field}, {right.block_bytes},",
    ]
    memory = threads * (field + right.block_bytes) + ALIGNMENT
    return Tiling(lines, memory, threads, SCHEDULE, (*HEADERS, "channels_last.h"))
