"""Tiling of a transposed convolution: one ordinary convolution for each phase of the stride, interleaved.

    y = conv_transpose(x, w, stride=2)     y[2 i + r]  =  sum over the taps t with t % 2 == r:  x[i - t // 2] @ w[t]

        pack the weights by phase                        once, shared out to threads
        for images and groups, bands of rows (threads):
            planes = the rows of x that they read, zeros between them                     (windows.h)
            for tiles of 6 output channels:
                for phases, blocks of 64 positions:    sums = w[phase, outputs] @ {planes from each tap on}
                rows = the sums of all phases, interleaved

``transposed.h`` has these loops. No zero between pixels is multiplied, and the image is copied once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fuse.kernel.arithmetic.extents import smaller, varies
from fuse.kernel.config import Config
from fuse.kernel.cpu import cpp_types
from fuse.kernel.cpu.product_frame import (
    ALIGNMENT,
    HEADERS,
    PANEL,
    Operand,
    ProductFrame,
    Tiling,
    aligned,
    threads_for,
    window_text,
)
from fuse.kernel.cpu.windows import Convolution, Share, panels_for, slack_of_planes
from fuse.kernel.recipes.registry import Unsupported
from fuse.kernel.values import Patches, Product, SpreadPatches, Value, view

SCHEDULE = (
    "for each phase of the stride, a convolution of bands of the padded image; no zero between pixels is multiplied; "
    "the operators after the convolution run on interleaved rows while they are in cache"
)
MOST_ROWS = 8
"""Most output channels of a tile (``fuse_most_rows``)."""
MOST_PHASES = 64
"""Most phases of the stride, as in ``transposed.h``."""
LARGEST_SUMS = 64 * 1024
"""Most bytes of the sums of a tile, if they are of several rows. With 48 and 96 KiB, nine convolutions took 0.9 to 1.1
times as long as without a limit, with 12 KiB 0.9 to 1.5 times (one thread)."""


@dataclass(frozen=True)
class Phases(Convolution):
    """A transposed convolution as an ordinary one that has ``phases`` times as many outputs."""

    phases: int

    def bytes_of_sums(self, share: Share) -> int:
        """Bytes in the sums of a tile for all phases, rounded up to whole blocks of spots."""
        spots = -(-self.spots(share) // PANEL) * PANEL
        return MOST_ROWS * self.phases * spots * self.patches.dtype.itemsize

    def shares(self) -> list[Share]:
        """Candidate shares whose sums stay in the cache, too; the smallest ones if none do."""
        shares = super().shares()
        small = [share for share in shares if self.bytes_of_sums(share) <= LARGEST_SUMS]
        return small or shares[-len(self.splits()) :]


def weight_of(product: Product) -> Value:
    """The weight of a transposed convolution as ``[groups, outputs, channels, taps]``."""
    patches = product.right
    assert isinstance(patches, SpreadPatches)
    groups, outputs, _ = product.left.shape
    return view(product.left, (groups, outputs, patches.source.shape[1], math.prod(patches.taps)))


def ordinary(patches: SpreadPatches) -> Patches:
    """The patches that all phases read; their pixels are positions of the image that some phase has a result for."""
    last = [(t - 1) * d // s for t, d, s in zip(patches.taps, patches.dilation, patches.stride, strict=True)]
    first = [p // s for p, s in zip(patches.padding, patches.stride, strict=True)]
    down, across = (
        (size - 1 + p) // s - f + 1
        for size, p, s, f in zip(patches.output_size, patches.padding, patches.stride, first, strict=True)
    )
    taps, padding = (last[0] + 1, last[1] + 1), (last[0] - first[0], last[1] - first[1])
    shape = (patches.shape[0], patches.source.shape[1] * math.prod(taps), down * across)
    return Patches(shape, patches.dtype, patches.source, taps, (down, across), (1, 1), padding, (1, 1))


def tiling(product: Product, weight: Operand, image: Operand, frame: ProductFrame, config: Config) -> Tiling:
    """The tiling of a transposed convolution of ``image`` with ``weight`` [groups, outputs, channels, taps]."""
    patches = product.right
    assert isinstance(patches, SpreadPatches)
    groups, outputs, depth = product.left.shape
    phases = math.prod(patches.stride)
    if phases > MOST_PHASES:
        raise Unsupported(f"the stride of the transposed convolution has more than {MOST_PHASES} phases")
    of = Phases(ordinary(patches), outputs * phases, phases)
    work = of.images * outputs * depth * math.prod(of.patches.output_size)
    threads = threads_for(work, of.images * of.patches.output_size[0] * outputs, config)
    share = of.shared(threads, config.share)
    if varies(of.tasks(share)):  # the call finds the best number of splits, at most these
        share = replace(share, splits=of.splits()[-1])
    threads, pitch, itemsize = smaller(threads, of.tasks(share)), of.pitch(share.columns), product.dtype.itemsize
    panels = panels_for(of, share, outputs, config)
    planes = aligned(of.bytes_of_planes(share) + slack_of_planes(of, share, panels))
    sums = aligned(of.bytes_of_sums(share) + MOST_ROWS * phases * panels * PANEL * itemsize)
    distances, packed = aligned((depth + math.prod(patches.taps)) * 4), aligned(groups * outputs * depth * itemsize)
    images, channels, height, width = of.patches.source.shape
    sizes = ", ".join(map(str, (images, groups, outputs, channels, height, width, 0, 0, *image.strides)))
    real, own = cpp_types.storage(product.dtype), of.patches
    splits = f"fuse_splits{{{share.splits}}}" if varies(of.tasks(share)) else f"{share.splits}"
    lines = [
        f"    const fuse_window window = {{{sizes}, {window_text(own)}, {share.rows}, {share.columns}, {pitch}}};",
        f"    const fuse_spread<{real}> spread = {{window, {weight.text}, {', '.join(map(str, weight.strides[:3]))},",
        f"                                    {window_text(patches)}}};",
        f"    fuse_spread_windows<{panels}>({image.text}, spread, {splits}, {frame.workspace}, {distances}, {packed},",
        f"                       {threads}, {planes}, {sums},",
    ]
    memory = distances + packed + threads * (planes + 2 * sums) + ALIGNMENT
    return Tiling(lines, memory, threads, SCHEDULE, (*HEADERS, "windows.h", "transposed.h"))
