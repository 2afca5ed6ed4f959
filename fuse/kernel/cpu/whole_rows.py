"""A product with a small matrix and the norm or softmax after it as one kernel.

    y = addmm(b, x, w) + r          for blocks of rows (parallel):
    z = layer_norm(y)         ->        sums = x[rows] @ w                      whole rows, in cache
                                        z[rows] = layer_norm(sums + b + r)      stages of a row nest, see ``rows.py``

``whole_rows.h`` has the loops over blocks. The whole matrix is packed in every call and read for every block of rows,
so that it must fit into the L2 cache of one core.
"""

from __future__ import annotations

from fuse.kernel.arithmetic.extents import is_one, varies
from fuse.kernel.config import Config
from fuse.kernel.cpu import cpp_types
from fuse.kernel.cpu.emit import text_of
from fuse.kernel.cpu.product_frame import ALIGNMENT, HEADERS, PANEL, ROW_OF_BLOCK, ProductFrame, several, threads_for
from fuse.kernel.cpu.product_rows import ProductRows, by_rows
from fuse.kernel.cpu.tiled_products import operand_of, panels_of
from fuse.kernel.ir import Buffer, Pointer, Statement
from fuse.kernel.nest import Dimension, Sink
from fuse.kernel.nests.schedule import with_splits
from fuse.kernel.recipes.products import products_below
from fuse.kernel.recipes.registry import Unsupported
from fuse.kernel.target import Written
from fuse.kernel.traversals import reductions_below
from fuse.kernel.values import Computation, Concat, Patches, Scan

LARGEST_MATRIX = 256 * 1024
"""Most bytes of the packed matrix; with a block of rows, it fills at most half of a typical L2 cache."""
ROWS_AT_ONCE = 24
"""A multiple of every number of rows whose sums ``products.h`` keeps in registers (8, 6, 4 or 3): none is left."""
SCHEDULE = "the matrix packed once; blocks of whole rows, which are reduced and stored while they are in cache"
FEWEST_ROWS = 64
"""Fewest rows. With matrices of 64 to 256 rows and columns, from 64 rows on the kernel is 1.02 to 1.1 times as fast as
the library's product and another kernel; with 4 rows it is 0.85 times as fast."""
SMALL_MATRIX = 64 * 1024
"""Most bytes of a matrix with which one kernel serves any number of rows that varies: 0.9 times as fast as the library
with 4 rows, equally fast from 20 rows on."""


def whole_rows(computation: Computation, name: str, config: Config) -> Written:
    """The kernel of a region with one product whose columns are reduced.

    Raises:
        Unsupported, NotAffine: there is no such kernel; the message is a reason for the user.
    """
    (product,) = products_below([output.value for output in computation.outputs])
    if any(isinstance(output.value, (Concat, Scan)) for output in computation.outputs):
        raise Unsupported("a product's result is concatenated or scanned")
    if len(product.shape) != 2 or isinstance(product.right, Patches):
        raise Unsupported("the result of a convolution or of a batch of products is reduced")
    (rows, columns), depth = product.shape, product.left.shape[1]
    matrix = columns * depth * product.dtype.itemsize
    if not (varies(rows) and matrix <= SMALL_MATRIX) and rows < FEWEST_ROWS:
        raise Unsupported(f"a product with fewer than {FEWEST_ROWS} rows is reduced")
    real, itemsize = cpp_types.storage(product.dtype), product.dtype.itemsize
    panels = config.panels or panels_of(columns, depth, itemsize)
    padded = -(-columns // (PANEL * panels)) * PANEL * panels
    if padded * depth * itemsize > LARGEST_MATRIX:
        raise Unsupported(
            "the rows of a product are reduced, and its weight is too large to compute whole rows in cache"
        )
    frame = ProductFrame.of(computation)
    left, right = operand_of(product.left, frame.inputs), operand_of(product.right, frame.inputs)
    if left.strides[1] != 1 and not is_one(depth):
        raise Unsupported("the rows of the left operand are not contiguous")
    targets = [Sink(o.value, buffer, o.strides) for o, buffer in zip(computation.outputs, frame.outputs, strict=True)]
    reductions = reductions_below(target.value for target in targets)
    sums = Buffer("scores", product.dtype, "scratch")
    nest = ProductRows(targets, product, sums, frame.inputs, computation.value_names, reductions)
    stride = padded + PANEL

    def build(dimensions: list[Dimension]) -> list[Statement]:
        statements = nest.build(dimensions)
        pointer = Pointer("scores", "block", ROW_OF_BLOCK * stride)
        return by_rows(statements, *nest.image_and_row(), pointer)

    body = text_of(with_splits(nest.shape, build), 1)
    blocks = -(-rows // ROWS_AT_ONCE)
    threads = threads_for(rows * columns * depth, blocks, config)
    numbers = ", ".join(map(str, (*right.strides, depth, columns)))
    lines = [
        f"    const fuse_matrix<{real}> right = {{{right.text}, {numbers}}};",
        f"    const auto finish = [&](int64_t first_row, int64_t last_row, const {real} *block) FUSE_APART {{",
        *("    " + line for line in body),
        "    };",
        f"    fuse_whole_rows<{panels}, {real}>({left.text}, {left.strides[0]}, right, {rows},",
        f"                    {ROWS_AT_ONCE}, {stride}, {frame.workspace}, {threads}, finish);",
    ]
    memory = (padded * depth + threads * ROWS_AT_ONCE * stride) * itemsize + ALIGNMENT
    return Written(frame.around(name, lines), memory, several(threads), (*HEADERS, "whole_rows.h"), SCHEDULE)
