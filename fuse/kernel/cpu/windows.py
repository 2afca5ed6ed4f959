"""Tiling of a convolution in contiguous layout: bands of a padded image, blocks of output pixels, tiles of channels.

    conv2d(x, w, padding=1)     ->     for images and groups, some output rows or part of a long one (threads):
                                           planes = the rows of x that they read, zeros between them
                                           for blocks of 64 pixels, tiles of 6 output channels:
                                               sums = w[outputs] @ {planes from each tap on}

``windows.h`` has these loops. An im2col matrix would hold every element of the image once for each tap. The planes hold
it once, and stay in the L2 cache of one core.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fuse.kernel.arithmetic.extents import estimate, larger, smaller, varies
from fuse.kernel.config import Config, by_cost
from fuse.kernel.cpu.product_frame import (
    ALIGNMENT,
    HEADERS,
    MOST_PANELS,
    PANEL,
    Operand,
    ProductFrame,
    Tiling,
    aligned,
    halves,
    threads_for,
    window_text,
)
from fuse.kernel.values import Patches, Product, Value

LARGEST_PLANES = 384 * 1024
"""Most bytes in the planes of one thread, which stay in the L2 cache."""
SCHEDULE = (
    "bands of the padded image, blocks of output pixels, tiles of output channels, no im2col matrix; the operators "
    "after the convolution run on each tile while it is in cache"
)
SHORTEST_PART = 64
"""Fewest pixels of a part of an output row; each part also copies the pixels that its taps read left and right of
it."""
FEW_OUTPUTS = 16
"""Panels that are multiplied together for one float32 output channel, so that their sums fill the registers."""
FEWEST_OUTPUTS = 8
"""Fewest output channels for each thread."""


@dataclass(frozen=True)
class Share:
    """The work of one task: output ``rows``, or ``columns`` of one row, for one of ``splits`` parts of the channels."""

    rows: int
    columns: int
    splits: int


@dataclass(frozen=True)
class Convolution:
    """Predicted costs of a convolution, by share. ``images`` counts those of all groups, ``outputs`` those of one
    group.

    >>> import torch
    >>> from fuse.kernel.values import Input
    >>> image = Input((1, 64, 56, 56), torch.float32, 0, (64 * 3136, 3136, 56, 1))
    >>> patches = Patches((1, 576, 3136), torch.float32, image, (3, 3), (56, 56), (1, 1), (1, 1), (1, 1))
    >>> Convolution(patches, outputs=64).best(threads=2)
    Share(rows=14, columns=56, splits=1)
    """

    patches: Patches
    outputs: int

    @property
    def images(self) -> int:
        return self.patches.source.shape[0]

    @property
    def channels(self) -> int:
        return self.patches.source.shape[1]

    @property
    def beyond(self) -> list[int]:
        """Distance of the last tap from the first, in output pixels, vertical and horizontal."""
        p = self.patches
        return [(t - 1) * d // s for t, d, s in zip(p.taps, p.dilation, p.stride, strict=True)]

    def pitch(self, columns: int) -> int:
        """The row stride of a plane, in elements; the padding after a whole row is also the padding before the next."""
        across, padding = self.patches.output_size[1], self.patches.padding[1]
        apart = columns + self.beyond[1]
        if columns < across or self.patches.stride[1] > 1:
            return apart
        return larger(larger(smaller(self.patches.source.shape[3] + padding, apart), apart - padding), across)

    def spots(self, share: Share) -> int:
        """Elements of a plane from the first output pixel of a share to the last, with those in between."""
        return (share.rows - 1) * self.pitch(share.columns) + share.columns

    def numbers(self, share: Share) -> int:
        """Elements in the planes of one channel."""
        return math.prod(self.patches.stride) * (share.rows + self.beyond[0]) * self.pitch(share.columns)

    def bytes_of_planes(self, share: Share) -> int:
        """Bytes in the planes of all channels."""
        return self.channels * self.numbers(share) * self.patches.dtype.itemsize

    def tasks(self, share: Share) -> int:
        """Number of shares in all images."""
        down, across = self.patches.output_size
        return self.images * -(-down // share.rows) * -(-across // share.columns) * share.splits

    def cycles(self, share: Share, threads: int) -> int:
        """Predicted cycles of the busiest thread for one channel: multiply-adds, one vector a cycle, and copies."""
        tasks = -(-self.tasks(share) // threads)
        multiplied = (
            _lanes(self.spots(share)) // PANEL * -(-self.outputs // share.splits) * math.prod(self.patches.taps)
        )
        return tasks * multiplied + -(-tasks // share.splits) * self.numbers(share)

    def shares(self) -> list[Share]:
        """Candidate shares whose planes stay in the cache; the smallest ones if none do."""
        down, across = self.patches.output_size
        parts = [(rows, across) for rows in halves(down)]
        parts += [(1, columns) for columns in halves(across)[1:] if columns >= SHORTEST_PART]
        splits = self.splits()
        shares = [Share(*part, number) for part in parts for number in splits]
        return [share for share in shares if self.bytes_of_planes(share) <= LARGEST_PLANES] or shares[-len(splits) :]

    def splits(self) -> list[int]:
        """Numbers of parts that the output channels may be split into."""
        return [splits for splits in (1, 2, 4, 8) if splits == 1 or self.outputs >= splits * FEWEST_OUTPUTS]

    def best(self, threads: int, rank: int = 0) -> Share:
        """The share with this rank by predicted cycles."""
        return by_cost(self.shares(), lambda share: self.cycles(share, threads), rank)

    def estimated(self) -> Convolution:
        """This convolution at the sizes that costs are estimated with."""
        p = self.patches
        images = Value(tuple(map(estimate, p.source.shape)), p.dtype)
        shape, output_size = tuple(map(estimate, p.shape)), (estimate(p.output_size[0]), estimate(p.output_size[1]))
        return Convolution(replace(p, shape=shape, source=images, output_size=output_size), self.outputs)

    def multiplied(self) -> int:
        """Work of a single thread, copies included, in multiplications that take the same time."""
        return self.cycles(self.shared(1, 0), 1) * self.channels * PANEL

    def shared(self, threads: int, rank: int) -> Share:
        """The best share at the estimated sizes, cut down to the size of the call where sizes vary."""
        if not varies(math.prod(self.patches.shape)):
            return self.best(threads, rank)
        usual = self.estimated()
        best = usual.best(estimate(threads), rank)
        if best.columns < usual.patches.output_size[1]:
            return best
        return Share(smaller(self.patches.output_size[0], best.rows), self.patches.output_size[1], best.splits)


def windowed(product: Product, left: Operand, image: Operand, frame: ProductFrame, config: Config) -> Tiling:
    """The tiling of a convolution of ``image`` with the weights ``left`` [outputs, depth], one for each group."""
    patches = product.right
    assert isinstance(patches, Patches)
    outputs, depth = product.left.shape[-2:]
    groups = product.left.shape[0] if len(product.left.shape) > 2 else 1
    of = Convolution(patches, outputs)
    threads = threads_for(of.multiplied(), of.images * patches.output_size[0] * outputs, config)
    share = of.shared(threads, config.share)
    if varies(of.tasks(share)):  # the call finds the best number of splits, at most these
        share = replace(share, splits=of.splits()[-1])
    threads, pitch = smaller(threads, of.tasks(share)), of.pitch(share.columns)
    panels = panels_for(of, share, outputs, config)
    distances = aligned(depth * 4 * (2 if patches.taps == (1, 1) else 1))
    last_block = of.channels * panels * PANEL * product.dtype.itemsize if patches.taps == (1, 1) else 0
    planes = aligned(larger(of.bytes_of_planes(share), last_block) + slack_of_planes(of, share, panels))
    images, channels, height, width = patches.source.shape
    weight_strides = (left.strides[0] if groups > 1 else 0, left.strides[-2])
    sizes = ", ".join(map(str, (images, groups, outputs, channels, height, width, *weight_strides, *image.strides)))
    splits = f"fuse_splits{{{share.splits}}}" if varies(of.tasks(share)) else f"{share.splits}"
    lines = [
        f"    const fuse_window window = {{{sizes}, {window_text(patches)}, {share.rows}, {share.columns}, {pitch}}};",
        f"    fuse_windows<{panels}, {least_panels(of, share, panels)}>({left.text}, {image.text}, window, {splits},",
        f"                       {frame.workspace}, {distances}, {threads}, {planes},",
    ]
    return Tiling(lines, distances + threads * planes + ALIGNMENT, threads, SCHEDULE, (*HEADERS, "windows.h"))


def panels_for(of: Convolution, share: Share, outputs: int, config: Config) -> int:
    """Panels in a block of spots: a power of two, no more than a share fills."""
    few = FEW_OUTPUTS * 4 // (of.patches.dtype.itemsize * outputs)
    panels = 1 << int(math.log2(config.panels or max(MOST_PANELS, few)))
    if varies(of.spots(share)):
        return panels
    return min(panels, 1 << (-(-of.spots(share) // PANEL) - 1).bit_length())


def least_panels(of: Convolution, share: Share, panels: int) -> int:
    """Panels of the shortest last block. Where sizes vary, a whole share may be one short block."""
    return max(panels // (4 if varies(of.spots(share)) else 2), 1)


def slack_of_planes(of: Convolution, share: Share, panels: int) -> int:
    """Bytes behind the planes that the last block of spots may read."""
    return (panels * PANEL + max(of.beyond) + of.pitch(share.columns)) * of.patches.dtype.itemsize


def _lanes(spots: int) -> int:
    """``spots`` rounded up to half blocks, as they are multiplied.

    >>> _lanes(70), _lanes(100)
    (96, 128)
    """
    half = MOST_PANELS * PANEL // 2
    return -(-spots // half) * half
