"""Schedule of a loop kernel by hidden units: each thread computes its units for all rows, then waits at a barrier.

    for steps:
        for blocks of 16 units (this thread's):
            gates = h @ W                   all gates of these units, weights packed in the order of reads
            c, h  = f(gates, c)             while the sums are in cache
        wait                                the next step reads all of h

Each weight is read by one thread only, from its own cache. A step has one barrier, and one more for each product that
reads a value of the same step. Every result must have one element for each row and unit, and may read a product only at
its own unit, or a constant distance from it (the gates).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fuse.kernel.arithmetic.expressions import Expression
from fuse.kernel.arithmetic.extents import larger, smaller, varies
from fuse.kernel.arithmetic.index import ZERO, Affine, Index, NotAffine, Stride, offset
from fuse.kernel.cpu import cpp_types
from fuse.kernel.cpu.emit import text_of
from fuse.kernel.cpu.loop_frame import (
    ThreadFunction,
    Workspace,
    indented,
    packing,
    pointers,
    stage_memory,
    state_pointers,
    step_pointers,
    waiting,
)
from fuse.kernel.cpu.product_frame import ALIGNMENT, MOST_PANELS, PANEL
from fuse.kernel.elements import Builder
from fuse.kernel.ir import Buffer, For, Statement
from fuse.kernel.loops.loop_nests import Destination, Frame, lasts_of, multiplications, results_of, starts_of
from fuse.kernel.loops.loop_stages import Kept, StepProduct
from fuse.kernel.nest import Sink, store
from fuse.kernel.traversals import within_stage
from fuse.kernel.values import Gather, Input, Value

WORK_FOR_A_THREAD = 16_384
"""Multiplications in a step that pay for a thread; for fewer, the barrier takes longer."""
SCHEDULE = "weights packed once; threads share out the columns of results, and wait for one another in each step"
LARGEST_ON_STACK = 16_384
"""Most bytes of a block's sums on the stack of a thread; sums that a later phase reads are never there."""


@dataclass
class _Group:
    """Products of one phase with the same left operand, which share a loop over its columns.

    ``panels`` are the panels that are read, in the order of packing: (product, distance of the column from the unit).
    ``outlives``: whether a later phase reads the sums.
    """

    number: int
    phase: int
    left: Input
    panels: list[tuple[StepProduct, int]] = field(default_factory=list)
    outlives: bool = False

    def sums(self, rows: int) -> int:
        """Number of elements in the sums of a block."""
        return len(self.panels) * rows * PANEL

    def on_stack(self, rows: int) -> bool:
        """Whether the sums of one block are on the stack: no later phase reads them, and they are small."""
        return not (varies(rows) or self.outlives) and self.sums(rows) * self.left.dtype.itemsize <= LARGEST_ON_STACK

    def panel(self, product: StepProduct, distance: int) -> int:
        """The index of a panel; a new panel is added to those that are packed."""
        if (product, distance) not in self.panels:
            self.panels.append((product, distance))
        return self.panels.index((product, distance))


