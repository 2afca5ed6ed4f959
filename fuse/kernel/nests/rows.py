"""The loop nest of outputs with reductions (row-reduction schedule): one row at a time, in stages.

    reduced dimension contiguous                     reduced dimension strided: a block of rows at a time, in lanes
    for rows (parallel):                             for blocks of rows (parallel):
        for columns (vector, reduces): stage 0           for columns: for lanes (vector): stage 0
        for columns (vector, reduces): stage 1           for columns: for lanes (vector): stage 1
        for columns (vector): compute, store             for columns: for lanes (vector): compute, store

Stage ``n`` has the reductions that depend on a chain of ``n`` others. The row stays in cache between stages. Costly
elements that two stages need are stored in a scratch row. Lanes have one accumulator for each row, in a small array, so
that memory is read along its contiguous dimension.

Results that are summed as they are (a gradient and its sum, for a bias) are stored where they are summed:

    for rows: for columns (vector, reduces): d = where(y <= 0, 0, dy);  store d;  sum d
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fuse.graph.strides import contiguous_strides
from fuse.kernel.arithmetic.dtypes import register
from fuse.kernel.arithmetic.expressions import Literal, Variable, position, select
from fuse.kernel.arithmetic.extents import always_equal, is_multiple, is_one
from fuse.kernel.arithmetic.index import ZERO, Affine, Index, NotAffine, SplitNeeded, offset, reshape
from fuse.kernel.ir import (
    Accumulate,
    Accumulator,
    Buffer,
    Declare,
    Let,
    Load,
    Statement,
    Store,
    better,
    combined,
    identity,
)
from fuse.kernel.memory_order import strides_of_loops
from fuse.kernel.nest import Dimension, Sink, builder_for, store
from fuse.kernel.traversals import WORTH_KEEPING, cost_within_stage, stages, within_stage
from fuse.kernel.values import Map, Reduce, Reindex, Value

SCRATCH_BYTES = 128 * 1024
"""Most bytes in all scratch rows of a nest, which are on the stack of a thread."""
LARGEST_VECTOR = 16
"""Most elements of a vector. The last vector of a row is stored whole, so that scratch rows are padded by one less."""
MIN_LANES, MAX_LANES = 8, 128
"""Fewest and most neighbouring rows of a block in a reduction over a strided dimension."""


@dataclass(frozen=True)
class _LaneReduction:
    """A reduction in lanes: the array of accumulators, and for arg-reductions the array of positions."""

    value: Reduce
    best: Buffer
    at: Buffer | None


class RowNest:
    """Builder of the loops for ``targets``, whose values contain ``reductions``."""

    def __init__(
        self,
        targets: list[Sink],
        inputs: list[Buffer],
        names: Mapping[int, str],
        reductions: list[Reduce],
    ) -> None:
        self.targets = targets
        self.inputs = inputs
        self.names = names
        self.reductions = reductions
        self.anchor = max(reductions, key=lambda r: math.prod(r.source.shape))
        self.shape = self.anchor.source.shape
        self.points = math.prod(self.shape)
        self.rows = math.prod(self.anchor.shape)

    def build(self, dimensions: list[Dimension]) -> list[Statement]:
        """The loops over these dimensions.

        Raises:
            SplitNeeded, NotAffine: see :mod:`fuse.kernel.arithmetic.index`.
        """
        self.builder = builder = builder_for(dimensions, self.inputs, self.names)
        self.index = tuple(d.index() for d in dimensions)
        strides = strides_of_loops(self.anchor.source, self.index, builder.extents)
        self.lane = _lane(dimensions, self.anchor, strides)
        outer = [a for d, dim in enumerate(dimensions) if d not in self.anchor.dims for a in dim.atoms]
        outer = [a for a in outer if a != self.lane]
        self.reduced = [a for d in self.anchor.dims for a in dimensions[d].atoms]
        outer.sort(key=lambda atom: -strides.get(atom, 0))
        if not any(reduction.op in ("argmax", "argmin") for reduction in self.reductions):  # they find the first
            self.reduced.sort(key=lambda atom: -strides.get(atom, 0))
        self.begin()
        for atom in outer:
            builder.open(atom, "parallel")
        order = stages(self.reductions)
        kept = self._worth_keeping(order)
        self.early = [t for t in self._full() if len(order) == 1 and _is_reduced_alone(t.value, order[0])]
        for number, stage in enumerate(order):
            keep = [value for value, first in kept if first == number]
            if self.lane:
                self._stage_in_lanes(stage, keep)
            else:
                self._stage(stage, keep)
        self._store_results()
        for _ in outer:
            builder.close()
        return builder.blocks[0].statements

    def begin(self) -> None:
        """Declare values that are in memory before the first row; for subclasses, does nothing here."""

    # ---- loops over a row --------------------------------------------------------------------------------------------

    def _open_row(self) -> int:
        """Open the loops over the elements of a row (or of a block of rows); returns the number of loops."""
        atoms = [*self.reduced, *([self.lane] if self.lane else [])]
        for i, atom in enumerate(atoms):
            self.builder.open(atom, "vector" if i == len(atoms) - 1 else "serial")
        return len(atoms)

    def _stage(self, stage: list[Reduce], keep: list[Value]) -> None:
        """Append one loop for all reductions of a stage, vectorised over the row; stores the values ``keep``."""
        builder = self.builder
        accumulators = [Accumulator(builder.fresh(f"{v.op}_so_far"), register(v.source.dtype), v.op) for v in stage]
        for accumulator in accumulators:
            builder.add(accumulator)
        scratch = [(value, self._declare_scratch(value)) for value in keep]
        depth = len(builder.blocks) - 1
        opened = self._open_row()
        for value, accumulator in zip(stage, accumulators, strict=True):
            at = self._source_index(value)
            builder.add(Accumulate(accumulator, builder.element(value.source, at), _position_in_row(value, at)))
        self._store_full(self.early)
        self._keep(scratch)
        for i in range(opened):
            builder.close(tuple(accumulators) if i == 0 else ())
        self._use_kept(scratch)
        for value, accumulator in zip(stage, accumulators, strict=True):
            result = Let(builder.fresh(value.op), accumulator.result)
            builder.add(result)
            builder.depths[result.name] = depth
            builder.results[id(value)] = (result.variable, self._result_index(value))

    # ---- loops over lanes --------------------------------------------------------------------------------------------

    def _stage_in_lanes(self, stage: list[Reduce], keep: list[Value]) -> None:
        """Append one loop for all reductions of a stage, vectorised over neighbouring rows; stores the values
        ``keep``."""
        assert self.lane
        running = [self._start_in_lanes(value) for value in stage]
        scratch = [(value, self._declare_scratch(value)) for value in keep]
        opened = self._open_row()
        for state in running:
            self._combine_in_lanes(state)
        self._store_full(self.early)
        self._keep(scratch)
        for _ in range(opened):
            self.builder.close()
        self._use_kept(scratch)
        for state in running:
            held = state.at or state.best
            self.builder.stored[id(state.value)] = (held, Affine.of(self.lane), self._result_index(state.value))
        self._keep_row_values()

    def _start_in_lanes(self, value: Reduce) -> _LaneReduction:
        builder, lane = self.builder, self.lane
        assert lane
        dtype = register(value.source.dtype)
        best = self._declare(f"{value.op}_so_far", dtype, builder.extents[lane])
        positions = value.op in ("argmax", "argmin")
        at = self._declare(f"{value.op}_at", torch.int64, builder.extents[lane]) if positions else None
        builder.open(lane, "vector")
        builder.add(Store(best, Affine.of(lane), identity(value.op, dtype)))
        if at:
            builder.add(Store(at, Affine.of(lane), Literal(torch.int64, -1)))
        builder.close()
        return _LaneReduction(value, best, at)

    def _combine_in_lanes(self, state: _LaneReduction) -> None:
        builder, lane = self.builder, self.lane
        assert lane
        where, value = Affine.of(lane), state.value
        index = self._source_index(value)
        element = builder.element(value.source, index)
        so_far = self._read(state.best, where)
        if state.at is None:
            builder.add(Store(state.best, where, combined(value.op, so_far, element)))
            return
        at = self._read(state.at, where)
        found = Let(builder.fresh("better"), better(value.op, element, so_far, at))
        builder.add(found)
        builder.add(Store(state.best, where, select(found.variable, element, so_far)))
        builder.add(Store(state.at, where, select(found.variable, position(_position_in_row(value, index)), at)))

    def _read(self, buffer: Buffer, where: Affine) -> Variable:
        load = Load(self.builder.fresh(f"{buffer.name}_lane"), buffer, where)
        self.builder.add(load)
        self.builder.depths[load.name] = len(self.builder.blocks) - 1
        return load.variable

    def _keep_row_values(self) -> None:
        """Compute values that depend on the stage's results alone (a mean, a reciprocal) once for each row."""
        builder, lane = self.builder, self.lane
        assert lane
        ready = {id(r) for r in self.reductions if id(r) in builder.stored}
        values = within_stage([t.value for t in self.targets], through_reductions=True)
        wanted = {
            id(v.source): v.source
            for v in values
            if isinstance(v, Reindex)
            and isinstance(v.source, Map)
            and always_equal(math.prod(v.source.shape), self.rows)
        }
        for value in wanted.values():
            below = within_stage([value], through_reductions=True)
            needed = [v for v in below if isinstance(v, Reduce)]
            if id(value) in builder.stored or not needed or any(id(v) not in ready for v in needed):
                continue
            buffer = self._declare(self.names.get(id(value), "row_value"), register(value.dtype), builder.extents[lane])
            builder.open(lane, "vector")
            at = self._row_index(value)
            builder.add(Store(buffer, Affine.of(lane), builder.element(value, at)))
            builder.close()
            builder.stored[id(value)] = (buffer, Affine.of(lane), at)

    # ---- results -----------------------------------------------------------------------------------------------------

    def _store_results(self) -> None:
        full = [t for t in self._full() if t not in self.early]
        rows = [t for t in self.targets if not always_equal(math.prod(t.value.shape), self.points)]
        if rows:
            if self.lane:
                self.builder.open(self.lane, "vector")
            store(self.builder, [(t, self._row_index(t.value)) for t in rows])
            if self.lane:
                self.builder.close()
        if full:
            opened = self._open_row()
            self._store_full(full)
            for _ in range(opened):
                self.builder.close()

    def _full(self) -> list[Sink]:
        """The results that have an element for each element of the rows."""
        return [t for t in self.targets if always_equal(math.prod(t.value.shape), self.points)]

    def _store_full(self, targets: Sequence[Sink]) -> None:
        store(self.builder, [(t, self._full_index(t.value)) for t in targets])

    def _full_index(self, value: Value) -> Index:
        return reshape(self.index, self.shape, value.shape, self.builder.extents)

    def _row_index(self, value: Value) -> Index:
        """The index of a result that has one element for each row."""
        kept = self.anchor.shape
        if self.rows != math.prod(value.shape):
            raise NotAffine("an output has neither the shape of the rows nor one element a row")
        row = tuple(ZERO if d in self.anchor.dims else i for d, i in enumerate(self.index))
        return reshape(row, kept, value.shape, self.builder.extents)

    def _source_index(self, value: Reduce) -> Index:
        """The index into a reduction's source, in terms of the row's loops.

        Raises:
            NotAffine: these loops do not run over the reduced dimensions exactly once.
        """
        source = value.source.shape
        if math.prod(source) != self.points:
            raise NotAffine("two reductions run over different numbers of elements")
        at = reshape(self.index, self.shape, source, self.builder.extents)
        inner = set(self.reduced)
        for d, where in enumerate(at):
            if any((atom in inner) != (d in value.dims) for atom in where.atoms()):
                raise NotAffine("two reductions run over different dimensions")
        if math.prod(source[d] for d in value.dims) != math.prod(self.builder.extents[a] for a in self.reduced):
            raise NotAffine("two reductions run over different dimensions")
        return at

    def _result_index(self, value: Reduce) -> Index:
        return tuple(ZERO if d in value.dims else i for d, i in enumerate(self._source_index(value)))

    # ---- scratch -----------------------------------------------------------------------------------------------------

    def _declare(self, hint: str, dtype: torch.dtype, extent: int) -> Buffer:
        buffer = Buffer(self.builder.fresh(hint), dtype, "scratch", extent)
        self.builder.add(Declare(buffer))
        return buffer

    def _row_atoms(self) -> list[str]:
        return [*self.reduced, *([self.lane] if self.lane else [])]

    def _declare_scratch(self, value: Value) -> Buffer:
        extents = [self.builder.extents[a] for a in self._row_atoms()]
        whole = bool(extents) and is_multiple(extents[-1], LARGEST_VECTOR)
        extent = math.prod(extents) + (0 if whole else LARGEST_VECTOR - 1)  # the last vector is stored whole
        return self._declare(f"{self.names.get(id(value), 'kept')}_row", register(value.dtype), extent)

    def _scratch_offset(self) -> Affine:
        atoms = self._row_atoms()
        return offset(tuple(Affine.of(a) for a in atoms), contiguous_strides([self.builder.extents[a] for a in atoms]))

    def _keep(self, scratch: Sequence[tuple[Value, Buffer]]) -> None:
        for value, buffer in scratch:
            element = self.builder.element(value, self._full_index(value))
            self.builder.add(Store(buffer, self._scratch_offset(), element))

    def _use_kept(self, scratch: Sequence[tuple[Value, Buffer]]) -> None:
        for value, buffer in scratch:
            self.builder.stored[id(value)] = (buffer, self._scratch_offset(), self._full_index(value))

    def _worth_keeping(self, order: list[list[Reduce]]) -> list[tuple[Value, int]]:
        """Costly values that several stages need, each with the first of them, as long as they fit
        ``SCRATCH_BYTES``."""
        uses: dict[int, set[int]] = {}
        values: dict[int, Value] = {}
        roots = [[r.source for r in stage] for stage in order] + [[t.value for t in self.targets]]
        for number, members in enumerate(roots):
            for value in within_stage(members):
                uses.setdefault(id(value), set()).add(number)
                values[id(value)] = value
        row = math.prod(self.builder.extents[a] for a in self._row_atoms())
        kept: list[tuple[Value, int]] = []
        covered: set[int] = set()
        budget = SCRATCH_BYTES
        for key in reversed(list(values)):  # parents before children
            value = values[key]
            covers = isinstance(value, Map) and always_equal(math.prod(value.shape), self.points)
            wanted = len(uses[key]) > 1 and covers
            if key in covered or not wanted or cost_within_stage(value) < WORTH_KEEPING:
                continue
            size = row * value.dtype.itemsize
            if size > budget or min(uses[key]) >= len(order):
                continue
            budget -= size
            kept.append((value, min(uses[key])))
            covered.update(id(v) for v in within_stage([value]))
        return kept


