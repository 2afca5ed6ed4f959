"""A product with a small matrix and the norm or softmax behind it as one kernel.

    y = addmm(b, x, w) + r          for blocks of rows (parallel):
    z = layer_norm(y)         ->        sums = x[rows] @ w                      whole rows, in the nearest cache
                                        z[rows] = layer_norm(sums + b + r)      stages of a row nest, see ``rows.py``

``whole_rows.h`` walks the blocks. The matrix is packed whole, in every call, and read again for every block of rows: it
has to be small enough to stay in the cache of one core.
"""

from __future__ import annotations

import os

from fuse.kernel import ctypes
from fuse.kernel.attention import ProductRows, by_rows
from fuse.kernel.emit import text_of
from fuse.kernel.ir import Buffer, Let, Statement
from fuse.kernel.nest import Dimension, Target
from fuse.kernel.recipes import Unsupported
from fuse.kernel.schedule import range_checks, with_splits
from fuse.kernel.tiled_products import (
    ALIGNMENT,
    HEADERS,
    NAMES,
    PANEL,
    PARALLEL_PRODUCT,
    Tiled,
    operand_of,
    panels_of,
    products_below,
)
from fuse.kernel.values import Concat, Patches, Program, Scan
from fuse.kernel.walks import reductions_below

LARGEST_MATRIX = 256 * 1024
"""Bytes of the packed matrix: with a block of rows, half the second cache of today's processors at most."""
ROWS_AT_ONCE = 24
FEWEST_ROWS = 64
"""Measured for matrices of 64 to 256 rows and columns: 1.02 to 1.1 times as fast as the library's product and a kernel
from here on, 0.85 times with 4 rows."""


def whole_rows(program: Program, name: str, one_thread: bool) -> Tiled:
    """The kernel of a region in which what is made of one product is reduced over its columns.

    Raises:
        Unsupported, NotAffine: there is no such kernel; the message is a reason.
    """
    (product,) = products_below([output.value for output in program.outputs])
    if any(isinstance(output.value, (Concat, Scan)) for output in program.outputs):
        raise Unsupported("a product's result is concatenated or scanned")
    if len(product.shape) != 2 or isinstance(product.right, Patches):
        raise Unsupported("the result of a convolution or of a batch of products is reduced")
    (rows, columns), depth = product.shape, product.left.shape[1]
    if rows < FEWEST_ROWS:
        raise Unsupported(f"a product's result is reduced, and has fewer than {FEWEST_ROWS} rows")
    real, itemsize = ctypes.storage(product.dtype), product.dtype.itemsize
    panels = panels_of(columns, depth, itemsize)
    padded = -(-columns // (PANEL * panels)) * PANEL * panels
    if padded * depth * itemsize > LARGEST_MATRIX:
        raise Unsupported("a product's result is reduced, and its matrix too large to multiply whole rows at a time")
    names = [program.names.get(i, f"in{i}") for i in range(len(program.inputs))]
    inputs = [
        Buffer(f"{n}_" if n in NAMES else n, ctypes.storage(v.dtype), "input")
        for n, v in zip(names, program.inputs, strict=True)
    ]
    outputs = [Buffer(f"out{i}", ctypes.storage(o.value.dtype), "output") for i, o in enumerate(program.outputs)]
    left, right = operand_of(product.left, inputs), operand_of(product.right, inputs)
    if left.strides[1] != 1 and depth > 1:
        raise Unsupported("the rows of the left operand do not lie in order in memory")
    targets = [Target(o.value, buffer, o.strides) for o, buffer in zip(program.outputs, outputs, strict=True)]
    reductions = reductions_below(target.value for target in targets)
    sums = Buffer("scores", real, "scratch")
    nest = ProductRows(targets, product, sums, inputs, program.value_names, reductions)
    stride = padded + PANEL

    def build(dimensions: list[Dimension]) -> list[Statement]:
        statements = nest.build(dimensions)
        pointer = Let("scores", "auto", f"block + (row - first_row) * {stride}")
        return by_rows(statements, *nest.image_and_row(), pointer)

    body = text_of(with_splits(nest.shape, build), 1)
    blocks = -(-rows // ROWS_AT_ONCE)
    threads = 1 if one_thread or rows * columns * depth < PARALLEL_PRODUCT else min(blocks, os.cpu_count() or 1)
    lines = [f"// {line}" for line in program.lines]
    lines.append(f'extern "C" int {name}(char *const *args) {{')
    for position, buffer in enumerate((*inputs, *outputs)):
        const = "const " if buffer.role == "input" else ""
        lines.append(f"    {const}{buffer.ctype} *{buffer.name} = ({const}{buffer.ctype} *)args[{position}];")
    lines += text_of(range_checks(program, inputs), 1)
    numbers = ", ".join(map(str, (*right.strides, depth, columns)))
    lines += [
        f"    const fuse_matrix<{real}> right = {{{right.text}, {numbers}}};",
        f"    const auto finish = [&](int64_t first_row, int64_t last_row, const {real} *block) FUSE_APART {{",
        *("    " + line for line in body),
        "    };",
        f"    fuse_whole_rows<{panels}, {real}>({left.text}, {left.strides[0]}, right, {rows},",
        f"                    {ROWS_AT_ONCE}, {stride}, args[{len(inputs) + len(outputs)}], {threads}, finish);",
        "    return 0;",
        "}",
    ]
    memory = (padded * depth + threads * ROWS_AT_ONCE * stride) * itemsize + ALIGNMENT
    return Tiled("\n".join(lines) + "\n", memory, threads > 1, (*HEADERS, "whole_rows.h"))
