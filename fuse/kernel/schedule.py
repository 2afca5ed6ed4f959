"""Choose the loops of a kernel.

    outputs without reductions      one nest an output shape:    for rows (parallel): for columns (vector): load, compute, store
    outputs with reductions         one row at a time:           for rows (parallel):
                                                                     for columns (vector, reduces): ...      stage 0
                                                                     for columns (vector, reduces): ...      stage 1
                                                                     for columns (vector): compute, store

The row stays in cache between its stages; a costly element that two stages need is kept in a scratch row. A reshape that does not follow
the loops splits one of them and the schedule is tried again (see :mod:`fuse.kernel.index`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fuse.kernel import ctypes
from fuse.kernel.elements import Builder
from fuse.kernel.index import ZERO, Affine, Index, NotAffine, SplitNeeded, contiguous_strides, offset, reshape
from fuse.kernel.ir import Accumulate, Accumulator, Buffer, Declare, KernelBody, Let, Store
from fuse.kernel.tidy import tidy
from fuse.kernel.values import Concat, Map, Output, Program, Reduce, Reindex, Shape, Value

SCRATCH_BYTES = 128 * 1024
WORTH_KEEPING = 8  # cost from which an element is kept rather than computed again in a later stage
MAX_SPLITS = 32


@dataclass(frozen=True)
class Dimension:
    """One dimension of the domain: its loop variables, outermost first, and their extents."""

    atoms: tuple[str, ...]
    extents: tuple[int, ...]

    def index(self) -> Affine:
        total = ZERO
        for atom, stride in zip(self.atoms, contiguous_strides(self.extents), strict=True):
            total = total + Affine.of(atom) * stride
        return total

    def split(self, atom: str, inner: int) -> Dimension:
        where = self.atoms.index(atom)
        extent = self.extents[where]
        atoms = (*self.atoms[:where], f"{atom}o", f"{atom}i", *self.atoms[where + 1 :])
        return Dimension(atoms, (*self.extents[:where], extent // inner, inner, *self.extents[where + 1 :]))


def schedule(program: Program) -> KernelBody:
    """The loops of a whole region.

    Raises:
        NotAffine: the region has no such loops; the message is a reason.
    """
    input_buffers = tuple(_argument(f"in{i}", v.dtype, "input") for i, v in enumerate(program.inputs))
    output_buffers = tuple(_argument(f"out{i}", o.value.dtype, "output") for i, o in enumerate(program.outputs))
    input_buffers = tuple(_renamed(b, program.names.get(i)) for i, b in enumerate(input_buffers))
    statements = []
    for group in _groups(program.outputs):
        nest = _Nest([(program.outputs[i], output_buffers[i]) for i in group], list(input_buffers), program)
        statements += nest.build()
    return KernelBody(input_buffers, output_buffers, tuple(tidy(statements)), program.lines)


def _argument(name: str, dtype: object, role: str) -> Buffer:
    return Buffer(name, ctypes.storage(dtype), role)  # type: ignore[arg-type]


def _renamed(buffer: Buffer, name: str | None) -> Buffer:
    return Buffer(name, buffer.ctype, buffer.role) if name else buffer


def _groups(outputs: Sequence[Output]) -> list[list[int]]:
    """Outputs that share a nest: all that contain reductions together, the others by shape and order of strides."""
    with_reductions: list[int] = []
    by_shape: dict[tuple[Shape, tuple[int, ...]], list[int]] = {}
    reducing = [bool(reductions_below([o.value])) for o in outputs]
    full = max((math.prod(r.source.shape) for o in outputs for r in reductions_below([o.value])), default=-1)
    for i, output in enumerate(outputs):
        if reducing[i] or (full == math.prod(output.value.shape) and not isinstance(output.value, Concat)):
            with_reductions.append(i)
        elif isinstance(output.value, Concat):
            by_shape[(output.value.shape, (i,))] = [i]
        else:
            by_shape.setdefault((output.value.shape, _order(output)), []).append(i)
    return [*([with_reductions] if with_reductions else []), *by_shape.values()]


def _order(output: Output) -> tuple[int, ...]:
    """Dimensions from the largest stride to the smallest: the order of the loops."""
    rank = len(output.value.shape)
    return tuple(sorted(range(rank), key=lambda d: (-output.strides[d] if output.value.shape[d] > 1 else -math.inf, d)))


def reductions_below(values: Iterable[Value]) -> list[Reduce]:
    """Every reduction below ``values``, each after those that it needs."""
    found: list[Reduce] = []
    seen: set[int] = set()

    def visit(value: Value) -> None:
        stack: list[tuple[Value, bool]] = [(value, False)]
        while stack:
            current, done = stack.pop()
            if done:
                if isinstance(current, Reduce):
                    found.append(current)
                continue
            if id(current) in seen:
                continue
            seen.add(id(current))
            stack.append((current, True))
            stack.extend((child, False) for child in reversed(children(current)))

    for value in values:
        visit(value)
    return found


def children(value: Value) -> tuple[Value, ...]:
    """The values that ``value`` is computed from."""
    match value:
        case Map():
            return value.args
        case Reindex() | Reduce():
            return (value.source,)
        case Concat():
            return value.pieces
        case _:
            parts = [getattr(value, name, None) for name in ("source", "table", "positions")]
            return tuple(p for p in parts if isinstance(p, Value))


class _Nest:
    """One group of outputs, scheduled together; ``build`` retries with split loops until every index is affine."""

    def __init__(self, outputs: list[tuple[Output, Buffer]], inputs: list[Buffer], program: Program) -> None:
        self.outputs = outputs
        self.inputs = inputs
        self.program = program
        self.reductions = reductions_below(o.value for o, _ in outputs)
        self.anchor = max(self.reductions, key=lambda r: math.prod(r.source.shape), default=None)

    def build(self) -> list:  # type: ignore[type-arg]
        if self.anchor is None and isinstance(self.outputs[0][0].value, Concat):
            return self._build_pieces()
        shape = self.anchor.source.shape if self.anchor else self.outputs[0][0].value.shape
        dimensions = [
            Dimension((f"i{d}",), (extent,)) if extent != 1 else Dimension((), ()) for d, extent in enumerate(shape)
        ]
        for _ in range(MAX_SPLITS):
            try:
                return self._rows(dimensions) if self.anchor else self._points(dimensions)
            except SplitNeeded as need:
                dimensions = [d.split(need.atom, need.inner) if need.atom in d.atoms else d for d in dimensions]
        raise NotAffine("its loops would have to be split too often")

    def _build_pieces(self) -> list:  # type: ignore[type-arg]
        """A concatenation is one nest a piece, each stored in its place."""
        output, buffer = self.outputs[0]
        value = output.value
        assert isinstance(value, Concat)
        statements, start = [], 0
        for piece in value.pieces:
            part = _Nest([(Output(piece, output.strides), buffer)], self.inputs, self.program)
            part.store_offset = start * output.strides[value.dim]
            statements += part.build()
            start += piece.shape[value.dim]
        return statements

    store_offset = 0

    def _builder(self, dimensions: Sequence[Dimension]) -> Builder:
        extents = {a: e for d in dimensions for a, e in zip(d.atoms, d.extents, strict=True)}
        return Builder(self.inputs, extents, self.program.value_names)

    # ---- pointwise -----------------------------------------------------------------------------------------------------------

    def _points(self, dimensions: list[Dimension]) -> list:  # type: ignore[type-arg]
        builder = self._builder(dimensions)
        order = _order(self.outputs[0][0])
        atoms = [a for d in order for a in dimensions[d].atoms]
        for i, atom in enumerate(atoms):
            builder.open(atom, "vector" if i == len(atoms) - 1 else "parallel")
        index = tuple(d.index() for d in dimensions)
        self._store(builder, [(output, buffer, index) for output, buffer in self.outputs])
        for _ in atoms:
            builder.close()
        return builder.blocks[0].statements

    def _store(self, builder: Builder, stores: list[tuple[Output, Buffer, Index]]) -> None:
        """Compute every element before the first store: an output may be the memory of an input that is still to be read."""
        names = [builder.element(output.value, index) for output, _, index in stores]
        for name, (output, buffer, index) in zip(names, stores, strict=True):
            builder.add(Store(buffer, offset(index, output.strides) + self.store_offset, name))

    # ---- rows ----------------------------------------------------------------------------------------------------------------

    def _rows(self, dimensions: list[Dimension]) -> list:  # type: ignore[type-arg]
        anchor = self.anchor
        assert anchor is not None
        builder = self._builder(dimensions)
        outer = [a for d, dim in enumerate(dimensions) if d not in anchor.dims for a in dim.atoms]
        inner = [a for d in anchor.dims for a in dimensions[d].atoms]
        index = tuple(d.index() for d in dimensions)
        shape = anchor.source.shape
        for atom in outer:
            builder.open(atom, "parallel")
        stages = _stages(self.reductions)
        kept = self._worth_keeping(stages, math.prod(builder.extents[a] for a in inner))
        for number, stage in enumerate(stages):
            self._reduce_stage(builder, stage, inner, index, shape, [v for v, first in kept if first == number])
        full = [(o, b) for o, b in self.outputs if math.prod(o.value.shape) == math.prod(shape)]
        rows = [(o, b) for o, b in self.outputs if (o, b) not in full]
        self._store(builder, [(o, b, self._row_index(builder, o.value, index, shape)) for o, b in rows])
        if full:
            self._open_inner(builder, inner)
            self._store(builder, [(o, b, reshape(index, shape, o.value.shape, builder.extents)) for o, b in full])
            for _ in inner:
                builder.close()
        for _ in outer:
            builder.close()
        return builder.blocks[0].statements

    def _open_inner(self, builder: Builder, inner: Sequence[str]) -> None:
        for i, atom in enumerate(inner):
            builder.open(atom, "vector" if i == len(inner) - 1 else "serial")

    def _row_index(self, builder: Builder, value: Value, index: Index, shape: Shape) -> Index:
        """The index of a result that has one element a row."""
        anchor = self.anchor
        assert anchor is not None
        kept = tuple(1 if d in anchor.dims else e for d, e in enumerate(shape))
        if math.prod(kept) != math.prod(value.shape):
            raise NotAffine("an output has neither the shape of the rows nor one element a row")
        row = tuple(ZERO if d in anchor.dims else i for d, i in enumerate(index))
        return reshape(row, kept, value.shape, builder.extents)

    def _reduce_stage(
        self,
        builder: Builder,
        stage: list[Reduce],
        inner: Sequence[str],
        index: Index,
        shape: Shape,
        keep: list[Value],
    ) -> None:
        accumulators = []
        for value in stage:
            accumulator = Accumulator(
                builder.fresh(f"{value.op}_so_far"), ctypes.register(value.source.dtype), value.op
            )
            builder.add(accumulator)
            accumulators.append(accumulator)
        scratch = [(v, self._declare_scratch(builder, v, inner)) for v in keep]
        depth = len(builder.blocks)
        self._open_inner(builder, inner)
        for value, accumulator in zip(stage, accumulators, strict=True):
            at = self._source_index(builder, value, index, shape, set(inner))
            name = builder.element(value.source, at)
            position = _position_in_row(value, at)
            builder.add(Accumulate(accumulator, name, position))
        for value, buffer in scratch:
            at = reshape(index, shape, value.shape, builder.extents)
            builder.add(Store(buffer, self._scratch_offset(builder, inner), builder.element(value, at)))
        for i in range(len(inner)):
            builder.close(tuple(accumulators) if i == 0 else ())
        for value, buffer in scratch:
            at = reshape(index, shape, value.shape, builder.extents)
            builder.stored[id(value)] = (buffer, self._scratch_offset(builder, inner), at)
        for value, accumulator in zip(stage, accumulators, strict=True):
            ctype = ctypes.register(value.dtype)
            arg = value.op in ("argmax", "argmin")
            name = builder.fresh(value.op)
            text = f"{accumulator.name}_at" if arg else accumulator.name
            builder.add(Let(name, ctype, text))
            builder.depths[name] = depth - 1
            at = self._source_index(builder, value, index, shape, set(inner))
            builder.results[id(value)] = (name, tuple(ZERO if d in value.dims else i for d, i in enumerate(at)))

    def _source_index(self, builder: Builder, value: Reduce, index: Index, shape: Shape, inner: set[str]) -> Index:
        """The index into a reduction's source inside the row's loops, checked to run over its dimensions exactly once."""
        source = value.source.shape
        if math.prod(source) != math.prod(shape):
            raise NotAffine("two reductions run over different numbers of elements")
        at = reshape(index, shape, source, builder.extents)
        for d, position in enumerate(at):
            if any((atom in inner) != (d in value.dims) for atom in position.atoms()):
                raise NotAffine("two reductions run over different dimensions")
        if math.prod(source[d] for d in value.dims) != math.prod(builder.extents[a] for a in inner):
            raise NotAffine("two reductions run over different dimensions")
        return at

    def _declare_scratch(self, builder: Builder, value: Value, inner: Sequence[str]) -> Buffer:
        extent = math.prod(builder.extents[a] for a in inner)
        name = builder.fresh(f"{self.program.value_names.get(id(value), 'row')}_row")
        buffer = Buffer(name, ctypes.register(value.dtype), "scratch", extent)
        builder.add(Declare(buffer))
        return buffer

    def _scratch_offset(self, builder: Builder, inner: Sequence[str]) -> Affine:
        strides = contiguous_strides([builder.extents[a] for a in inner])
        return offset(tuple(Affine.of(a) for a in inner), strides)

    def _worth_keeping(self, stages: list[list[Reduce]], row: int) -> list[tuple[Value, int]]:
        """Costly values that several stages compute, each with the first stage that does; those that fit a scratch row."""
        uses: dict[int, set[int]] = {}
        values: dict[int, Value] = {}
        roots = [[r.source for r in stage] for stage in stages] + [[o.value for o, _ in self.outputs]]
        for number, members in enumerate(roots):
            for value in _within_stage(members):
                uses.setdefault(id(value), set()).add(number)
                values[id(value)] = value
        kept: list[tuple[Value, int]] = []
        covered: set[int] = set()
        budget = SCRATCH_BYTES
        full = math.prod(self.anchor.source.shape) if self.anchor else 0
        for key in reversed(list(values)):  # parents before children
            value = values[key]
            wanted = len(uses[key]) > 1 and isinstance(value, Map) and math.prod(value.shape) == full
            if key in covered or not wanted or _cost_within_stage(value) < WORTH_KEEPING:
                continue
            if (size := row * value.dtype.itemsize) > budget:
                continue
            budget -= size
            kept.append((value, min(uses[key])))
            covered.update(id(v) for v in _within_stage([value]))
        return kept


def _within_stage(roots: Iterable[Value]) -> list[Value]:
    """Values below ``roots`` down to reductions, children first."""
    found: dict[int, Value] = {}
    stack = [(root, False) for root in roots]
    while stack:
        value, done = stack.pop()
        if done:
            found.setdefault(id(value), value)
        elif id(value) not in found and not isinstance(value, Reduce):
            stack.append((value, True))
            stack.extend((child, False) for child in children(value))
    return list(found.values())


def _cost_within_stage(value: Value) -> int:
    return sum(v.cost for v in _within_stage([value]) if isinstance(v, Map))


def _stages(reductions: Sequence[Reduce]) -> list[list[Reduce]]:
    """Reductions by how many others must come before: those of one stage share a loop."""
    level: dict[int, int] = {}
    memo: dict[int, int] = {}

    def before(value: Value) -> int:
        """The number of stages that must be complete before ``value`` can be computed."""
        stack = [value]
        while stack:
            current = stack[-1]
            if id(current) in memo:
                stack.pop()
                continue
            waiting = [c for c in children(current) if id(c) not in memo]
            if waiting:
                stack.extend(waiting)
                continue
            memo[id(current)] = max((memo[id(c)] for c in children(current)), default=0) + isinstance(current, Reduce)
            stack.pop()
        return memo[id(value)]

    for reduction in reductions:
        level[id(reduction)] = before(reduction.source)
    count = max(level.values(), default=-1) + 1
    return [[r for r in reductions if level[id(r)] == n] for n in range(count)]


def _position_in_row(value: Reduce, at: Index) -> Affine:
    """The position that an arg-reduction reports: row-major over its dimensions."""
    reduced = [d for d in value.dims]
    strides = contiguous_strides([value.source.shape[d] for d in reduced])
    return offset(tuple(at[d] for d in reduced), strides)