def _lane(dimensions: Sequence[Dimension], anchor: Reduce, strides: Mapping[str, int]) -> str | None:
    """The loop over neighbouring rows to vectorise, where these, and not the elements of a row, are contiguous; or
    None.

    ``strides`` are the strides of loops in memory; if empty, the last dimension is contiguous.

    Raises:
        SplitNeeded: the loop is longer than ``MAX_LANES``; a block of it is needed.
    """
    last = next((d for d in reversed(range(len(dimensions))) if dimensions[d].atoms), None)
    if strides:
        loops = [(d, dim.atoms[-1]) for d, dim in enumerate(dimensions) if dim.atoms]
        last = min(loops, key=lambda loop: (strides[loop[1]] or math.inf, loop[0]))[0]
    if last is None or last in anchor.dims:
        return None
    atom, extent = dimensions[last].atoms[-1], dimensions[last].extents[-1]
    if extent <= MAX_LANES:
        return None if is_one(extent) else atom
    blocks = [n for n in range(MIN_LANES, MAX_LANES + 1) if is_multiple(extent, n)]
    block = max(blocks, key=lambda n: (n % 16 == 0, n), default=0)  # whole vectors before long blocks
    if not block:
        return None
    raise SplitNeeded(atom, block)


def _is_reduced_alone(value: Value, reductions: Sequence[Reduce]) -> bool:
    """Whether all ``reductions`` read nothing but ``value``, element by element. Then its memory may be an input's."""
    for reduction in reductions:
        source = reduction.source
        while source is not value:
            if not isinstance(source, Map) or len(source.args) != 1:
                return False
            (source,) = source.args
    return True


def _position_in_row(value: Reduce, at: Index) -> Affine:
    """The result of an arg-reduction for the element at ``at``: its row-major index over the reduced dimensions."""
    strides = contiguous_strides([value.source.shape[d] for d in value.dims])
    return offset(tuple(at[d] for d in value.dims), strides)
