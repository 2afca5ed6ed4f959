"""The loop nest of elementwise outputs (pointwise schedule).

    for rows (parallel):
        for columns (vector):
            load, compute, store

Loops are in the order of the first output's strides, so that stores are contiguous in any layout. If another dimension
has fewer loads and stores that jump from cache line to cache line, it is the innermost loop instead. If the two
innermost loops read padding at their ends, the iterations between the ends get loops without conditions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType

from fuse.kernel.arithmetic.extents import estimate, least, varies
from fuse.kernel.arithmetic.index import Affine, Size
from fuse.kernel.ir import Buffer, Declare, For, Let, Load, Scope, Statement, Store
from fuse.kernel.nest import Dimension, Sink, builder_for, store
from fuse.kernel.values import Output

ELEMENTS_OF_A_LINE = 16
"""float32 elements in a cache line of 64 bytes."""
Part = tuple[int, int]
"""The first and the last value of a loop variable."""
WHOLE: Sequence[Part | None] = (None,)
LARGEST_BORDERS = 16
"""Most iterations at the ends of a loop, which read padding, that are split off from those between them."""
LARGEST_BODY = 256
"""Most statements of a nest whose loops are split so, which repeats them up to nine times: bounds the compiler's
work."""
LARGEST_BLOCK = 64
"""Longest innermost loop whose cache lines (64 bytes for each iteration) stay in the L1 cache while the next loop moves
along these lines."""
WORTH_A_VECTOR = 16
"""Fewest elements of a dimension that may become the innermost loop in place of the one that makes stores
contiguous."""


def point_nest(
    targets: Sequence[Sink],
    inputs: list[Buffer],
    names: Mapping[int, str],
    dimensions: Sequence[Dimension],
) -> list[Statement]:
    """Loops over ``dimensions`` that store all ``targets``, which have that shape."""
    order = order_of_loops(Output(targets[0].value, targets[0].strides))
    found = [_Nest.over(dimensions, order).filled(targets, inputs, names)]
    for dim in order[:-1]:
        if not all(nest.strided for nest in found) or math.prod(dimensions[dim].extents) < WORTH_A_VECTOR:
            continue
        moved = _Nest.over(dimensions, (*(d for d in order if d != dim), dim))
        found.append(moved.filled(targets, inputs, names))
    best = min(found, key=lambda nest: nest.strided)
    if (blocked := best.blocked()) is not None:
        best = blocked.filled(targets, inputs, names)
    return best.in_parts(targets, inputs, names)


@dataclass(frozen=True)
class _Nest:
    """Loops over ``dimensions`` in the order of ``atoms``, outermost first; once filled, their statements and borders.

    ``borders`` has, for each loop, the range of values (end excluded) in which no padding is read.
    """

    dimensions: Sequence[Dimension]
    atoms: Sequence[str]
    statements: Sequence[Statement] = ()
    borders: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @staticmethod
    def over(dimensions: Sequence[Dimension], order: Sequence[int]) -> _Nest:
        return _Nest(dimensions, [atom for d in order for atom in dimensions[d].atoms])

    @property
    def strided(self) -> int:
        return _strided(self.statements)

    def filled(
        self,
        targets: Sequence[Sink],
        inputs: list[Buffer],
        names: Mapping[int, str],
        parts: Mapping[str, Sequence[Part]] = MappingProxyType({}),
    ) -> _Nest:
        """This nest with statements that store ``targets``; a loop with ``parts`` becomes one loop for each part."""
        builder = builder_for(self.dimensions, inputs, names)
        index = tuple(d.index() for d in self.dimensions)
        outer, inner = self.atoms[:-1], self.atoms[-1:]
        for reaches in product(*(parts.get(atom, WHOLE) for atom in outer)):
            for atom, reach in zip(outer, reaches, strict=True):
                builder.open(atom, "parallel", reach)
            for reached in product(*(parts.get(atom, WHOLE) for atom in inner)):
                for atom, reach in zip(inner, reached, strict=True):
                    builder.open(atom, "vector", reach)
                store(builder, [(target, index) for target in targets])
                for _ in inner:
                    builder.close()
            for _ in outer:
                builder.close()
        return replace(self, statements=builder.blocks[0].statements, borders=builder.borders)

    def blocked(self) -> _Nest | None:
        """This nest tiled so that each cache line is read or written once; None where tiling does not help.

        The innermost loop takes each element from another cache line. The loop that moves along these lines becomes the
        second innermost, around a block of the innermost loop.

            for c: for x: y[c, x] = image[x, c]      ->      for x by 16: for c: for 16 of x: ...
        """
        if len(self.atoms) < 2 or not self.strided or self.borders:
            return None
        *outer, last = self.atoms
        along = next((atom for atom in outer if _goes_along(self.statements, atom, last)), None)
        if along is None:
            return None
        number = next(n for n, d in enumerate(self.dimensions) if last in d.atoms)
        dimension = self.dimensions[number]
        extent = dimension.extents[dimension.atoms.index(last)]
        rest = [atom for atom in outer if atom != along]
        if type(extent) is not int or extent < ELEMENTS_OF_A_LINE:  # no tiles of a size that varies
            return None
        if extent <= LARGEST_BLOCK:
            return _Nest(self.dimensions, [*rest, along, last]) if rest != outer[:-1] else None
        if extent % ELEMENTS_OF_A_LINE:
            return None
        dimensions = list(self.dimensions)
        dimensions[number] = dimension.split(last, ELEMENTS_OF_A_LINE)
        return _Nest(dimensions, [*rest, f"{last}o", along, f"{last}i"])

    def in_parts(self, targets: Sequence[Sink], inputs: list[Buffer], names: Mapping[int, str]) -> list[Statement]:
        """The statements, with the two innermost loops split at their borders where few iterations read padding.

        Iterations between the borders have no conditions on padding, which would keep the compiler from vectorising.
        """
        extents = {a: e for d in self.dimensions for a, e in zip(d.atoms, d.extents, strict=True)}
        parts = {a: _parts(*self.borders[a], extents[a]) for a in self.atoms[-2:] if a in self.borders}
        parts = {atom: found for atom, found in parts.items() if found and _size(self.statements) <= LARGEST_BODY}
        return _staged((self.filled(targets, inputs, names, parts) if parts else self).statements)


def _parts(first: int, last: int, extent: int) -> list[Part]:
    """The ranges before, between and after the borders of a loop; empty where splitting it is not worth it.

    >>> _parts(1, 39, 40), _parts(0, 20, 40)
    ([(0, 0), (1, 38), (39, 39)], [])
    """
    inside = last - first
    beside = extent - inside
    if varies(beside) or least(inside) < 1 or not 0 < beside <= min(LARGEST_BORDERS, estimate(inside)):
        return []
    return [(begin, end - 1) for begin, end in ((0, first), (first, last), (last, extent)) if begin < end]


def _size(statements: Sequence[Statement]) -> int:
    """Number of statements, nested ones included."""
    return sum(1 + (_size(s.body) if isinstance(s, (For, Scope)) else 0) for s in statements)


def _strided(statements: Sequence[Statement]) -> int:
    """Number of loads and stores in innermost loops that access another cache line in each iteration."""
    found = 0
    for statement in statements:
        match statement:
            case For(kind="vector"):
                steps = (s.offset.step(statement.atom) for s in statement.body if isinstance(s, (Load, Store)))
                found += sum(bool(step.sized) or abs(step.constant) >= ELEMENTS_OF_A_LINE for step in steps)
            case For() | Scope():
                found += _strided(statement.body)
            case _:
                pass
    return found


def _goes_along(statements: Sequence[Statement], atom: str, last: str) -> bool:
    """Whether loads and stores that access another cache line in each iteration of ``last`` have stride 1 in
    ``atom``."""
    found = True
    for statement in statements:
        match statement:
            case For() | Scope():
                found &= _goes_along(statement.body, atom, last)
            case Load() | Store():
                inner, outer = statement.offset.step(last), statement.offset.step(atom)
                jumps = bool(inner.sized) or abs(inner.constant) >= ELEMENTS_OF_A_LINE
                found &= not jumps or (not outer.sized and abs(outer.constant) == 1)
            case _:
                pass
    return found


def _staged(statements: Sequence[Statement]) -> list[Statement]:
    """The statements, with strided loads of short innermost loops first copied to contiguous memory.

    Compilers do not vectorise conditions among strided loads, but branch on the data.

        for 16 of x: y[x] = clamp(image[x, c])    ->    for 16 of x: lines[x] = image[x, c]
                                                        for 16 of x: y[x] = clamp(lines[x])
    """
    found: list[Statement] = []
    for statement in statements:
        match statement:
            case For(kind="vector") if not statement.bounds and statement.extent <= LARGEST_BLOCK:
                found += _staged_loop(statement)
            case For() | Scope():
                found.append(replace(statement, body=tuple(_staged(statement.body))))
            case _:
                found.append(statement)
    return found


def _staged_loop(loop: For) -> list[Statement]:
    if not any(isinstance(s, Let) for s in loop.body):
        return [loop]  # it computes nothing: a copy would only be one more
    before: list[Statement] = []
    body: list[Statement] = []
    for statement in loop.body:
        if isinstance(statement, Load) and not statement.indirect and statement.guard is None:
            step = statement.offset.step(loop.atom)
            if not step.sized and abs(step.constant) >= ELEMENTS_OF_A_LINE:
                lines = Buffer(f"{statement.name}_lines", statement.buffer.dtype, "scratch", loop.extent)
                copied = Store(lines, Affine.of(loop.atom), statement.variable)
                before += [Declare(lines), For(loop.atom, loop.extent, (statement, copied), "vector")]
                statement = replace(statement, buffer=lines, offset=Affine.of(loop.atom))
        body.append(statement)
    return [*before, replace(loop, body=tuple(body))] if before else [loop]


def order_of_loops(output: Output) -> tuple[int, ...]:
    """Dimensions from the largest stride to the smallest, by estimated sizes; any order is correct."""
    shape = [estimate(extent) for extent in output.value.shape]
    strides = [estimate(s.value if isinstance(s, Size) else s) for s in output.strides]
    return tuple(sorted(range(len(shape)), key=lambda d: (-strides[d] if shape[d] > 1 else -math.inf, d)))
