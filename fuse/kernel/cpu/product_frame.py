"""Parts that all kernels with a product share: names, buffers, the first and last lines, and constants of the tiling.

// user's lines
extern "C" int name(char *const *args) {
    const float *x = (const float *)args[0]; ...        a pointer for each input and output
    ...                                                 the kernel, which may take ``args[last]`` as workspace
    return 0;
}
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from fuse.kernel.arithmetic.expressions import position
from fuse.kernel.arithmetic.extents import smaller, unless_below, varies
from fuse.kernel.arithmetic.index import Affine
from fuse.kernel.config import Config
from fuse.kernel.cpu.emit import argument, text_of
from fuse.kernel.ir import Buffer
from fuse.kernel.nests.schedule import range_checks
from fuse.kernel.packing import Packing
from fuse.kernel.values import Computation, Patches

HEADERS = ("products.h", "tiles.h")
"""Headers of a kernel with a product, after the prelude."""

PACKING = Packing(panel=16, most_panels=4, largest_block=768 * 1024)
"""A panel is one AVX-512 register of float32, or a few smaller registers. The sums of four panels and a few rows fit
into the registers. A block of 768 KiB stays in the L2 cache of one core while all rows are multiplied by it."""
PANEL, MOST_PANELS, LARGEST_BLOCK = PACKING.panel, PACKING.most_panels, PACKING.largest_block

ALIGNMENT = 64
"""Alignment, in bytes, of vectors in a workspace; a workspace has as many bytes to spare."""

PARALLEL_PRODUCT = 1 << 19
"""Fewest multiplications of a product that uses several threads; one thread takes ten microseconds for these."""

NAMES = (
    "args",
    "block",
    "first_column",
    "first_row",
    "image",
    "last_column",
    "last_row",
    "memory",
    "own",
    "right",
    "row",
    "scores",
    "sums",
    "tile",
    "tile_stride",
    "window",
)
"""Names reserved in a kernel with a product."""

OF_BLOCK = position("first_row"), position("last_row")
"""The first row of a block, and the end of its rows."""
ROW_OF_BLOCK = Affine.of("row") + Affine.of("first_row") * -1
"""The index of a row in its block."""


@dataclass(frozen=True)
class Operand:
    """A matrix or an image in memory: a C++ pointer to its first element, and its strides in elements."""

    text: str
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Right:
    """The right operand of a product: its C++ declaration, the panels in a block of columns, and the bytes of a packed
    block; 0 if it was packed before the call."""

    text: str
    panels: int
    block_bytes: int


@dataclass(frozen=True)
class Tiling:
    """The loops over the tiles of a product.

    ``lines`` are C++ that ends in a call without its last argument, the epilogue of a tile. ``workspace_bytes`` and
    ``threads`` are what the loops need, ``headers`` what defines them. ``schedule`` describes them in a sentence.
    """

    lines: list[str]
    workspace_bytes: int
    threads: int
    schedule: str
    headers: tuple[str, ...] = HEADERS


@dataclass(frozen=True)
class ProductFrame:
    """The arguments of a kernel with a product, and the C++ around its body."""

    computation: Computation
    inputs: list[Buffer]
    outputs: list[Buffer]

    @staticmethod
    def of(computation: Computation) -> ProductFrame:
        names = [computation.names.get(i, f"in{i}") for i in range(len(computation.inputs))]
        fit = [f"{name}_" if name in NAMES else name for name in names]
        inputs = [Buffer(n, v.dtype, "input") for n, v in zip(fit, computation.inputs, strict=True)]
        outputs = [Buffer(f"out{i}", o.value.dtype, "output") for i, o in enumerate(computation.outputs)]
        return ProductFrame(computation, inputs, outputs)

    @property
    def workspace(self) -> str:
        """The C++ expression of the pointer to the workspace."""
        return f"args[{len(self.inputs) + len(self.outputs)}]"

    def around(self, name: str, body: Sequence[str]) -> str:
        """The source of a kernel that checks the range of indices, then runs ``body``."""
        lines = [f"// {line}" for line in self.computation.lines]
        lines.append(f'extern "C" int {name}(char *const *args) {{')
        arguments = enumerate((*self.inputs, *self.outputs))
        lines += [f"    {argument(buffer, number)}" for number, buffer in arguments]
        lines += [*text_of(range_checks(self.computation, self.inputs), 1), *body, "    return 0;", "}"]
        return "\n".join(lines) + "\n"


def threads_for(multiplications: int, tasks: int, config: Config) -> int:
    """Number of threads for a product with this many multiplications, in this many tasks.

    >>> threads_for(1000, 8, Config()), threads_for(1 << 30, 8, Config(threads="one"))
    (1, 1)
    """
    if config.threads == "one":
        return 1
    return unless_below(multiplications, PARALLEL_PRODUCT, 1, smaller(tasks, os.cpu_count() or 1))


def several(threads: int) -> bool:
    """Whether there may be more than one thread."""
    return varies(threads) or threads > 1


def halves(number: int) -> list[int]:
    """``number`` and its repeated halves, rounded up, down to 1.

    >>> halves(14)
    [14, 7, 4, 2, 1]
    """
    found = [number]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found


def window_text(patches: Patches) -> str:
    """Taps, stride, padding, dilation and output size of a convolution as C++ initialisers, vertical and horizontal."""
    pairs = (patches.taps, patches.stride, patches.padding, patches.dilation, patches.output_size)
    return ", ".join(f"{{{down}, {across}}}" for down, across in pairs)


def aligned(size: int) -> int:
    """``size`` in bytes, rounded up to a multiple of ``ALIGNMENT``.

    >>> aligned(1), aligned(128)
    (64, 128)
    """
    return -(-size // ALIGNMENT) * ALIGNMENT
