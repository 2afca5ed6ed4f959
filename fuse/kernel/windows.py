"""Products with the patches of an image, where the window moves one place at a time: no patch is copied.

    conv2d(x, w, padding=1)     ->     for blocks of 16 places of a row, four at a time:
                                           band = rows of x that they see, zeros around them
                                           sums[channels, places] = w @ {band from each tap on}

Neighbouring places see neighbouring elements, so that a vector of places is a vector in memory, from each tap on.
``windows.h`` walks the blocks. A patch holds every element of the image once for each tap; a band, which the nearest
caches hold, once for each row of taps at most: 1.25 to 1.3 times as fast with 3 x 3 taps and 32 channels.
"""

from __future__ import annotations

import math

from fuse.kernel import ctypes
from fuse.kernel.product_frame import (
    ALIGNMENT,
    HEADERS,
    MOST_PANELS,
    PANEL,
    Frame,
    Operand,
    Walk,
    aligned,
    threads_for,
)
from fuse.kernel.values import Patches, Product

FULL_ENOUGH = 0.8
"""Share of the places of a row's panels that must be in the row."""
LARGEST_BAND = 1 << 20
"""Bytes of a band, which is to stay in the cache of one core."""


def windowed(
    product: Product, left: Operand, image: Operand, frame: Frame, one_thread: bool, panels: int | None
) -> Walk | None:
    """How to walk the tiles of a convolution like that; None where patches are better packed."""
    patches = product.right
    assert isinstance(patches, Patches)
    in_row = -(-patches.places[1] // PANEL)
    if patches.stride != (1, 1) or patches.taps == (1, 1) or patches.places[1] < FULL_ENOUGH * in_row * PANEL:
        return None
    images, channels, height, width = patches.source.shape
    itemsize, (rows, depth) = product.dtype.itemsize, product.left.shape
    all_panels = patches.places[0] * in_row
    panels = min(panels or MOST_PANELS, all_panels)
    below, beside = ((taps - 1) * apart for taps, apart in zip(patches.taps, patches.dilation, strict=True))
    band_width = -(-(in_row * PANEL + beside) // PANEL) * PANEL
    share = aligned(channels * ((panels + in_row - 2) // in_row + 1 + below) * band_width * itemsize)
    if share > LARGEST_BAND:
        return None
    tasks = images * -(-all_panels // panels) * -(-rows // 4)
    threads = threads_for(images * rows * depth * math.prod(patches.places), tasks, one_thread)
    sizes = ", ".join(map(str, (images, rows, channels, height, width, *image.strides)))
    pairs = ", ".join(f"{{{y}, {x}}}" for y, x in (patches.taps, patches.padding, patches.dilation, patches.places))
    lines = [
        f"    const fuse_window window = {{{sizes}, {pairs}}};",
        f"    fuse_windowed_product<{panels}, {ctypes.storage(product.dtype)}>({left.text}, {left.strides[0]}, "
        f"{image.text}, window,",
        f"                       {frame.workspace}, {threads}, {share},",
    ]
    offsets = aligned(depth * 4) + ALIGNMENT
    return Walk(lines, offsets + threads * share + ALIGNMENT, threads, (*HEADERS, "windows.h"))
