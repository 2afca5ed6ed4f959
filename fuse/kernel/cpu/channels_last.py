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

from fuse.kernel.config import Config
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
from fuse.kernel.cpu.windows import Convolution, Share
from fuse.kernel.values import PatchRows, Product

LARGEST_FIELD = 256 * 1024
"""Most bytes that a thread copies of an image at once; they share the L2 cache with a block of weights."""
SCHEDULE = (
    "rows of the padded image, blocks of output channels, tiles of output pixels, no im2col matrix; the operators "
    "after the convolution run on each tile while it is in cache"
)
PIXELS_AT_ONCE = 6
"""Output pixels of a tile, whose sums fill the vector registers."""
COPY_CYCLES = 2
"""Cycles that the copy of a vector takes; a vector multiply-add takes one."""


@dataclass(frozen=True)
class ChannelsLastConvolution(Convolution):
    """A convolution of which a task computes whole output rows. The output channels are computed in blocks of
    ``width``.

    ``in_place``: the image is read in place, without a copy.

    >>> import torch
    >>> from fuse.kernel.values import Input
    >>> image = Input((1, 64, 56, 56), torch.float32, 0, (64 * 3136, 1, 56 * 64, 64))
    >>> patches = PatchRows((1, 3136, 576), torch.float32, image, (3, 3), (56, 56), (1, 1), (1, 1), (1, 1))
    >>> ChannelsLastConvolution(patches, outputs=64, width=64).best(threads=2)
    Share(rows=14, columns=56, splits=1)
    """

    patches: PatchRows
    width: int
    in_place: bool = False

    @property
    def blocks(self) -> int:
        return -(-self.outputs // self.width)

    def numbers(self, share: Share) -> int:
        """Elements of one channel of the padded image that a share reads; 0 if the image is read in place."""
        p = self.patches
        extents = zip((share.rows, share.columns), p.stride, p.taps, p.dilation, strict=True)
        seen = math.prod((extent - 1) * s + (t - 1) * d + 1 for extent, s, t, d in extents)
        return 0 if self.in_place else seen

    def cycles(self, share: Share, threads: int) -> int:
        """Predicted cycles of the busiest thread: its multiply-adds, one vector a cycle, and its copies."""
        tasks = -(-self.tasks(share) // threads)
        tiles = -(-share.rows * share.columns // PIXELS_AT_ONCE) * PIXELS_AT_ONCE
        multiplied = tiles * -(-self.blocks // share.splits) * self.width // PANEL * self.patches.shape[2]
        copied = self.channels * self.numbers(share) * COPY_CYCLES // PANEL
        return tasks * multiplied + -(-tasks // share.splits) * copied

    def shares(self) -> list[Share]:
        """Candidate shares whose part of the image stays in the cache; the smallest ones if none do."""
        down, across = self.patches.output_size
        splits = self.splits()
        shares = [Share(rows, across, number) for rows in halves(down) for number in splits]
        return [share for share in shares if self.bytes_of_planes(share) <= LARGEST_FIELD] or shares[-len(splits) :]

    def splits(self) -> list[int]:
        """Numbers of parts that the output channels may be split into."""
        if self.patches.by_channel:  # the weight is large: each block is packed for as many places as possible
            return [self.blocks]
        return [splits for splits in (1, 2, 4, 8) if splits <= self.blocks]


def tiling(product: Product, image: Operand, right: Right, frame: ProductFrame, config: Config) -> Tiling:
    """The tiling of a convolution of ``image`` with the weights ``right`` [taps * channels, outputs]."""
    patches = product.left
    assert isinstance(patches, PatchRows)
    width, outputs = right.panels * PANEL, product.shape[2]
    images, channels, height, across = patches.source.shape
    in_place = patches.by_channel or (
        not any(patches.padding) and image.strides[1] == 1 and image.strides[3] == channels
    )
    of = ChannelsLastConvolution(patches, outputs, width, in_place)
    tasks = of.tasks(Share(1, patches.output_size[1], of.blocks))
    threads = threads_for(math.prod(patches.shape) * outputs, tasks, config)
    share = of.best(threads, config.share)
    threads = min(threads, of.tasks(share))
    field = aligned(of.bytes_of_planes(share))
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