@dataclass(frozen=True)
class _Domain:
    """The iteration space of every nest: rows of the batch, and units in blocks of 16."""

    rows: int
    units: int

    @property
    def blocks(self) -> int:
        return -(-self.units // PANEL)

    @property
    def index(self) -> Index:
        unit = Affine.of("block") * PANEL + Affine.of("lane")
        return (Affine.of("row") if self.rows > 1 else ZERO, unit)


@dataclass
class _TileBuilder(Builder):
    """Builder of elements at a row and a unit; reads sums of products in the layout of C++ ``fuse_product``."""

    domain: _Domain = _Domain(1, 1)
    phase: int = 0
    sums: dict[int, tuple[StepProduct, _Group]] = field(default_factory=dict)
    in_progress: dict[int, Kept] = field(default_factory=dict)

    def _compute(self, value: Value, index: Index, guard: Expression | None) -> Expression:
        if isinstance(value, Input) and value.position in self.sums:
            return self._sum(*self.sums[value.position], index, guard)
        if isinstance(value, Input) and value.position in self.in_progress:
            if index != self.domain.index:
                raise NotAffine("a unit reads a value that another unit computes at the same time")
            return self.element(self.in_progress[value.position].value, index, guard)
        if isinstance(value, Gather):
            raise NotAffine("indexing by a tensor in a loop over units")
        return super()._compute(value, index, guard)

    def _sum(self, product: StepProduct, group: _Group, index: Index, guard: Expression | None) -> Expression:
        row, unit = self.domain.index
        distance = index[1] + unit * -1
        if index[0] != row or distance.terms:
            raise NotAffine("a unit reads the product at another unit")
        group.outlives |= group.phase < self.phase
        panel = group.panel(product, distance.constant)
        where = row * PANEL + Affine.of("lane") + panel * self.domain.rows * PANEL
        buffer = Buffer(f"sums_{group.number}", group.left.dtype, "scratch")
        return self._load(buffer, where, (), guard, buffer.name)


@dataclass(frozen=True)
class _Phase:
    """The work between two barriers: groups of products, then a nest over rows and units."""

    groups: tuple[_Group, ...]
    statements: tuple[Statement, ...]


def units_text(frame: Frame, name: str) -> ThreadFunction:
    """The function of one thread, called ``name``.

    Raises:
        NotAffine: the step does not suit this schedule; the message is a reason for the user.
    """
    if frame.spec.stop is not None:
        raise NotAffine("a loop that may end early runs on one thread")
    domain = _domain(frame)
    phases = _phases(frame, domain)
    groups = [g for p in phases for g in p.groups]
    workspace = Workspace()
    head = pointers(frame, workspace)
    stage_memory(frame, workspace, [s for s in frame.step.stages if isinstance(s, Kept)])
    for group in groups:
        panels, depth, real = len(group.panels), group.left.shape[1], group.left.dtype
        ctype = cpp_types.storage(real)
        workspace.take(f"weights_{group.number}", ctype, domain.blocks * panels * PANEL * depth, real.itemsize)
        sums = group.sums(domain.rows)
        if group.on_stack(domain.rows):
            workspace.lines.append(f"alignas({ALIGNMENT}) {ctype} sums_{group.number}[{sums}];")
        else:
            workspace.take(f"sums_{group.number}_memory", ctype, domain.blocks * sums, real.itemsize)
    share = [
        f"const int64_t first_block = {domain.blocks} * member / team->members;",
        f"int64_t last_block = {domain.blocks} * (member + 1) / team->members;",
    ]
    packed = [line for group in groups for line in _packed(frame, group, domain)]
    sources, start_names, starts = starts_of(frame)
    lines = [f"static int {name}_share(char *const *args, fuse_team *team, int64_t member) {{"]
    lines += indented(1, [*head, *workspace.lines, *share])
    lines += indented(
        1, ["for (int64_t block = first_block; block < last_block; ++block) {", *indented(1, packed), "}"]
    )
    lines += indented(1, _copied(sources, start_names, starts, domain))
    wait = waiting("block", domain.blocks)
    lines += indented(1, [*wait, "for (int64_t t = 0; t < steps; ++t) {"])
    lines += indented(2, step_pointers(frame))
    for phase in phases:
        text = _phase_text(frame, phase, groups, domain)
        named = any(not isinstance(statement, For) for statement in phase.statements)  # phases may use equal names
        lines += [*indented(2, ["{"]), *indented(1, text), *indented(2, ["}"])] if named else text
        lines += indented(2, wait)
    lines += indented(1, ["}"])
    for state in frame.states:
        lines += indented(1, state_pointers(frame, state, "steps")[:1])
    lines += indented(1, _copied(frame.states, frame.step.names, lasts_of(frame), domain))
    lines += ["    return 0;", "}"]
    threads = larger(1, smaller(domain.blocks, multiplications(frame) // WORK_FOR_A_THREAD))
    return ThreadFunction("\n".join(lines) + "\n", workspace.size, threads, SCHEDULE)


def _domain(frame: Frame) -> _Domain:
    shapes = {r.shape for r in frame.step.results} | {s.value.shape for s in frame.step.stages if isinstance(s, Kept)}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise NotAffine("the step's results do not all have one shape, rows by units")
    if not any(isinstance(s, StepProduct) for s in frame.step.stages):
        raise NotAffine("a step has no product whose units threads could share")
    return _Domain(*next(iter(shapes)))


# ---- phases --------------------------------------------------------------------------------------------------------


def _phases(frame: Frame, domain: _Domain) -> list[_Phase]:
    """The step's products and nests by phase; a product is one phase after its left operand."""
    step = frame.step
    computed: dict[int, int] = {}  # input position of a stage's result -> its phase
    groups: dict[tuple[int, int], _Group] = {}
    sums: dict[int, tuple[StepProduct, _Group]] = {}
    kept: dict[int, list[Kept]] = {}
    for stage in step.stages:
        if isinstance(stage, Kept):
            read = [v.position for v in within_stage([stage.value], through_reductions=True) if isinstance(v, Input)]
            phase = max((computed[p] for p in read if p in computed), default=-1)
            kept.setdefault(phase, []).append(stage)
        else:
            if stage.left.position in sums:
                raise NotAffine("a product of a product")
            phase = computed.get(stage.left.position, -1) + 1
            key = (phase, stage.left.position)
            group = groups.setdefault(key, _Group(len(groups), phase, stage.left))
            sums[stage.result.position] = (stage, group)
        computed[stage.result.position] = phase
    found = []
    last = max(computed.values())
    for phase in range(min(computed.values()), last + 1):
        destinations = [Destination(k.value, frame.name(k.result), k.result.strides) for k in kept.get(phase, [])]
        destinations += results_of(frame) if phase == last else []
        readable = {p: s for p, s in sums.items() if s[1].phase <= phase}
        now = {k.result.position: k for k in kept.get(phase, [])}
        statements = _nest(frame, domain, phase, destinations, readable, now)
        found.append(_Phase(tuple(g for g in groups.values() if g.phase == phase), statements))
    return found


def _nest(
    frame: Frame,
    domain: _Domain,
    phase: int,
    destinations: Sequence[Destination],
    sums: dict[int, tuple[StepProduct, _Group]],
    in_progress: dict[int, Kept],
) -> tuple[Statement, ...]:
    """Loops over blocks, rows and lanes that store ``destinations``."""
    step = frame.step
    inputs = [Buffer(step.names[i], v.dtype, "input") for i, v in enumerate(step.inputs)]
    extents = {"block": domain.blocks, "row": domain.rows, "lane": PANEL}
    builder = _TileBuilder(
        inputs, extents, dict(step.value_names), domain=domain, phase=phase, sums=sums, in_progress=in_progress
    )
    atoms = ("block", "row", "lane") if domain.rows > 1 else ("block", "lane")
    for atom in atoms:
        builder.open(atom, "vector" if atom == "lane" else "serial")
    targets = [Sink(d.value, Buffer(d.name, d.value.dtype, "output"), d.strides) for d in destinations]
    store(builder, [(target, domain.index) for target in targets])
    for _ in atoms:
        builder.close()
    return tuple(builder.blocks[0].statements)


# ---- text ----------------------------------------------------------------------------------------------------------


def _chunks(group: _Group) -> list[range]:
    """Panels that are computed together: chunks of equal size, of at most ``MOST_PANELS``."""
    count = len(group.panels)
    shares = -(-count // MOST_PANELS)
    return [range(count * i // shares, count * (i + 1) // shares) for i in range(shares)]


def _packed(frame: Frame, group: _Group, domain: _Domain) -> list[str]:
    """The calls that pack a block of the weights of ``group``."""
    depth = group.left.shape[1]
    size, lines = depth * len(group.panels) * PANEL, []
    for chunk in _chunks(group):
        target = f"weights_{group.number} + block * {size}" + _plus(chunk.start * depth * PANEL)
        for number, panel in enumerate(chunk):
            product, distance = group.panels[panel]
            column = f"{PANEL} * block" + _plus(distance)
            matrix, source = product.right, frame.name(product.right.source)
            columns = min(distance + domain.units, product.result.shape[1])
            lines.append(packing(target, len(chunk), number, matrix, source, depth, column, columns))
    return lines


def _plus(number: int) -> str:
    return f" + {number}" if number else ""


def _phase_text(frame: Frame, phase: _Phase, groups: Sequence[_Group], domain: _Domain) -> list[str]:
    """The lines of one phase of a step: for each block, its products and then the nest."""
    lines: list[str] = []
    for statement in phase.statements:
        if not isinstance(statement, For) or statement.atom != "block":
            lines += text_of([statement], 2)
            continue
        lines += indented(2, ["for (int64_t block = first_block; block < last_block; ++block) {"])
        if domain.units % PANEL:
            rest = f"{domain.units} - {PANEL} * block"
            lines += indented(3, [f"const int64_t lanes = {rest} < {PANEL} ? {rest} : {PANEL};"])
        for group in groups:
            if group.on_stack(domain.rows):
                continue
            place = f"{'block' if group.outlives else 'first_block'} * {group.sums(domain.rows)}"
            ctype = cpp_types.storage(group.left.dtype)
            lines += indented(3, [f"{ctype} *sums_{group.number} = sums_{group.number}_memory + {place};"])
        for group in phase.groups:
            lines += indented(3, _multiplied(frame, group, domain))
        lines += _rows_and_lanes(statement.body, domain, 3)
        lines += indented(2, ["}"])
    return lines


def _multiplied(frame: Frame, group: _Group, domain: _Domain) -> list[str]:
    depth, rows = group.left.shape[1], domain.rows
    size = depth * len(group.panels) * PANEL
    left = f"{frame.name(group.left)}, {group.left.strides[0]}"
    lines = []
    for chunk in _chunks(group):
        weights = f"weights_{group.number} + block * {size}" + _plus(chunk.start * depth * PANEL)
        sums = f"sums_{group.number}" + _plus(chunk.start * rows * PANEL)
        places = f"{sums}, {PANEL}, {rows * PANEL}, {left}, {weights}, {depth}"
        if varies(rows):
            lines.append(f"fuse_product_even<{len(chunk)}>({places}, {rows});")
        else:
            lines.append(f"fuse_product<{len(chunk)}, {rows}>({places});")
    return lines


def _rows_and_lanes(statements: Sequence[Statement], domain: _Domain, depth: int) -> list[str]:
    """The lines of the loops inside of the loop over blocks; the last block may have fewer lanes."""
    lines: list[str] = []
    for statement in statements:
        if not isinstance(statement, For):
            lines += text_of([statement], depth)
        elif statement.atom == "row":
            lines += indented(depth, [f"for (int64_t row = 0; row < {domain.rows}; ++row) {{"])
            lines += _rows_and_lanes(statement.body, domain, depth + 1)
            lines += indented(depth, ["}"])
        else:
            lanes = "lanes" if domain.units % PANEL else str(PANEL)
            lines += indented(depth, ["#pragma omp simd", f"for (int64_t lane = 0; lane < {lanes}; ++lane) {{"])
            lines += text_of(statement.body, depth + 1)
            lines += indented(depth, ["}"])
    return lines


def _copied(
    sources: Sequence[Input], names: Mapping[int, str], destinations: Sequence[Destination], domain: _Domain
) -> list[str]:
    """Lines that copy this thread's units of states."""
    lines = [
        f"for (int64_t row = 0; row < {domain.rows}; ++row) {{",
        f"    const int64_t last_unit = {PANEL} * last_block < {domain.units} ? {PANEL} * last_block : {domain.units};",
        f"    for (int64_t unit = {PANEL} * first_block; unit < last_unit; ++unit) {{",
    ]
    for source, to in zip(sources, destinations, strict=True):
        read = f"{names[source.position]}[{_address(source.strides)}]"
        lines.append(f"        {to.name}[{_address(to.strides)}] = {read};")
    return [*lines, "    }", "}"]


def _address(strides: Sequence[Stride]) -> str:
    return str(offset((Affine.of("row"), Affine.of("unit")), strides))
