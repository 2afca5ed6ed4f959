"""The gradient of a convolution's weight: bands of padded images, tiles of output channels and taps.

    dw[output, tap] = sum of g[image, output, pixel] * x[image, pixel that the tap reads for it]

        for groups, parts of the output channels (threads):
            for images, bands of rows:    planes = the rows of x that are read;  rows = those of g, zeros in between
                for tiles of 4 outputs and 6 taps:    sums += rows * {planes from each tap on}, in registers

``weight_gradients.h`` has these loops. The library reorders both operands and the result. It is faster if a group has
so many outputs and taps that the sums do not fit the cache.
"""

from __future__ import annotations

from fuse.graph.backward.convolution_gradients import is_small
from fuse.graph.strides import contiguous_strides
from fuse.kernel.arithmetic.extents import estimate, pinned, smaller
from fuse.kernel.config import Config
from fuse.kernel.cpu import cpp_types
from fuse.kernel.cpu.product_frame import (
    ALIGNMENT,
    HEADERS,
    PANEL,
    ProductFrame,
    aligned,
    halves,
    several,
    threads_for,
    window_text,
)
from fuse.kernel.cpu.tiled_products import operand_of
from fuse.kernel.cpu.windows import Convolution, Share
from fuse.kernel.recipes.registry import Unsupported
from fuse.kernel.target import Written
from fuse.kernel.values import Computation, Correlation, Reshaped

LARGEST_BAND = 192 * 1024
"""Most bytes in the planes and rows of a band of several rows."""
LARGEST_HELD = 384 * 1024
"""Most bytes in several bands that a thread holds at once; sums are loaded and stored once for all of them."""
FEWEST_OUTPUTS = 4
"""Fewest output channels for each thread."""
SCHEDULE = "bands of padded images, tiles of outputs and taps, whose sums are held in registers"


def gradient_of_weight(computation: Computation, sums: Correlation, name: str, config: Config) -> Written:
    """The kernel of a region that consists of the weight gradient ``sums`` alone.

    Raises:
        Unsupported: the region has other operators, or the library is faster.
    """
    (output, *more), frame = computation.outputs, ProductFrame.of(computation)
    alone = output.value is sums or (isinstance(output.value, Reshaped) and output.value.source is sums)
    if more or not alone or output.strides != contiguous_strides(output.value.shape):
        raise Unsupported("the gradient of a weight is not the only result, or is not contiguous")
    groups, outputs, depth = (pinned(extent) for extent in sums.shape)
    if not is_small((groups * outputs, sums.right.source.shape[1], *sums.right.taps), groups):
        raise Unsupported("the library is faster for so many outputs and taps")
    gradient, image = operand_of(sums.left, frame.inputs), operand_of(sums.right.source, frame.inputs)
    (down, across), itemsize = sums.right.output_size, sums.dtype.itemsize
    if gradient.strides[2] != 1:
        raise Unsupported("the rows of the gradient are not contiguous")
    of, vector = Convolution(sums.right, outputs), PANEL * itemsize

    def spots(rows: int) -> int:
        return -(-((rows - 1) * of.pitch(across) + across) // PANEL) * PANEL

    def bytes_of(rows: int) -> tuple[int, int]:
        slack = (PANEL + max(of.beyond) + of.pitch(across)) * itemsize
        planes = of.bytes_of_planes(Share(rows, across, 1)) + slack
        return aligned(planes), aligned(outputs * spots(rows) * itemsize)

    rows = next((n for n in halves(estimate(down)) if estimate(sum(bytes_of(n))) <= LARGEST_BAND), 1)
    rows = smaller(down, rows)
    planes_bytes, rows_bytes = bytes_of(rows)
    pieces = of.images // groups * -(-down // rows)
    at_once = smaller(pieces, max(1, LARGEST_HELD // estimate(planes_bytes + rows_bytes)))
    work, tasks = outputs * depth * of.images * down * across, groups * max(1, outputs // FEWEST_OUTPUTS)
    threads = threads_for(work, tasks, config)
    sums_bytes, distances = aligned(outputs * depth * vector), aligned(depth * 4)
    images, channels, height, width = sums.right.source.shape
    sizes = ", ".join(map(str, (images, groups, outputs, channels, height, width, 0, 0, *image.strides)))
    real = cpp_types.storage(sums.dtype)
    lines = [
        f"    const fuse_window window = {{{sizes}, {window_text(sums.right)}, {rows}, {across}, {of.pitch(across)}}};",
        f"    const fuse_gradient<{real}> gradient = {{{gradient.text}, {', '.join(map(str, gradient.strides[:2]))}}};",
        f"    fuse_gradient_of_weight({frame.outputs[0].name}, gradient, {image.text}, window, {at_once},",
        f"                            {frame.workspace}, {distances}, {threads}, {planes_bytes}, {rows_bytes},",
        f"                            {sums_bytes});",
    ]
    memory = distances + threads * (at_once * (planes_bytes + rows_bytes) + sums_bytes) + ALIGNMENT
    headers = (*HEADERS, "windows.h", "weight_gradients.h")
    return Written(frame.around(name, lines), memory, several(threads), headers, SCHEDULE)
