"""How to walk the places of a convolution: bands of a padded image, blocks of places, tiles of outputs.

    conv2d(x, w, padding=1)     ->     for images and groups, some rows of places or a part of a long one (threads):
                                           planes = the rows of x that they see, zeros between them
                                           for blocks of 64 places, tiles of 6 outputs:
                                               sums = w[outputs] @ {planes from each tap on}

``windows.h`` does so. A patch matrix would hold every element of the image once for each tap; the planes hold it once,
and stay in the cache of one core.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fuse.kernel.config import Config, by_cost
from fuse.kernel.cpu.product_frame import (
    ALIGNMENT,
    HEADERS,
    MOST_PANELS,
    PANEL,
    Operand,
    ProductFrame,
    Walk,
    aligned,
    halves,
    threads_for,
    window_text,
)
from fuse.kernel.extents import estimate, larger, smaller, varies
from fuse.kernel.values import Patches, Product, Value

LARGEST_PLANES = 384 * 1024
"""Bytes of the planes of one thread."""
SCHEDULE = (
    "bands of the padded image, blocks of places, tiles of outputs, no matrix of patches; what is computed from a tile "
    "follows while it is in cache"
)
SHORTEST_PART = 64
"""Places of a row that are worth a walk of their own, beside those that they see left and right."""
FEW_OUTPUTS = 16
"""Panels that are multiplied at once with one output of float, so that registers hold about as many sums."""
FEWEST_OUTPUTS = 8
"""Outputs of a part of them that is worth a thread's while."""


@dataclass(frozen=True)
class Share:
    """What is walked at once: so many rows of places, or places of one row; the outputs are split in so many parts."""

    rows: int
    columns: int
    splits: int


