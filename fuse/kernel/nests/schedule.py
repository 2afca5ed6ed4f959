"""Scheduling: which outputs of a region share a loop nest, and the kind of nest.

    outputs without reductions      one nest for each shape       :mod:`fuse.kernel.nests.points`
    outputs with reductions         one nest, a row at a time     :mod:`fuse.kernel.nests.rows`
    reductions of reductions        one nest after another        :mod:`fuse.kernel.nests.multi_stage`

Positions of indexing operators are checked before anything is written. If a reshape does not fit the loops, one loop is
split and the nest is built again (:mod:`fuse.kernel.arithmetic.index`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from fuse.graph.strides import contiguous_strides
from fuse.kernel.arithmetic.dtypes import register
from fuse.kernel.arithmetic.expressions import either
from fuse.kernel.arithmetic.extents import always_equal, is_one
from fuse.kernel.arithmetic.index import Affine, NotAffine, SplitNeeded
from fuse.kernel.ir import (
    Accumulate,
    Accumulator,
    Buffer,
    BufferRole,
    Declare,
    Fail,
    For,
    KernelBody,
    Scope,
    Statement,
)
from fuse.kernel.nest import MAX_SPLITS, Dimension, Sink, builder_for
from fuse.kernel.nests.collapsing import collapse
from fuse.kernel.nests.multi_stage import first_stage, read_from_memory
from fuse.kernel.nests.points import order_of_loops, point_nest
from fuse.kernel.nests.ranking import rank_nest
from fuse.kernel.nests.rows import RowNest
from fuse.kernel.nests.scans import scan_nest
from fuse.kernel.nests.small_matrices import solve_nest
from fuse.kernel.traversals import WORTH_KEEPING, reductions_below, within_stage
from fuse.kernel.values import Computation, Concat, Gather, Map, Output, Ranked, Reduce, Scan, Shape, Solved, view

ALONE = (Concat, Scan, Ranked, Solved)
"""Values that share no nest with others."""


def schedule(computation: Computation) -> KernelBody:
    """The loop nests of a whole region.

    Raises:
        NotAffine: the region has no such loops; the message is a reason for the user.
    """
    input_buffers = tuple(_argument(f"in{i}", v.dtype, "input") for i, v in enumerate(computation.inputs))
    output_buffers = tuple(_argument(f"out{i}", o.value.dtype, "output") for i, o in enumerate(computation.outputs))
    input_buffers = tuple(_renamed(b, computation.names.get(i)) for i, b in enumerate(input_buffers))
    statements = range_checks(computation, list(input_buffers))
    stores = list(zip(map(_squeezed, computation.outputs), output_buffers, strict=True))
    statements += _in_stages(stores, list(input_buffers), computation.value_names)
    return KernelBody(input_buffers, output_buffers, tuple(collapse(statements)), computation.lines)


Names = Mapping[int, str]
Stores = Sequence[tuple[Output, Buffer]]
"""Outputs with the buffers that they are stored in."""


def _in_stages(stores: Stores, inputs: list[Buffer], names: Names) -> list[Statement]:
    """The nests of all outputs: those of the first stage, then those that read its reductions."""
    first = first_stage([output.value for output, _ in stores])
    if first is None:
        return _nests(stores, inputs, names)
    held = [_held(value, len(inputs) + i) for i, value in enumerate(first.held)]
    known = [*inputs, *(buffer for _, buffer in held)]
    now = [store for i, store in enumerate(stores) if i not in first.later]
    later = [store for i, store in enumerate(stores) if i in first.later]
    values, names_then = read_from_memory([o.value for o, _ in later], first.held, len(inputs), names)
    then = [(Output(v, output.strides), buffer) for v, (output, buffer) in zip(values, later, strict=True)]
    declared = [Declare(buffer) for _, buffer in held]
    return [Scope((*declared, *_nests([*now, *held], known, names), *_in_stages(then, known, names_then)))]


def _held(value: Reduce, number: int) -> tuple[Output, Buffer]:
    """A reduction as an output to a local array, whose upper-case name no value has."""
    buffer = Buffer(f"HELD_{number}", register(value.dtype), "scratch", math.prod(value.shape))
    return Output(value, contiguous_strides(value.shape)), buffer


def _nests(stores: Stores, inputs: list[Buffer], names: Names) -> list[Statement]:
    """The nests of one stage."""
    outputs = [output for output, _ in stores]
    targets = [Sink(output.value, buffer, output.strides) for output, buffer in stores]

    def nests(any_order: bool) -> list[Statement]:
        groups = [[targets[i] for i in group] for group in _groups(outputs, any_order)]
        return [s for group in groups for s in _scoped(_nest(group, inputs, names))]

    try:
        return nests(any_order=True)
    except NotAffine:  # loops in one order may not serve results in another
        return nests(any_order=False)


def range_checks(computation: Computation, inputs: list[Buffer]) -> list[Statement]:
    """A loop over each tensor of positions, which makes the kernel return if a position is out of range."""
    statements: list[Statement] = []
    seen: set[tuple[int, int]] = set()
    for value in within_stage([o.value for o in computation.outputs], through_reductions=True):
        if not isinstance(value, Gather):
            continue
        extent = value.table.shape[value.dim]
        if (id(value.positions), extent) in seen:
            continue
        seen.add((id(value.positions), extent))
        outside = Accumulator(f"out_of_range_{len(seen)}", torch.bool, "any")
        nest = with_splits(
            value.positions.shape, partial(_range_check, value, outside, inputs, computation.value_names)
        )
        statements += _scoped([*nest, Fail(outside.name)])
    return statements


def _range_check(
    value: Gather, outside: Accumulator, inputs: list[Buffer], names: Names, dimensions: list[Dimension]
) -> list[Statement]:
    """The loop that sets ``outside`` if a position of ``value`` is out of range."""
    builder = builder_for(dimensions, inputs, names)
    builder.add(outside)
    atoms = [atom for dimension in dimensions for atom in dimension.atoms]
    for atom in atoms:
        builder.open(atom, "vector" if atom == atoms[-1] else "serial")
    found = builder.element(value.positions, tuple(dimension.index() for dimension in dimensions))
    extent = value.table.shape[value.dim]
    builder.add(Accumulate(outside, either(found < (-extent if value.wraps else 0), found >= extent)))
    for atom in atoms:
        builder.close((outside,) if atom == atoms[0] else ())
    return builder.blocks[0].statements


def _argument(name: str, dtype: torch.dtype, role: BufferRole) -> Buffer:
    return Buffer(name, dtype, role)


def _renamed(buffer: Buffer, name: str | None) -> Buffer:
    return Buffer(name, buffer.dtype, buffer.role) if name else buffer


def _squeezed(output: Output) -> Output:
    """The output without dimensions of extent 1, so that outputs that differ only in these share a nest."""
    shape = output.value.shape
    kept = [d for d, extent in enumerate(shape) if not is_one(extent)]
    if len(kept) == len(shape) or isinstance(output.value, ALONE) or reductions_below([output.value]):
        return output
    return Output(view(output.value, [shape[d] for d in kept]), tuple(output.strides[d] for d in kept))


def _groups(outputs: Sequence[Output], any_order: bool) -> list[list[int]]:
    """Groups of outputs that share a nest, as positions in ``outputs``.

    All outputs with reductions are one group. The others are grouped by shape and order of strides; with ``any_order``,
    groups of one shape that share costly values are joined. Each value in ``ALONE`` is a group of its own.
    """
    with_reductions: list[int] = []
    alone: list[list[int]] = []
    by_shape: dict[tuple[Shape, tuple[int, ...]], list[int]] = {}
    reducing = [bool(reductions_below([o.value])) for o in outputs]
    full = max((math.prod(r.source.shape) for o in outputs for r in reductions_below([o.value])), default=-1)
    for i, output in enumerate(outputs):
        is_full = always_equal(full, math.prod(output.value.shape)) and not isinstance(output.value, ALONE)
        if reducing[i] or is_full:
            with_reductions.append(i)
        elif isinstance(output.value, ALONE):
            alone.append([i])
        else:
            by_shape.setdefault((output.value.shape, order_of_loops(output)), []).append(i)
    together: list[list[int]] = []
    for group in by_shape.values():
        alike = (g for g in together if any_order and _share_costly_work(outputs[g[0]], outputs[group[0]]))
        other = next(alike, None)
        if other is None:
            together.append(group)
        else:
            other += group
    return [*([with_reductions] if with_reductions else []), *alone, *together]


def _share_costly_work(one: Output, other: Output) -> bool:
    """Whether two outputs have one shape and share values that cost at least ``WORTH_KEEPING``."""
    if one.value.shape != other.value.shape:
        return False
    shared = {id(v): v for v in within_stage([one.value])}.keys() & {id(v) for v in within_stage([other.value])}
    return sum(v.cost for v in within_stage([one.value]) if id(v) in shared and isinstance(v, Map)) >= WORTH_KEEPING


def _nest(targets: list[Sink], inputs: list[Buffer], names: Names) -> list[Statement]:
    """The loops of one group of outputs."""
    reductions = reductions_below(t.value for t in targets)
    if reductions:
        shape = max((r.source.shape for r in reductions), key=math.prod)
        return with_splits(shape, RowNest(targets, inputs, names, reductions).build)
    first = targets[0]
    if isinstance(first.value, Scan):
        return with_splits(first.value.shape, lambda d: scan_nest(first, inputs, names, d))
    if isinstance(first.value, Ranked):
        return with_splits(first.value.source.shape, lambda d: rank_nest(first, inputs, names, d))
    if isinstance(first.value, Solved):
        batch = first.value.sources[0].shape[:-2]
        return with_splits(batch, lambda d: solve_nest(first, inputs, names, d))
    if isinstance(first.value, Concat):
        groups = _sharing(_pieces(first))
        return [s for group in groups for s in _scoped(_nest(group, inputs, names))]
    return with_splits(first.value.shape, lambda d: point_nest(targets, inputs, names, d))


def _scoped(statements: list[Statement]) -> list[Statement]:
    """The statements of one nest, in a scope if they define names outside of loops."""
    return statements if all(isinstance(s, (For, Scope)) for s in statements) else [Scope(tuple(statements))]


def _sharing(pieces: Sequence[Sink]) -> list[list[Sink]]:
    """Groups of consecutive pieces of a concatenation that share a nest.

    Elementwise pieces of one shape share a nest if they share costly values, like the states of an unrolled loop, where
    each piece alone would compute all earlier steps again.
    """
    groups: list[list[Sink]] = []
    shares = False  # whether the last group is one of elementwise pieces
    for piece in pieces:
        value = piece.value
        elementwise = not isinstance(value, ALONE) and not reductions_below([value])
        last = Output(groups[-1][-1].value, piece.strides) if shares and elementwise else None
        if last is not None and _share_costly_work(last, Output(value, piece.strides)):
            groups[-1].append(piece)
        else:
            groups.append([piece])
        shares = elementwise
    return groups


def _pieces(target: Sink) -> list[Sink]:
    """One sink for each piece of a concatenation."""
    value = target.value
    assert isinstance(value, Concat)
    pieces, start = [], target.start
    for piece in value.pieces:
        pieces.append(Sink(piece, target.buffer, target.strides, start))
        start += Affine((), piece.shape[value.dim]).times(target.strides[value.dim])
    return pieces


def with_splits(shape: Shape, build: Callable[[list[Dimension]], list[Statement]]) -> list[Statement]:
    """The nest that ``build`` makes with one loop for each dimension, loops split until every index is affine."""
    dimensions = [Dimension.whole(d, extent) for d, extent in enumerate(shape)]
    for _ in range(MAX_SPLITS):
        try:
            return build(dimensions)
        except SplitNeeded as need:
            dimensions = [d.split(need.atom, need.inner) if need.atom in d.atoms else d for d in dimensions]
    raise NotAffine("its loops would have to be split too often")
