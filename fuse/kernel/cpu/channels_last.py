"""How to walk the places of a convolution whose channels lie side by side: a few places times blocks of outputs.

    conv2d(x, w, padding=1)     ->     for images, some rows of places, parts of the outputs (threads):
                                           field = the rows of x that they see, zeros around them
                                           for blocks of 64 outputs, tiles of 6 places:
                                               sums = {field from each tap on}[places] @ w[taps, block]

``channels_last.h`` does so. The weight is the right operand, as in a product of matrices: packed in the call, or before
it (``freeze=True``), where the weight's own memory is read.
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
    Walk,
    aligned,
    halves,
    threads_for,
    window_text,
)
from fuse.kernel.values import PatchRows, Product

LARGEST_FIELD = 256 * 1024
"""Bytes that a thread copies of an image at once, beside a block of weights in the same cache."""
SCHEDULE = (
    "rows of the padded image, blocks of outputs, tiles of places, no matrix of patches; what is computed from a tile "
    "follows while it is in cache"
)
PLACES_AT_ONCE = 6
"""Places of a tile that fills the registers."""
VECTORS_A_CYCLE = 0.5
"""Vectors that are copied in the time of multiplying one."""


@dataclass(frozen=True)
class ChannelsLastShare:
    """What is walked at once: so many rows of places; the outputs are split in so many parts."""

    rows: int
    splits: int


@dataclass(frozen=True)
class ConvolutionCosts:
    """What the shares of a convolution cost. ``blocks`` of ``width`` outputs are multiplied one after the other;
    ``in_place``: the image is read where it lies.

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
        """Rows and columns of the image, padding included, that so many rows of places see."""
        p = self.patches
        extents = zip((rows, p.output_size[1]), p.stride, p.taps, p.dilation, strict=True)
        down, across = ((extent - 1) * s + (t - 1) * d + 1 for extent, s, t, d in extents)
        return down, across

    def numbers(self, rows: int) -> int:
        """Numbers of the field of so many rows of places; none where the image is read in place."""
        return 0 if self.in_place else math.prod(self.seen(rows)) * self.patches.source.shape[1]

    def tasks(self, share: ChannelsLastShare) -> int:
        """Shares of all images."""
        return self.patches.source.shape[0] * -(-self.patches.output_size[0] // share.rows) * share.splits

    def cycles(self, share: ChannelsLastShare, threads: int) -> float:
        """Of the busiest thread: what it multiplies, a vector a cycle, and what it copies."""
        tasks = -(-self.tasks(share) // threads)
        tiles = -(-share.rows * self.patches.output_size[1] // PLACES_AT_ONCE) * PLACES_AT_ONCE
        multiplied = tiles * -(-self.blocks // share.splits) * self.width // PANEL * self.patches.shape[2]
        return tasks * multiplied + -(-tasks // share.splits) * self.numbers(share.rows) / PANEL / VECTORS_A_CYCLE

    def best(self, threads: int, place: int = 0) -> ChannelsLastShare:
        """The share that takes so many threads the fewest cycles, among those whose field stays in the cache, or that
        in another place among those not far from it."""
        rows = halves(self.patches.output_size[0])
        itemsize = self.patches.dtype.itemsize
        rows = [number for number in rows if self.numbers(number) * itemsize <= LARGEST_FIELD] or rows[-1:]
        splits = [number for number in (1, 2, 4, 8) if number <= self.blocks]
        shares = [ChannelsLastShare(number, parts) for number in rows for parts in splits]
        return by_cost(shares, lambda share: self.cycles(share, threads), place)


def walk(product: Product, image: Operand, right: Right, frame: ProductFrame, one_thread: bool, config: Config) -> Walk:
    """The walk over the tiles of a convolution of ``image``, whose weights are ``right`` [taps * channels, outputs]."""
    patches = product.left
    assert isinstance(patches, PatchRows)
    width, itemsize, outputs = right.panels * PANEL, product.dtype.itemsize, product.shape[2]
    images, channels, height, across = patches.source.shape
    in_place = not any(patches.padding) and image.strides[1] == 1 and image.strides[3] == channels
    of = ConvolutionCosts(patches, -(-outputs // width), width, in_place)
    threads = threads_for(math.prod(patches.shape) * outputs, of.tasks(ChannelsLastShare(1, of.blocks)), one_thread)
    share = of.best(threads, config.share)
    threads = min(threads, of.tasks(share))
    field = aligned(of.numbers(share.rows) * itemsize)
    sizes = ", ".join(map(str, (images, channels, outputs, height, across, *image.strides)))
    lines = [
        f"    const fuse_channel_window window = {{{sizes}, {window_text(patches)}, {share.rows}}};",
        f"    const {right.text};",
        f"    fuse_places(fuse_panels_{right.panels}, {image.text}, window, right, {share.splits},",
        f"                       {frame.workspace}, {threads}, {field}, {right.block_bytes},",
    ]
    memory = threads * (field + right.block_bytes) + ALIGNMENT
    return Walk(lines, memory, threads, SCHEDULE, (*HEADERS, "channels_last.h"))
