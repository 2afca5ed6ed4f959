"""A matrix product and the elementwise operators after it (its epilogue) as one kernel.

    mm(x, w)  ->  Product(x, w)        for tiles of rows and columns (parallel):
    relu(y + b + z)           ->           sums = x[rows] @ w[:, columns]       in registers, then the L1 cache
                                           for row in rows: for column in columns (vector):
                                               out[row, column] = relu(sums[row, column] + b[column] + z[row, column])

``tiles.h`` has the loops over tiles. The *epilogue*, the nests over the elements of one tile, is generated. A nest may
have several loops over rows or columns (a result viewed as [batch, time, heads, units]); then their indices are
computed from the row by division, once for all columns of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fuse.kernel.arithmetic.expressions import position, select
from fuse.kernel.arithmetic.extents import always_equal, estimate, is_one
from fuse.kernel.arithmetic.index import ZERO, Affine, Index, NotAffine, Size
from fuse.kernel.config import Config
from fuse.kernel.cpu import channels_last, cpp_types, transposed
from fuse.kernel.cpu.emit import text_of
from fuse.kernel.cpu.product_frame import (
    ALIGNMENT,
    LARGEST_BLOCK,
    MOST_PANELS,
    NAMES,
    OF_BLOCK,
    PANEL,
    ROW_OF_BLOCK,
    Operand,
    ProductFrame,
    Right,
    Tiling,
    aligned,
    several,
    threads_for,
)
from fuse.kernel.cpu.windows import windowed
from fuse.kernel.ir import Buffer, For, Let, Pointer, Statement
from fuse.kernel.nest import Dimension, Sink, builder_for, store
from fuse.kernel.nests.collapsing import merged
from fuse.kernel.nests.schedule import with_splits
from fuse.kernel.placement import Blocks, blocks, placement
from fuse.kernel.recipes.products import is_reduced, products_below
from fuse.kernel.recipes.registry import Unsupported
from fuse.kernel.target import Written
from fuse.kernel.values import (
    Computation,
    Concat,
    Map,
    Output,
    Patches,
    PatchRows,
    Product,
    Reindex,
    Scan,
    SpreadPatches,
    Value,
)

LARGEST_PANEL = 128 * 1024
"""Most bytes in 16 rows of a transposed left operand; deeper products are left to the library."""
ROWS_TOGETHER = 24
"""Rows of a transposed left operand that are packed in one panel, as in ``tiles.h``."""
LARGEST_PANELS = 192 * 1024
"""Most bytes of these panels, if there are several; they share the L2 cache with a block of the right operand."""
LARGEST_PACKED = 2 * 1024 * 1024
"""Most bytes of blocks of the right operand, if there are several, that are packed for a transposed left operand at
once; they stay in the cache that all threads share."""
SCHEDULE = (
    f"blocks of columns, whose right operand is packed in panels of {PANEL}; tiles of rows; the operators after the "
    "product run on each tile while it is in cache"
)
WIDER_IS_BETTER = 0.25
"""Extra cost of a column in a block of one panel, relative to a very wide block: rows are read for fewer columns."""


def tiled(computation: Computation, name: str, config: Config) -> Written:
    """The kernel of a region with one product and elementwise operators after it.

    Raises:
        Unsupported, NotAffine: there is no such kernel; the message is a reason for the user.
    """
    product, *more = products_below([o.value for o in computation.outputs])
    if more:
        raise Unsupported("a kernel without attention has one product at most")
    frame = ProductFrame.of(computation)
    epilogue = epilogue_of(computation, product, frame.inputs, frame.outputs)
    tiling = _tiling(product, frame, config)
    real = cpp_types.storage(product.dtype)
    lines = [
        *tiling.lines,
        "                       [&](int64_t image, int64_t first_row, int64_t last_row, int64_t first_column,",
        f"                           int64_t last_column, const {real} *tile, int64_t tile_stride) FUSE_APART {{",
        *("    " + line for line in epilogue),
        "    });",
    ]
    source = frame.around(name, lines)
    return Written(source, tiling.workspace_bytes, several(tiling.threads), tiling.headers, tiling.schedule)


def _tiling(product: Product, frame: ProductFrame, config: Config) -> Tiling:
    """The tiling of a product or a convolution."""
    if isinstance(product.left, PatchRows):
        image = operand_of(product.left.source, frame.inputs)
        return channels_last.tiling(product, image, _right(product, frame, config), frame, config)
    if isinstance(product.right, SpreadPatches):
        image = operand_of(product.right.source, frame.inputs)
        return transposed.tiling(product, operand_of(transposed.weight_of(product), frame.inputs), image, frame, config)
    left = operand_of(product.left, frame.inputs)
    in_rows = left.strides[-1] == 1 or is_one(product.left.shape[-1])
    if not in_rows and (isinstance(product.right, Patches) or not _in_columns(product, left)):
        raise Unsupported("the left operand is contiguous in neither rows nor columns")
    if isinstance(product.right, Patches):
        return windowed(product, left, operand_of(product.right.source, frame.inputs), frame, config)
    if len(product.shape) == 2:
        return _packed(product, left, in_rows, frame, config)
    raise Unsupported("a batch of products is left to the library")


def _in_columns(product: Product, left: Operand) -> bool:
    """Whether the left operand is a transposed matrix, 16 rows of which are at most ``LARGEST_PANEL`` bytes."""
    depth, itemsize = estimate(product.left.shape[-1]), product.dtype.itemsize
    return len(product.shape) == 2 and left.strides[0] == 1 and depth * PANEL * itemsize <= LARGEST_PANEL


def _packed(product: Product, left: Operand, in_rows: bool, frame: ProductFrame, config: Config) -> Tiling:
    """The tiling of a product with a packed right operand (packed block by block in the call, or before it)."""
    (rows, columns), depth = product.shape, product.left.shape[1]
    right = _right(product, frame, config)
    threads = threads_for(rows * columns * depth, -(-columns // (right.panels * PANEL)) * -(-rows // 4), config)
    real, bytes_before, panel_bytes = cpp_types.storage(product.dtype), right.block_bytes, 0
    if in_rows:
        rows_of_left = f"fuse_in_rows<{real}>{{{left.text}, {left.strides[0]}}}"
        workspace = threads * bytes_before
    else:
        rows_of_left = f"fuse_in_columns<{real}>{{{left.text}, {left.strides[1]}}}"
        blocks_before = _fitting(LARGEST_PACKED, right.block_bytes, -(-columns // (right.panels * PANEL)))
        bytes_before *= blocks_before
        panel = aligned(depth * ROWS_TOGETHER * product.dtype.itemsize)
        panel_bytes = panel * _fitting(LARGEST_PANELS, panel, -(-rows // ROWS_TOGETHER))
        workspace = bytes_before + threads * panel_bytes
    lines = [
        f"    const {right.text};",
        f"    fuse_tiled_product(fuse_panels_{right.panels}, {rows_of_left}, right,",
        f"                       {rows}, {columns}, {depth},",
        f"                       {frame.workspace}, {threads}, {bytes_before}, {panel_bytes},",
    ]
    return Tiling(lines, workspace + ALIGNMENT, threads, SCHEDULE)


def _fitting(most_bytes: int, each: int, wanted: int) -> int:
    """Number of items of ``each`` bytes that fit ``most_bytes``: at least one, at most ``wanted``."""
    return max(1, min(estimate(wanted), most_bytes // max(1, estimate(each))))


def _right(product: Product, frame: ProductFrame, config: Config) -> Right:
    """The right operand of a product, a matrix that is packed in the call or before it."""
    (depth, columns), itemsize = product.right.shape, product.dtype.itemsize
    if before := _packed_before(product.right):
        name = frame.inputs[before.source.position].name
        text = f"fuse_prepacked<{cpp_types.storage(product.dtype)}> right = {{{name}, {depth}}}"
        return Right(text, before.width // PANEL, 0)
    panels = config.panels or panels_of(columns, depth, itemsize)
    return Right(matrix(product, frame.inputs), panels, aligned(depth * panels * PANEL * itemsize))


def _packed_before(right: Value) -> Blocks | None:
    """The column blocks in which a packed matrix is stored, if they are whole panels; else None."""
    found = None if isinstance(right, Patches) else blocks(right)
    return found if found and found.width % PANEL == 0 and found.width <= MOST_PANELS * PANEL else None


def operand_of(value: Value, inputs: Sequence[Buffer]) -> Operand:
    found = placement(value)
    if found is None:
        raise Unsupported("an operand of the product is computed in the kernel")
    numbers = [found.start, *found.strides]
    if any(n.sized for n in numbers):
        raise Unsupported("an operand's layout is known only during the call")
    name = inputs[found.source.position].name
    return Operand(name if found.start == ZERO else f"{name} + {found.start}", tuple(s.constant for s in found.strides))


def matrix(product: Product, inputs: Sequence[Buffer]) -> str:
    """The C++ declaration of the right operand: type, name, pointer, strides and shape."""
    right = operand_of(product.right, inputs)
    numbers = ", ".join(map(str, (*right.strides, *product.right.shape)))
    return f"fuse_matrix<{cpp_types.storage(product.dtype)}> right = {{{right.text}, {numbers}}}"


def panels_of(columns: int, depth: int, itemsize: int) -> int:
    """Panels in a block with the least predicted cost: as many as fit registers and cache, unless padding grows."""
    return by_cost_of_panels(columns, depth, itemsize)[0]


def by_cost_of_panels(columns: int, depth: int, itemsize: int) -> list[int]:
    """Numbers of panels in a block, by predicted cost, the cheapest first.

    >>> by_cost_of_panels(512, 512, 4), by_cost_of_panels(16, 512, 4)
    ([4, 3, 2, 1], [1, 2, 3, 4])
    """
    columns, depth = estimate(columns), estimate(depth)
    fitting = [p for p in range(1, MOST_PANELS + 1) if p == 1 or depth * p * PANEL * itemsize <= LARGEST_BLOCK]
    return sorted(fitting, key=lambda p: -(-columns // (p * PANEL)) * p * (1 + WIDER_IS_BETTER / p))


# ---- epilogue --------------------------------------------------------------------------------------------------------


def epilogue_of(computation: Computation, product: Product, inputs: list[Buffer], outputs: list[Buffer]) -> list[str]:
    """The lines that compute and store the outputs from one tile: a nest for each shape of outputs."""
    groups: dict[tuple[int, ...], list[Sink]] = {}
    for output, buffer in zip(computation.outputs, outputs, strict=True):
        _check(output, product)
        groups.setdefault(output.value.shape, []).append(Sink(output.value, buffer, output.strides))
    lines: list[str] = []
    for shape, targets in groups.items():
        statements = with_splits(shape, lambda d, t=targets: _nest(d, t, computation, product, inputs))  # type: ignore[misc]  # no type for a default
        text = text_of(statements, 1)
        lines += text if len(groups) == 1 else ["    {", *("    " + line for line in text), "    }"]
    return lines


def _check(output: Output, product: Product) -> None:
    if isinstance(output.value, (Concat, Scan)):
        raise Unsupported("a product's result is concatenated or scanned")
    if is_reduced(output.value):
        raise Unsupported("a product's result is reduced")
    if math.prod(output.value.shape) != math.prod(product.shape):
        raise Unsupported("the operators after the product have another number of elements")


def _nest(
    dimensions: Sequence[Dimension],
    targets: Sequence[Sink],
    computation: Computation,
    product: Product,
    inputs: list[Buffer],
) -> list[Statement]:
    """Loops over the rows and columns of one tile that store ``targets``."""
    builder = builder_for(dimensions, inputs, computation.value_names)
    builder.used_names.update(dict.fromkeys(NAMES, 1))
    index = tuple(d.index() for d in dimensions)
    product_index = index_of_product([(target.value, index) for target in targets], product, builder.extents)
    image_atoms, row_atoms, column_atoms = (
        atoms_of(at, extent, builder.extents)
        for at, extent in zip((ZERO, *product_index)[-3:], (1, *product.shape)[-3:], strict=True)
    )
    if not column_atoms:
        raise NotAffine("the product has one column")
    if len(column_atoms) > 2:
        raise NotAffine("the columns of a product are split into more than two dimensions")
    sums = Buffer("sums", product.dtype, "scratch")
    builder.stored[id(product)] = (sums, product_index[-1], product_index)
    atoms = [a for a, _ in (*image_atoms, *row_atoms, *column_atoms)]
    for atom in atoms:
        builder.open(atom, "vector" if atom == atoms[-1] else "serial")
    store(builder, [(target, index) for target in targets])
    for _ in atoms:
        builder.close()
    outside, within = _unwrapped(builder.blocks[0].statements, len(image_atoms))
    of_image, body = _unwrapped(within, len(row_atoms))
    rows = _rows(product, row_atoms, _columns(body, column_atoms))
    return [*delinearized("image", image_atoms), *outside, *of_image, rows]


def index_of_product(roots: Sequence[tuple[Value, Index]], product: Product, extents: Mapping[str, int]) -> Index:
    """The index (image, row, column) at which the roots first read ``product``; ``roots`` are values at an index."""
    stack = list(reversed(roots))
    seen: set[tuple[int, Index]] = set()
    while stack:
        value, at = stack.pop()
        if value is product:
            return at
        if (id(value), at) in seen:
            continue
        seen.add((id(value), at))
        if isinstance(value, Reindex):
            stack.append((value.source, value.where(at, extents)))
        elif isinstance(value, Map):
            stack.extend((argument, at) for argument in reversed(value.args))
    raise NotAffine("another result does not depend on the product")


def atoms_of(index: Affine, extent: int, extents: Mapping[str, int]) -> list[tuple[str, int]]:
    """The loop variables of ``index``, outermost first with their extents, if they run over ``range(extent)`` in order.

    Raises:
        NotAffine: they do not.
    """
    found: list[tuple[str, int]] = []
    left = list(index.terms)
    step = 1
    while following := [term for term in left if always_equal(term[1], step)]:
        atom, _ = following[0]
        left.remove(following[0])
        found.insert(0, (atom, extents[atom]))
        step *= extents[atom]
    if left or step != extent or index.constant or index.sized:
        raise NotAffine("the operators after the product do not read its rows and columns in order")
    return found


def _unwrapped(statements: Sequence[Statement], loops: int) -> tuple[list[Statement], list[Statement]]:
    """The statements outside of ``loops`` nested loops, and the statements in these loops."""
    if not loops:
        return [], list(statements)
    outside: list[Statement] = [s for s in statements if not isinstance(s, For)]
    (loop,) = (s for s in statements if isinstance(s, For))
    between, body = _unwrapped(loop.body, loops - 1)
    return outside, [*between, *body]


def _rows(product: Product, atoms: Sequence[tuple[str, int]], body: Sequence[Statement]) -> Statement:
    """One loop over the rows of a tile, which computes the loop variables of the nest from the row."""
    digits = delinearized("row", atoms)
    start = ROW_OF_BLOCK.times(Size("tile_stride", 0)) + Affine.of("first_column") * -1
    digits.append(Pointer("sums", "tile", start))
    return For("row", product.shape[-2], (*digits, *body), bounds=OF_BLOCK)


def delinearized(name: str, atoms: Sequence[tuple[str, int]]) -> list[Statement]:
    """Statements that compute loop variables from the flat index ``name`` by division."""
    digits: list[Statement] = []
    step = 1
    for number, (atom, extent) in reversed(list(enumerate(atoms))):
        counted = position(name) if is_one(step) else position(name) // step
        digits.append(Let(atom, counted % position(extent) if number else counted))
        step *= extent
    return digits


def _columns(body: Sequence[Statement], atoms: Sequence[tuple[str, int]]) -> list[Statement]:
    """The loops over columns, limited to those of a tile; two nested loops are merged where memory allows."""
    found: list[Statement] = []
    first, last = (position(name) for name in ("first_column", "last_column"))
    for statement in body:
        if isinstance(statement, For) and statement.atom == atoms[0][0]:
            whole = merged(statement)
            if len(atoms) == 1 or whole.atom == atoms[1][0]:
                found.append(replace(whole, bounds=(first, last)))
                continue
            (outer, _), (inner, extent) = atoms
            start = Affine.of(outer) * extent
            bounds = (
                select(first > position(start), position(Affine.of("first_column") + start * -1), 0),
                select(last < position(start + extent), position(Affine.of("last_column") + start * -1), extent),
            )
            within = tuple(
                replace(s, bounds=bounds) if isinstance(s, For) and s.atom == inner else s for s in statement.body
            )
            all_bounds = (first // extent, position(Affine.of("last_column") + (extent - 1)) // extent)
            found.append(replace(statement, body=within, bounds=all_bounds))
        else:
            found.append(statement)
    return found
