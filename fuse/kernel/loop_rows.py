"""A loop kernel whose threads share out the batch: each runs all steps for its own rows and waits for nobody.

    rows first_row ... last_row, for all steps:
        gates = h @ W           weights packed once, a few rows at a time
        c, h  = f(gates, c)     one nest, as in any kernel

It suits reductions over units (norms, softmax), large batches and steps without products. Where a row of the batch
reads another row, or there is no batch, one thread does all.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence

from fuse.kernel.emit import text_of, work
from fuse.kernel.index import Affine
from fuse.kernel.ir import Accumulate, Accumulator, Declare, Load, Loop, Scope, Statement, Store
from fuse.kernel.loop_frame import (
    Destination,
    Frame,
    Share,
    Workspace,
    elements,
    indented,
    lasts_of,
    nest,
    packing,
    pointers,
    results_of,
    stage_memory,
    starts_of,
    state_pointers,
    step_pointers,
)
from fuse.kernel.loop_step import PANEL, Kept, Product, padded_columns, panels_in_block

_INDENT = "    "


_Nest = list[Statement]


def rows_text(frame: Frame, name: str) -> Share:
    """One thread's share.

    Raises:
        NotAffine: the step has no such loops; the message is a reason.
    """
    step = frame.step
    sources, start_names, starts = starts_of(frame)
    before = nest(sources, start_names, starts, {})
    after = nest(frame.states, step.names, lasts_of(frame), {})
    stages: list[_Nest | Product] = [
        stage if isinstance(stage, Product) else _nest(frame, [_kept(frame, stage)]) for stage in step.stages
    ]
    stages.append(_nest(frame, results_of(frame)))
    products = [s for s in stages if isinstance(s, Product)]
    nests = [s for s in stages if not isinstance(s, Product)]
    batch = _batch(frame, [before, after, *nests])

    workspace = Workspace()
    head = pointers(frame, workspace)
    stage_memory(frame, workspace, step.stages)
    packed = []
    for number, product in enumerate(products):
        size = product.left.shape[1] * padded_columns(product.result.shape[1])
        workspace.take(f"weights_{number}", "float", size, 4)
        packed += _packed(frame, number, product)
    lines = [f"static int {name}_share(char *const *args, fuse_team *team, int64_t member) {{"]
    lines += indented(1, head + workspace.lines)
    if batch > 1:
        lines += indented(1, [f"const int64_t first_row = {batch} * member / team->members;"])
        lines += indented(1, [f"const int64_t last_row = {batch} * (member + 1) / team->members;"])
    lines += indented(1, packed)
    lines += _statements(before, 1, batch)
    lines += indented(1, ["for (int64_t t = 0; t < steps; ++t) {"])
    lines += indented(2, step_pointers(frame))
    for stage in stages:
        if isinstance(stage, Product):
            lines += indented(2, _multiplied(frame, products.index(stage), stage, batch))
        else:
            lines += _statements(stage, 2, batch)
    lines += indented(1, ["}"])
    for state in frame.states:
        lines += indented(1, state_pointers(frame, state, "steps")[:1])
    lines += _statements(after, 1, batch)
    lines += [*indented(1, ["return 0;"]), "}"]
    effort = sum(padded_columns(p.result.shape[1]) * p.result.shape[0] * p.left.shape[1] // PANEL for p in products)
    effort += sum(work(s) for statements in nests for s in statements)
    return Share("\n".join(lines) + "\n", workspace.size, batch, effort)


def _nest(frame: Frame, destinations: Sequence[Destination]) -> _Nest:
    return nest(frame.step.inputs, frame.step.names, destinations, frame.step.value_names)


def _kept(frame: Frame, stage: Kept) -> Destination:
    return Destination(stage.value, frame.name(stage.result), stage.result.strides)


# ---- products ------------------------------------------------------------------------------------------------------


def _packed(frame: Frame, number: int, product: Product) -> list[str]:
    """Lines that pack a weight, each thread some of its blocks, and wait for the others."""
    columns, depth = product.result.shape[1], product.left.shape[1]
    panels = panels_in_block(columns)
    width = PANEL * panels
    blocks = -(-columns // width)
    name = frame.name(product.right.source)
    lines = [f"for (int64_t block = member; block < {blocks}; block += team->members) {{"]
    target = f"weights_{number} + block * {depth * width}"
    for panel in range(panels):
        column = f"{width} * block + {PANEL * panel}"
        lines.append(_INDENT + packing(target, panels, panel, product.right, name, depth, column, columns))
    return [*lines, "}", "team->wait();"]


def _multiplied(frame: Frame, number: int, product: Product, batch: int) -> list[str]:
    """Lines that compute a product for the rows of this thread."""
    rows, depth = product.left.shape
    panels = panels_in_block(product.result.shape[1])
    width, wide = PANEL * panels, padded_columns(product.result.shape[1])
    left, out, first, count = frame.name(product.left), frame.name(product.result), "", str(rows)
    stride = product.left.strides[0]
    if batch > 1:
        each = rows // batch
        left += f" + {(Affine.of('first_row') * each).times(stride)}"
        first = f" + first_row * {each * wide}"
        count = f"(last_row - first_row) * {each}"
    return [
        f"for (int64_t block = 0; block < {wide // width}; ++block) {{",
        f"{_INDENT}fuse_product_rows<{panels}>({out}{first} + block * {width}, {wide}, {PANEL}, {left}, {stride},",
        f"{_INDENT}{' ' * 21}weights_{number} + block * {depth * width}, {depth}, {count});",
        "}",
    ]


# ---- rows of the batch ---------------------------------------------------------------------------------------------


def _batch(frame: Frame, nests: Sequence[_Nest]) -> int:
    """The largest number of rows, by leading dimensions of the states, that never read one another; at least 1."""
    sizes: list[int] = list(itertools.accumulate(frame.states[0].shape, operator.mul))
    for batch in sorted({s for s in sizes if s > 1}, reverse=True):
        own = _own_rows(frame, batch)
        if own and all(_row_by_row(s, batch, own) for statements in nests for s in statements):
            return batch
    return 1


def _own_rows(frame: Frame, batch: int) -> dict[str, int]:
    """Elements of one row in all memory that steps share, by name; nothing where some of it does not fall into rows."""
    own: dict[str, int] = {}
    for state in frame.states:
        own |= dict.fromkeys(
            (frame.name(state) + suffix for suffix in ("", "_next", "_memory")), elements(state) // batch
        )
    for stage in frame.step.stages:
        own[frame.name(stage.result)] = elements(stage.result) // batch
    shared = [elements(v) for v in (*frame.states, *(s.result for s in frame.step.stages))]
    multiplied = [p.left.shape[0] for p in frame.step.stages if isinstance(p, Product)]
    return {} if any(size % batch for size in (*shared, *multiplied)) else own


def _row_by_row(statement: Statement, batch: int, own: Mapping[str, int]) -> bool:
    """Whether a nest's outer loop runs over rows of the batch, and touches what rows share only in its own row."""
    if isinstance(statement, Scope):
        scratch = [s.buffer for s in statement.body if isinstance(s, Declare)]
        if any(buffer.extent % batch for buffer in scratch):
            return False
        own = {**own, **{buffer.name: buffer.extent // batch for buffer in scratch}}
        return all(_row_by_row(s, batch, own) for s in statement.body)
    if not isinstance(statement, Loop):
        return not isinstance(statement, (Load, Store)) or statement.buffer.name not in own
    if statement.extent % batch or _reduces_rows(statement):
        return False
    trips = statement.extent // batch
    for access, extents in _accesses(statement, {}):
        row = own.get(access.buffer.name)
        if row is None:
            continue
        step = access.offset.coefficient(statement.atom)
        low, high = _range(access.offset, statement.atom, extents)
        if step * trips != row or low < 0 or high + step * (trips - 1) >= row:
            return False
        if isinstance(access, Load) and access.indirect:
            return False
    return True


def _reduces_rows(loop: Loop) -> bool:
    """Whether the loop adds to an accumulator that stands outside of it: to one of all its rows."""
    inside, added, stack = set(), set(), list(loop.body)
    while stack:
        statement = stack.pop()
        if isinstance(statement, (Loop, Scope)):
            stack += statement.body
        elif isinstance(statement, Accumulator):
            inside.add(statement.name)
        elif isinstance(statement, Accumulate):
            added.add(statement.accumulator.name)
    return not added <= inside


def _accesses(statement: Loop | Scope, outside: Mapping[str, int]) -> Iterator[tuple[Load | Store, Mapping[str, int]]]:
    """Every access to memory inside, with the extents of the loops around it."""
    extents = {**outside, statement.atom: statement.extent} if isinstance(statement, Loop) else outside
    for inner in statement.body:
        if isinstance(inner, (Loop, Scope)):
            yield from _accesses(inner, extents)
        elif isinstance(inner, (Load, Store)):
            yield inner, extents


def _range(offset: Affine, row: str, extents: Mapping[str, int]) -> tuple[int, int]:
    """The smallest and largest offset inside a row."""
    reach = [c * (extents[a] - 1) for a, c in offset.terms if a != row]
    return offset.constant + sum(r for r in reach if r < 0), offset.constant + sum(r for r in reach if r > 0)


def _statements(statements: Sequence[Statement], depth: int, batch: int) -> list[str]:
    """Lines of nests; outer loops run over this thread's rows where a ``batch`` is shared out."""
    pad = _INDENT * depth
    lines: list[str] = []
    for statement in statements:
        if isinstance(statement, Scope):
            lines += [f"{pad}{{", *_statements(statement.body, depth + 1, batch), f"{pad}}}"]
            continue
        if batch == 1 or not isinstance(statement, Loop):
            lines += text_of([statement], depth)
            continue
        trips = statement.extent // batch
        first, last = (f"first_row * {trips}", f"last_row * {trips}") if trips > 1 else ("first_row", "last_row")
        if statement.kind == "vector":
            lines.append(f"{pad}#pragma omp simd")
        lines.append(f"{pad}for (int64_t {statement.atom} = {first}; {statement.atom} < {last}; ++{statement.atom}) {{")
        lines += text_of(statement.body, depth + 1)
        lines.append(f"{pad}}}")
    return lines
