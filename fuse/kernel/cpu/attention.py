"""Two products and the softmax between them as one kernel.

    s = q @ k.T * 0.125 + mask         for images (batch and heads), blocks of query rows (parallel):
    p = softmax(s, -1)          ->         scores = queries[rows] @ keys.T       whole rows, in cache
    o = (p @ v).transpose(1, 2)            scores = softmax(scores * 0.125 + mask)        in place
                                           out[rows] = scores @ values           stored in the transposed layout

``attention.h`` has the loops over blocks. Two parts are generated: the operators between the products (any elementwise
operators, and reductions over keys in the stages of ``rows.py``), and the epilogue of the second product
(``tiled_products.py``). Queries, keys and values are read in place, with any strides. Operators before them, such as a
scale, are computed for a block at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from fuse.kernel.arithmetic.extents import is_multiple, is_one, larger, smaller
from fuse.kernel.arithmetic.index import NotAffine
from fuse.kernel.config import Config
from fuse.kernel.cpu import cpp_types
from fuse.kernel.cpu.emit import text_of
from fuse.kernel.cpu.product_frame import (
    ALIGNMENT,
    HEADERS,
    NAMES,
    PANEL,
    ROW_OF_BLOCK,
    ProductFrame,
    aligned,
    several,
    threads_for,
)
from fuse.kernel.cpu.product_rows import ProductRows, by_rows
from fuse.kernel.cpu.tiled_products import delinearized, epilogue_of, panels_of
from fuse.kernel.ir import Buffer, Pointer, Statement
from fuse.kernel.nest import Dimension, Sink, builder_for, store
from fuse.kernel.nests.schedule import with_splits
from fuse.kernel.placement import matrices
from fuse.kernel.recipes.products import products_below
from fuse.kernel.recipes.registry import Unsupported
from fuse.kernel.target import Written
from fuse.kernel.traversals import reductions_below
from fuse.kernel.values import Computation, Product, Value, permute, view

BLOCK_BYTES = 48 * 1024
"""Bytes of the scores of a block of queries, which stay in the L1 and L2 caches of one core between the products."""
SCHEDULE = "blocks of whole rows of scores, which stay in cache from the first product to the second"
MOST_ROWS, FEWEST_ROWS = 96, 6
"""Most and fewest queries in a block."""
DEEPEST = 512
"""Most elements of a query. One accumulator adds as many terms, so that longer sums would lose accuracy."""


def attention(computation: Computation, name: str, config: Config) -> Written:
    """The kernel of a region with two products, where the second multiplies reduced values of the first.

    Raises:
        Unsupported, NotAffine: there is no such kernel; the message is a reason for the user.
    """
    first, second = _products(computation)
    frame = ProductFrame.of(computation)
    real, itemsize = cpp_types.storage(first.dtype), first.dtype.itemsize
    maker = _Operands(computation, frame.inputs, real)
    queries, keys, values = (
        maker.queries(_batch(first.left)),
        maker.matrix("keys", permute(_batch(first.right), (0, 2, 1)), turned=True),
        maker.matrix("values", _batch(second.right), turned=False),
    )
    images, rows, depth = _batch(first.left).shape
    _, length, columns = _batch(second.right).shape
    if depth > DEEPEST:
        raise Unsupported(f"queries of more than {DEEPEST} elements are left to the library")
    of_keys, of_values = (
        config.panels or panels_of(*shape, itemsize) for shape in ((length, depth), (columns, length))
    )
    panels = -(-length // PANEL)
    rest = "false" if is_multiple(panels, of_keys) else "true"
    padded = [panels * PANEL, -(-columns // (PANEL * of_values)) * PANEL * of_values]
    stride = padded[0] + PANEL  # a power of two would keep one column of all rows in one set of the cache
    fitting = larger(BLOCK_BYTES // (stride * itemsize) // FEWEST_ROWS * FEWEST_ROWS, FEWEST_ROWS)
    block = smaller(smaller(fitting, MOST_ROWS), rows)
    own_queries, own_operand = (block * depth if queries.computed else 0), larger(keys.computed, values.computed)
    share = padded[0] * depth + padded[1] * length + block * stride + own_queries + PANEL + own_operand
    share_bytes = aligned(share * itemsize)
    work = images * rows * length * (depth + columns)
    threads = threads_for(work, images * -(-rows // FEWEST_ROWS), config)
    sizes = ", ".join(map(str, (images, rows, length, depth, columns, queries.stride, block, stride, own_queries)))
    lines = [
        *queries.lines,
        *keys.lines,
        *values.lines,
        f"    const auto weigh = [&](int64_t image, int64_t first_row, int64_t last_row, {real} *block) FUSE_APART {{",
        *("    " + line for line in _between(computation, first, second, frame.inputs, stride)),
        "    };",
        "    const auto epilogue = [&](int64_t image, int64_t first_row, int64_t last_row, int64_t first_column,",
        f"                              int64_t last_column, const {real} *tile, int64_t tile_stride) FUSE_APART {{",
        *("    " + line for line in epilogue_of(computation, second, frame.inputs, frame.outputs)),
        "    };",
        f"    fuse_attention<{of_keys}, {rest}, {of_values}, {real}>({{{sizes}}}, {frame.workspace}, "
        f"{threads}, {share_bytes}, queries, keys,",
        "                   values, weigh, epilogue);",
    ]
    memory = threads * share_bytes + ALIGNMENT
    return Written(frame.around(name, lines), memory, several(threads), (*HEADERS, "attention.h"), SCHEDULE)


def _products(computation: Computation) -> tuple[Product, Product]:
    """The product of queries and keys, and the product of the probabilities and the values."""
    found = products_below([output.value for output in computation.outputs])
    if len(found) != 2:
        raise Unsupported(f"a kernel has at most two products, not {len(found)}")
    first, second = found
    if first not in products_below([second.left]) or products_below([second.right]):
        raise Unsupported("the left operand of the second product is not computed from the first product")
    if not reductions_below([second.left]):
        raise Unsupported("there is no softmax between the two products")
    if first.dtype != second.dtype:
        raise Unsupported("the two products have different dtypes")
    if any(is_one(_batch(product).shape[2]) for product in (first, second)):
        raise Unsupported("a product has one column only")
    return first, second


def _batch(value: Value) -> Value:
    """A matrix as a batch of one matrix; a batch unchanged."""
    return value if len(value.shape) == 3 else view(value, (1, *value.shape))


# ---- operands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operand:
    """An operand of a product: C++ lines that define how to read it, and its row stride in elements.

    ``computed``: elements of one image that are computed into memory; 0 for an operand that is read in place.
    """

    lines: list[str]
    stride: int
    computed: int


@dataclass(frozen=True)
class _Operands:
    """Generator of the C++ functions that read operands."""

    computation: Computation
    inputs: list[Buffer]
    real: str

    def queries(self, value: Value) -> _Operand:
        """The C++ function ``queries(image, first_row, last_row, memory)``, a pointer to the first of these rows."""
        heading = (
            f"    const auto queries = [&](int64_t image, int64_t first_row, int64_t last_row, {self.real} *memory)"
        )
        heading += f" -> const {self.real} * {{"
        found = matrices(value)
        if found is not None and (found.strides[1] == 1 or is_one(value.shape[2])):
            place = f"{self.inputs[found.source.position].name} + {found.start} + first_row * {found.strides[0]}"
            body = [*text_of(delinearized("image", found.images), 2), f"        return {place};"]
            return _Operand([heading, *body, "    };"], found.strides[0], 0)
        body = ["    " + line for line in self._computed(value)]
        return _Operand([heading, *body, "        return memory;", "    };"], value.shape[2], 1)

    def matrix(self, name: str, value: Value, turned: bool) -> _Operand:
        """The C++ function ``name(image, memory)``, a matrix of ``value`` to pack, transposed if ``turned``."""
        kind = f"fuse_matrix<{self.real}>"
        heading = f"    const auto {name} = [&](int64_t image, {self.real} *memory) -> {kind} {{"
        _, rows, columns = value.shape
        found = matrices(value)
        if found is not None:
            place = f"{self.inputs[found.source.position].name} + {found.start}"
            strides, computed, body = found.strides, 0, text_of(delinearized("image", found.images), 2)
        else:
            place, strides, computed = "memory", (columns, 1), rows * columns
            body = [f"        const int64_t first_row = 0, last_row = {rows};"]
            body += ["    " + line for line in self._computed(value)]
        shape = (rows, columns)
        numbers = (*reversed(strides), *reversed(shape)) if turned else (*strides, *shape)
        body.append(f"        return {{{place}, {', '.join(map(str, numbers))}}};")
        return _Operand([heading, *body, "    };"], 0, computed)

    def _computed(self, value: Value) -> list[str]:
        """Lines that compute rows of ``value`` into contiguous ``memory``."""
        own = Buffer("own", value.dtype, "scratch")

        def build(dimensions: list[Dimension]) -> list[Statement]:
            builder = builder_for(dimensions, self.inputs, self.computation.value_names)
            builder.used_names.update(dict.fromkeys(NAMES, 1))
            image, row, column = ([*zip(d.atoms, d.extents, strict=True)] for d in dimensions)
            atoms = [atom for d in dimensions for atom in d.atoms]
            for atom in atoms:
                builder.open(atom, "vector" if atom == atoms[-1] and column else "serial")
            store(builder, [(Sink(value, own, (0, 0, 1)), tuple(d.index() for d in dimensions))])
            for _ in atoms:
                builder.close()
            pointer = Pointer("own", "memory", ROW_OF_BLOCK * value.shape[2])
            return by_rows(builder.blocks[0].statements, image, row, pointer)

        return text_of(with_splits(value.shape, build), 1)


# ---- between the products --------------------------------------------------------------------------------------------


def _between(computation: Computation, first: Product, second: Product, inputs: list[Buffer], stride: int) -> list[str]:
    """Lines that turn scores into the left operand of the second product, in place."""
    reductions = reductions_below([second.left])
    scores = Buffer("scores", first.dtype, "scratch")
    target = Sink(second.left, scores, (*(0 for _ in second.left.shape[1:]), 1))
    nest = ProductRows([target], first, scores, inputs, computation.value_names, reductions)

    def build(dimensions: list[Dimension]) -> list[Statement]:
        statements = nest.build(dimensions)
        images, rows = nest.image_and_row()
        if not nest.in_order_of(second.left):
            raise NotAffine("the second product reads the scores in another order of batch and rows")
        pointer = Pointer("scores", "block", ROW_OF_BLOCK * stride)
        return by_rows(statements, images, rows, pointer)

    return text_of(with_splits(nest.shape, build), 1)
