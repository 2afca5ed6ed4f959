"""A matrix product and the elementwise operators behind it as one kernel.

    mm(x, w)  ->  Product(x, w)        for tiles of rows and columns (parallel):
    relu(y + b + z)           ->           sums = x[rows] @ w[:, columns]       in registers, then the nearest cache
                                           for row in rows: for column in columns (vector):
                                               out[row, column] = relu(sums[row, column] + b[column] + z[row, column])

``tiles.h`` walks the tiles; what is generated is the *epilogue*, the nests over the elements of one tile. A nest may
have several loops over rows or over columns (a result seen as [batch, time, heads, units]): its row is taken apart by
division, once for all columns of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fuse.kernel.config import DEFAULT, Config
from fuse.kernel.cpu import channels_last, cpp_types
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
    Walk,
    aligned,
    several,
    threads_for,
)
from fuse.kernel.cpu.windows import windowed
from fuse.kernel.expressions import position, select
from fuse.kernel.extents import always_equal, estimate, is_one
from fuse.kernel.index import ZERO, Affine, Index, NotAffine, Size
from fuse.kernel.ir import Buffer, For, Let, Pointer, Statement
from fuse.kernel.nest import Dimension, Sink, builder_for, store
from fuse.kernel.placement import Blocks, blocks, placement
from fuse.kernel.products import is_reduced, products_below
from fuse.kernel.recipes import Unsupported
from fuse.kernel.schedule import with_splits
from fuse.kernel.target import Written
from fuse.kernel.tidy import merged
from fuse.kernel.values import Computation, Concat, Map, Output, Patches, PatchRows, Product, Reindex, Scan, Value

LARGEST_PANEL = 128 * 1024
"""Bytes of 16 rows of a left operand that lies turned over: more are left to the library."""
ROWS_TOGETHER = 24
"""Rows of such an operand that lie side by side in a panel, as in ``tiles.h``."""
LARGEST_PANELS = 192 * 1024
"""Bytes of such panels at most, if there are several, beside a block of the right operand in the same cache."""
LARGEST_PACKED = 2 * 1024 * 1024
"""Bytes of blocks of the right operand, if there are several, that are packed before such rows pass by: they stay in
the cache that all threads share."""
SCHEDULE = (
    f"blocks of columns, whose right operand is packed in panels of {PANEL}; tiles of rows; what is computed from a "
    "tile follows while it is in cache"
)
WIDER_IS_BETTER = 0.25
"""How much more a column costs in a block of one panel than in an endless one: its rows are read for fewer columns."""


def tiled(computation: Computation, name: str, one_thread: bool, config: Config = DEFAULT) -> Written:
    """The kernel of a region that multiplies once.

    Raises:
        Unsupported, NotAffine: there is no such kernel; the message is a reason.
    """
    product, *more = products_below([o.value for o in computation.outputs])
    if more:
        raise Unsupported("two products in one kernel")
    frame = ProductFrame.of(computation)
    epilogue = epilogue_of(computation, product, frame.inputs, frame.outputs)
    walk = _walk(product, frame, one_thread, config)
    real = cpp_types.storage(product.dtype)
    lines = [
        *walk.lines,
        "                       [&](int64_t image, int64_t first_row, int64_t last_row, int64_t first_column,",
        f"                           int64_t last_column, const {real} *tile, int64_t tile_stride) FUSE_APART {{",
        *("    " + line for line in epilogue),
        "    });",
    ]
    source = frame.around(name, lines)
    return Written(source, walk.workspace_bytes, several(walk.threads), walk.headers, walk.schedule)


def _walk(product: Product, frame: ProductFrame, one_thread: bool, config: Config) -> Walk:
    """The walk over the tiles of a product or a convolution."""
    if isinstance(product.left, PatchRows):
        image = operand_of(product.left.source, frame.inputs)
        return channels_last.walk(product, image, _right(product, frame, config), frame, one_thread, config)
    left = operand_of(product.left, frame.inputs)
    in_rows = left.strides[-1] == 1 or is_one(product.left.shape[-1])
    if not in_rows and (isinstance(product.right, Patches) or not _in_columns(product, left)):
        raise Unsupported("the left operand is contiguous in neither rows nor columns")
    if isinstance(product.right, Patches):
        return windowed(product, left, operand_of(product.right.source, frame.inputs), frame, one_thread, config)
    if len(product.shape) == 2:
        return _packed(product, left, in_rows, _right(product, frame, config), frame, one_thread)
    raise Unsupported("a batch of products is left to the library")


def _in_columns(product: Product, left: Operand) -> bool:
    """Whether the left operand is a matrix turned over, some rows of which a cache holds."""
    depth, itemsize = estimate(product.left.shape[-1]), product.dtype.itemsize
    return len(product.shape) == 2 and left.strides[0] == 1 and depth * PANEL * itemsize <= LARGEST_PANEL


def _packed(
    product: Product, left: Operand, in_rows: bool, right: Right, frame: ProductFrame, one_thread: bool
) -> Walk:
    """The walk over the tiles of a product whose right operand is packed, block by block or before."""
    (rows, columns), depth = product.shape, product.left.shape[1]
    threads = threads_for(rows * columns * depth, -(-columns // (right.panels * PANEL)) * -(-rows // 4), one_thread)
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
    return Walk(lines, workspace + ALIGNMENT, threads, SCHEDULE)


def _fitting(most_bytes: int, each: int, wanted: int) -> int:
    """Number of wanted items that fit the given bytes; at least one."""
    return max(1, min(estimate(wanted), most_bytes // max(1, estimate(each))))


def _right(product: Product, frame: ProductFrame, config: Config) -> Right:
    """The right operand of a product, a matrix that is packed in the call or before."""
    (depth, columns), itemsize = product.right.shape, product.dtype.itemsize
    if before := _packed_before(product.right):
        name = frame.inputs[before.source.position].name
        text = f"fuse_prepacked<{cpp_types.storage(product.dtype)}> right = {{{name}, {depth}}}"
        return Right(text, before.width // PANEL, 0)
    panels = config.panels or panels_of(columns, depth, itemsize)
    return Right(matrix(product, frame.inputs), panels, aligned(depth * panels * PANEL * itemsize))


def _packed_before(right: Value) -> Blocks | None:
    """The blocks that a matrix lies in, where they are whole panels."""
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
    """The right operand as C++: its type, its name, and where it lies."""
    right = operand_of(product.right, inputs)
    numbers = ", ".join(map(str, (*right.strides, *product.right.shape)))
    return f"fuse_matrix<{cpp_types.storage(product.dtype)}> right = {{{right.text}, {numbers}}}"


def panels_of(columns: int, depth: int, itemsize: int) -> int:
    """Panels in a block: as many as fit registers and cache, few where that leaves fewer columns empty."""
    return by_cost_of_panels(columns, depth, itemsize)[0]


def by_cost_of_panels(columns: int, depth: int, itemsize: int) -> list[int]:
    """The numbers of panels that a block may have, the best first.

    >>> by_cost_of_panels(512, 512, 4), by_cost_of_panels(16, 512, 4)
    ([4, 3, 2, 1], [1, 2, 3, 4])
    """
    columns, depth = estimate(columns), estimate(depth)
    fitting = [p for p in range(1, MOST_PANELS + 1) if p == 1 or depth * p * PANEL * itemsize <= LARGEST_BLOCK]
    return sorted(fitting, key=lambda p: -(-columns // (p * PANEL)) * p * (1 + WIDER_IS_BETTER / p))


# ---- epilogue --------------------------------------------------------------------------------------------------------


def epilogue_of(computation: Computation, product: Product, inputs: list[Buffer], outputs: list[Buffer]) -> list[str]:
    """The lines that store what is computed from one tile: a nest for the outputs of each shape and order."""
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
    place = place_of_product([(target.value, index) for target in targets], product, builder.extents)
    image_atoms, row_atoms, column_atoms = (
        digits_of(at, extent, builder.extents)
        for at, extent in zip((ZERO, *place)[-3:], (1, *product.shape)[-3:], strict=True)
    )
    if not column_atoms:
        raise NotAffine("the product has one column")
    if len(column_atoms) > 2:
        raise NotAffine("the columns of a product are split into more than two dimensions")
    sums = Buffer("sums", product.dtype, "scratch")
    builder.stored[id(product)] = (sums, place[-1], place)
    atoms = [a for a, _ in (*image_atoms, *row_atoms, *column_atoms)]
    for atom in atoms:
        builder.open(atom, "vector" if atom == atoms[-1] else "serial")
    store(builder, [(target, index) for target in targets])
    for _ in atoms:
        builder.close()
    outside, within = _unwrapped(builder.blocks[0].statements, len(image_atoms))
    of_image, body = _unwrapped(within, len(row_atoms))
    rows = _rows(product, row_atoms, _columns(body, column_atoms))
    return [*taken_apart("image", image_atoms), *outside, *of_image, rows]


def place_of_product(roots: Sequence[tuple[Value, Index]], product: Product, extents: Mapping[str, int]) -> Index:
    """Image, row and column of the element of ``product`` that the first of ``roots`` is made of at its index."""
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


def digits_of(place: Affine, extent: int, extents: Mapping[str, int]) -> list[tuple[str, int]]:
    """The loop variables that count up to ``extent`` together, outermost first, each with its own extent."""
    found: list[tuple[str, int]] = []
    left = list(place.terms)
    step = 1
    while following := [term for term in left if always_equal(term[1], step)]:
        atom, _ = following[0]
        left.remove(following[0])
        found.insert(0, (atom, extents[atom]))
        step *= extents[atom]
    if left or step != extent or place.constant or place.sized:
        raise NotAffine("the operators after the product do not read its rows and columns in order")
    return found


def _unwrapped(statements: Sequence[Statement], loops: int) -> tuple[list[Statement], list[Statement]]:
    """What stands outside of so many loops around one another, and what they repeat."""
    if not loops:
        return [], list(statements)
    outside: list[Statement] = [s for s in statements if not isinstance(s, For)]
    (loop,) = (s for s in statements if isinstance(s, For))
    between, body = _unwrapped(loop.body, loops - 1)
    return outside, [*between, *body]


def _rows(product: Product, atoms: Sequence[tuple[str, int]], body: Sequence[Statement]) -> Statement:
    """One loop over the rows of a tile, each taken apart into the loop variables of the nest."""
    digits = taken_apart("row", atoms)
    start = ROW_OF_BLOCK.times(Size("tile_stride", 0)) + Affine.of("first_column") * -1
    digits.append(Pointer("sums", "tile", start))
    return For("row", product.shape[-2], (*digits, *body), bounds=OF_BLOCK)


def taken_apart(name: str, atoms: Sequence[tuple[str, int]]) -> list[Statement]:
    """The loop variables of the nest that the variable ``name`` counts together."""
    digits: list[Statement] = []
    step = 1
    for number, (atom, extent) in reversed(list(enumerate(atoms))):
        counted = position(name) if is_one(step) else position(name) // step
        digits.append(Let(atom, counted % position(extent) if number else counted))
        step *= extent
    return digits


def _columns(body: Sequence[Statement], atoms: Sequence[tuple[str, int]]) -> list[Statement]:
    """The loops over columns, limited to those of a tile: one loop where all that it touches lies in their order."""
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
