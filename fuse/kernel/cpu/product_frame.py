"""Shared parts of kernels with a product: names, buffers, the lines that open and close them.

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

from fuse.kernel.cpu.emit import argument, text_of
from fuse.kernel.expressions import position
from fuse.kernel.extents import smaller, unless_below, varies
from fuse.kernel.index import Affine
from fuse.kernel.ir import Buffer
from fuse.kernel.packing import Packing
from fuse.kernel.schedule import range_checks
from fuse.kernel.values import Computation, Patches

HEADERS = ("products.h", "tiles.h")
"""Headers of a kernel with a product, after the prelude."""

PACKING = Packing(panel=16, most_panels=4, largest_block=768 * 1024)
"""A panel is one AVX-512 register of floats, or a few smaller ones. Registers hold four panels for some rows. A block
of this size stays in the cache of one core while all rows pass by."""
PANEL, MOST_PANELS, LARGEST_BLOCK = PACKING.panel, PACKING.most_panels, PACKING.largest_block

ALIGNMENT = 64
"""Bytes of a workspace at most that lie before its first place of a vector."""

PARALLEL_PRODUCT = 1 << 19
"""Multiplications from which a product is shared out to threads: ten microseconds of one."""

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
"""Names that a kernel with a product uses itself."""

OF_BLOCK = position("first_row"), position("last_row")
"""The rows of a block: the first, and the one behind the last."""
ROW_OF_BLOCK = Affine.of("row") + Affine.of("first_row") * -1
"""The number of a row in its block."""


@dataclass(frozen=True)
class Operand:
    """A matrix or an image in memory: the name of its first element's pointer, and strides."""

    text: str
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Right:
    """The right operand of a product, a block of columns at a time: how C++ declares it, how many panels a block has,
    and the bytes that packing one takes, if that is not done before."""

    text: str
    panels: int
    block_bytes: int


@dataclass(frozen=True)
class Walk:
    """The lines that walk the tiles of a product, up to the last argument, which is told of each tile; the bytes and
    threads that this takes, the schedule in words, and the headers."""

    lines: list[str]
    workspace_bytes: int
    threads: int
    schedule: str
    headers: tuple[str, ...] = HEADERS


@dataclass(frozen=True)
class ProductFrame:
    """The kernel of ``computation``, but for what it does."""

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
        """The workspace as C++."""
        return f"args[{len(self.inputs) + len(self.outputs)}]"

    def around(self, name: str, body: Sequence[str]) -> str:
        """The source of the kernel that runs ``body``, where no look-up is out of range."""
        lines = [f"// {line}" for line in self.computation.lines]
        lines.append(f'extern "C" int {name}(char *const *args) {{')
        arguments = enumerate((*self.inputs, *self.outputs))
        lines += [f"    {argument(buffer, number)}" for number, buffer in arguments]
        lines += [*text_of(range_checks(self.computation, self.inputs), 1), *body, "    return 0;", "}"]
        return "\n".join(lines) + "\n"


def threads_for(multiplications: int, tasks: int, one_thread: bool) -> int:
    """Number of threads for this much work in this number of tasks.

    >>> threads_for(1000, 8, False), threads_for(1 << 30, 8, True)
    (1, 1)
    """
    if one_thread:
        return 1
    return unless_below(multiplications, PARALLEL_PRODUCT, 1, smaller(tasks, os.cpu_count() or 1))


def several(threads: int) -> bool:
    """Whether there may be more than one thread."""
    return varies(threads) or threads > 1


def halves(number: int) -> list[int]:
    """``number``, half of it and so on, rounded up.

    >>> halves(14)
    [14, 7, 4, 2, 1]
    """
    found = [number]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found


def window_text(patches: Patches) -> str:
    """Taps, stride, padding, dilation and places of a convolution as C++ initialisers, down and across."""
    pairs = (patches.taps, patches.stride, patches.padding, patches.dilation, patches.output_size)
    return ", ".join(f"{{{down}, {across}}}" for down, across in pairs)


def aligned(size: int) -> int:
    """``size`` bytes and as many more as the next share needs to begin aligned.

    >>> aligned(1), aligned(128)
    (64, 128)
    """
    return -(-size // ALIGNMENT) * ALIGNMENT
