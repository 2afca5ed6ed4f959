"""How to walk the places of a convolution: bands of a padded image, blocks of places, tiles of outputs.

    conv2d(x, w, padding=1)     ->     for images and groups, some rows of places (threads):
                                           planes = the rows of x that they see, zeros between them
                                           for blocks of 64 places, tiles of 6 outputs:
                                               sums = w[outputs] @ {planes from each tap on}

``windows.h`` does so. A patch matrix would hold every element of the image once for each tap; the planes hold it once,
and stay in the cache of one core.
"""

from __future__ import annotations

import math

from fuse.kernel.product_frame import ALIGNMENT, HEADERS, MOST_PANELS, PANEL, Frame, Operand, Walk, aligned, threads_for
from fuse.kernel.values import Patches, Product

LARGEST_PLANES = 384 * 1024
"""Bytes of the planes of one thread."""
FEW_OUTPUTS = 16
"""Panels that are multiplied at once with one output of float, so that registers hold about as many sums."""
FEWEST_OUTPUTS = 8
"""Outputs of a part of them that is worth a thread's while."""


def windowed(
    product: Product, left: Operand, image: Operand, frame: Frame, one_thread: bool, panels: int | None
) -> Walk:
    """The walk over the tiles of a convolution, whose weights are ``left`` [outputs, depth], one for each group."""
    patches = product.right
    assert isinstance(patches, Patches)
    images, channels, height, width = patches.source.shape
    outputs, depth = product.left.shape[-2:]
    groups = product.left.shape[0] if len(product.left.shape) > 2 else 1
    itemsize = product.dtype.itemsize
    beyond = [(t - 1) * d // s for t, d, s in zip(patches.taps, patches.dilation, patches.stride, strict=True)]
    pitch = _pitch(patches, width, beyond[1])

    def bytes_of_planes(rows: int) -> int:
        return channels * math.prod(patches.stride) * (rows + beyond[0]) * pitch * itemsize

    work = images * outputs * depth * math.prod(patches.places)
    threads = threads_for(work, images * patches.places[0] * outputs, one_thread)
    heights = _halves(patches.places[0])
    heights = [rows for rows in heights if bytes_of_planes(rows) <= LARGEST_PLANES] or heights[-1:]
    parts = [shares for shares in (1, 2, 4, 8) if shares == 1 or outputs >= shares * FEWEST_OUTPUTS]

    def cycles(shape: tuple[int, int]) -> float:
        """Of the busiest thread, for one channel: what it multiplies, a vector a cycle, and what it copies."""
        rows, shares = shape
        images_at_once = images * -(-patches.places[0] // rows)
        tasks = -(-images_at_once * shares // threads)
        lanes = _lanes((rows - 1) * pitch + patches.places[1])
        copied = (rows + beyond[0]) * pitch * math.prod(patches.stride)
        multiplied = tasks * lanes / PANEL * -(-outputs // shares) * math.prod(patches.taps)
        return multiplied + -(-tasks // shares) * copied

    rows, shares = min(((rows, shares) for rows in heights for shares in parts), key=cycles)
    threads = min(threads, images * -(-patches.places[0] // rows) * shares)
    spots = (rows - 1) * pitch + patches.places[1]
    most = panels or max(MOST_PANELS, FEW_OUTPUTS * 4 // (itemsize * outputs))
    panels = min(1 << int(math.log2(most)), 1 << (-(-spots // PANEL) - 1).bit_length())
    slack = (panels * PANEL + max(beyond) + pitch) * itemsize
    distances, share = aligned(depth * 4), aligned(bytes_of_planes(rows) + slack)
    weight_strides = (left.strides[0] if groups > 1 else 0, left.strides[-2])
    sizes = ", ".join(map(str, (images, groups, outputs, channels, height, width, *weight_strides, *image.strides)))
    pairs = ", ".join(
        f"{{{y}, {x}}}" for y, x in (patches.taps, patches.stride, patches.padding, patches.dilation, patches.places)
    )
    lines = [
        f"    const fuse_window window = {{{sizes}, {pairs}}};",
        f"    fuse_windows<{panels}>({left.text}, {image.text}, window, {rows}, {shares},",
        f"                       {frame.workspace}, {distances}, {threads}, {share},",
    ]
    return Walk(lines, distances + threads * share + ALIGNMENT, threads, (*HEADERS, "windows.h"))


def _halves(number: int) -> list[int]:
    """``number``, half of it and so on, rounded up.

    >>> _halves(14)
    [14, 7, 4, 2, 1]
    """
    found = [number]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found


def _lanes(spots: int) -> int:
    """Spots that are multiplied for so many: whole blocks, and half a block for a short rest.

    >>> _lanes(70), _lanes(100)
    (96, 128)
    """
    block = MOST_PANELS * PANEL
    rest = spots % block
    return spots - rest + (0 if not rest else block // 2 if rest <= block // 2 else block)


def _pitch(patches: Patches, width: int, beyond: int) -> int:
    """The distance of the rows of a plane, as ``fuse_planes`` counts it."""
    apart = patches.places[1] + beyond
    if patches.stride[1] > 1:
        return apart
    padding = patches.padding[1]
    return max(min(width + padding, apart), apart - padding, patches.places[1])