@dataclass(frozen=True)
class Convolution:
    """What the shares of a convolution cost. ``images`` are those of all groups, ``outputs`` those of one.

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
        """Places whose first tap the last tap of a place is further on, down and across."""
        p = self.patches
        return [(t - 1) * d // s for t, d, s in zip(p.taps, p.dilation, p.stride, strict=True)]

    def pitch(self, columns: int) -> int:
        """The distance of the rows of a plane; the padding behind a whole row is that before the next one."""
        across, padding = self.patches.output_size[1], self.patches.padding[1]
        apart = columns + self.beyond[1]
        if columns < across or self.patches.stride[1] > 1:
            return apart
        return larger(larger(smaller(self.patches.source.shape[3] + padding, apart), apart - padding), across)

    def spots(self, share: Share) -> int:
        """Places of a share and what lies between them."""
        return (share.rows - 1) * self.pitch(share.columns) + share.columns

    def numbers(self, share: Share) -> int:
        """Numbers of the planes of one channel."""
        return math.prod(self.patches.stride) * (share.rows + self.beyond[0]) * self.pitch(share.columns)

    def bytes_of_planes(self, share: Share) -> int:
        """Bytes of the planes of all channels."""
        return self.channels * self.numbers(share) * self.patches.dtype.itemsize

    def tasks(self, share: Share) -> int:
        """Shares of all images."""
        down, across = self.patches.output_size
        return self.images * -(-down // share.rows) * -(-across // share.columns) * share.splits

    def cycles(self, share: Share, threads: int) -> int:
        """Of the busiest thread, for one channel: what it multiplies, a vector a cycle, and what it copies."""
        tasks = -(-self.tasks(share) // threads)
        multiplied = (
            _lanes(self.spots(share)) // PANEL * -(-self.outputs // share.splits) * math.prod(self.patches.taps)
        )
        return tasks * multiplied + -(-tasks // share.splits) * self.numbers(share)

    def shares(self) -> list[Share]:
        """Candidates whose planes stay in the cache, or the smallest ones."""
        down, across = self.patches.output_size
        parts = [(rows, across) for rows in halves(down)]
        parts += [(1, columns) for columns in halves(across)[1:] if columns >= SHORTEST_PART]
        splits = self.splits()
        shares = [Share(*part, number) for part in parts for number in splits]
        return [share for share in shares if self.bytes_of_planes(share) <= LARGEST_PLANES] or shares[-len(splits) :]

    def splits(self) -> list[int]:
        """The numbers of parts that outputs may be split in."""
        return [splits for splits in (1, 2, 4, 8) if splits == 1 or self.outputs >= splits * FEWEST_OUTPUTS]

    def best(self, threads: int, place: int = 0) -> Share:
        """The share that takes so many threads the fewest cycles, or that in another place among those not far from
        it."""
        return by_cost(self.shares(), lambda share: self.cycles(share, threads), place)

    def estimated(self) -> Convolution:
        """The same at the sizes that costs are estimated with."""
        p = self.patches
        images = Value(tuple(map(estimate, p.source.shape)), p.dtype)
        shape, output_size = tuple(map(estimate, p.shape)), (estimate(p.output_size[0]), estimate(p.output_size[1]))
        return Convolution(replace(p, shape=shape, source=images, output_size=output_size), self.outputs)

    def multiplied(self) -> int:
        """Multiplications of a thread that does all, as far as they take time."""
        return self.cycles(self.shared(1, 0), 1) * self.channels * PANEL

    def shared(self, threads: int, place: int) -> Share:
        """What is walked at once: the best share for the sizes that costs are estimated with, and as much of others."""
        if not varies(math.prod(self.patches.shape)):
            return self.best(threads, place)
        usual = self.estimated()
        best = usual.best(estimate(threads), place)
        if best.columns < usual.patches.output_size[1]:
            return best
        return Share(smaller(self.patches.output_size[0], best.rows), self.patches.output_size[1], best.splits)


def windowed(
    product: Product, left: Operand, image: Operand, frame: ProductFrame, one_thread: bool, config: Config
) -> Walk:
    """The walk over the tiles of a convolution, whose weights are ``left`` [outputs, depth], one for each group."""
    patches = product.right
    assert isinstance(patches, Patches)
    outputs, depth = product.left.shape[-2:]
    groups = product.left.shape[0] if len(product.left.shape) > 2 else 1
    of = Convolution(patches, outputs)
    threads = threads_for(of.multiplied(), of.images * patches.output_size[0] * outputs, one_thread)
    share = of.shared(threads, config.share)
    if varies(of.tasks(share)):  # the call finds the best number of splits, at most these
        share = replace(share, splits=of.splits()[-1])
    threads, pitch, itemsize = smaller(threads, of.tasks(share)), of.pitch(share.columns), product.dtype.itemsize
    panels = 1 << int(math.log2(config.panels or max(MOST_PANELS, FEW_OUTPUTS * 4 // (itemsize * outputs))))
    if not varies(of.spots(share)):
        panels = min(panels, 1 << (-(-of.spots(share) // PANEL) - 1).bit_length())
    slack = (panels * PANEL + max(of.beyond) + pitch) * itemsize
    distances, planes = aligned(depth * 4), aligned(of.bytes_of_planes(share) + slack)
    images, channels, height, width = patches.source.shape
    weight_strides = (left.strides[0] if groups > 1 else 0, left.strides[-2])
    sizes = ", ".join(map(str, (images, groups, outputs, channels, height, width, *weight_strides, *image.strides)))
    splits = f"fuse_splits{{{share.splits}}}" if varies(of.tasks(share)) else f"{share.splits}"
    lines = [
        f"    const fuse_window window = {{{sizes}, {window_text(patches)}, {share.rows}, {share.columns}, {pitch}}};",
        f"    fuse_windows<{panels}>({left.text}, {image.text}, window, {splits},",
        f"                       {frame.workspace}, {distances}, {threads}, {planes},",
    ]
    return Walk(lines, distances + threads * planes + ALIGNMENT, threads, SCHEDULE, (*HEADERS, "windows.h"))


def _lanes(spots: int) -> int:
    """Spots that are multiplied for so many: whole blocks, and half a block for a short rest.

    >>> _lanes(70), _lanes(100)
    (96, 128)
    """
    half = MOST_PANELS * PANEL // 2
    return -(-spots // half) * half
