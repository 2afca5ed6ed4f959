"""Generate the statements that compute one element of a value: the step from values to loops.

``Builder`` keeps the stack of open loops. ``Builder.element`` appends the loads and arithmetic of one element, and
returns the variable or number that is the element. Each statement goes to the outermost loop in which its operands are
known, so that loop invariants are hoisted. An element is computed once while its loop is open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import reduce

import torch

from fuse.kernel.arithmetic.dtypes import register
from fuse.kernel.arithmetic.expressions import (
    Expression,
    Literal,
    Operation,
    Position,
    Variable,
    applied,
    both,
    converted,
    position,
    select,
)
from fuse.kernel.arithmetic.extents import larger, may_reach, smaller, terms_of
from fuse.kernel.arithmetic.index import Affine, Index, NotAffine, offset
from fuse.kernel.ir import Accumulator, Buffer, For, Indirect, Let, Load, LoopKind, Statement
from fuse.kernel.values import Concat, Constant, Gather, Input, Iota, Map, Pad, Product, Reduce, Reindex, Value

MAX_PIECES_IN_EXPRESSION = 8
"""Most pieces of a concatenation that one expression chooses among: it computes every piece for every element."""
MAX_NAMES = 30_000
"""Most names in one kernel. Nested concatenations read each piece under its own condition, which doubles the names with
every level; beyond this limit, compiling would take minutes."""


_Key = tuple[int, Index, Expression | None]
"""An element: the ``id`` of its value, its index, and the guard under which it is read."""


@dataclass
class Block:
    """One open loop, or the top of the kernel: its statements and the elements known in it so far.

    ``before`` is set for a loop over part of its variable's range: the elements known in each block around it when it
    was opened.
    """

    atom: str
    extent: int
    kind: LoopKind
    statements: list[Statement] = field(default_factory=list)
    known: dict[_Key, Expression] = field(default_factory=dict)
    before: list[dict[_Key, Expression]] | None = None


_REALS = (torch.float32, torch.float64)


def without_branches(statements: Sequence[Statement]) -> list[Statement]:
    """The body of a loop in which floating-point ``select`` by a loop-invariant condition is replaced by ``chosen``.

    ``chosen`` selects by bit masks. Compilers turn ``select`` into a branch around a load, and then do not vectorise.
    """
    own = {s.name for s in statements if isinstance(s, (Let, Load))}
    return [_without_branch(s, own) if isinstance(s, Let) else s for s in statements]


def _without_branch(statement: Let, own: Set[str]) -> Let:
    value = statement.value
    if not isinstance(value, Operation) or value.operator != "select" or value.dtype not in _REALS:
        return statement
    condition = value.operands[0]
    if not isinstance(condition, Variable) or condition.name in own:
        return statement
    return Let(statement.name, Operation(value.dtype, "chosen", value.operands))


@dataclass
class Builder:
    """Statements under construction; ``extents`` gives the trip count of every loop variable.

    ``reach`` has the first and last value of each open loop that runs over part of its range. ``borders`` has, for each
    loop variable, the range of values (end excluded) in which no padding is read. ``narrowed`` has the ranges that
    ``borders`` were cut to.
    """

    inputs: list[Buffer]
    extents: dict[str, int]
    names: Mapping[int, str] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=lambda: [Block("", 1, "serial")])
    depths: dict[str, int] = field(default_factory=dict)
    used_names: dict[str, int] = field(default_factory=dict)
    results: dict[int, tuple[Variable, Index]] = field(default_factory=dict)
    stored: dict[int, tuple[Buffer, Affine, Index]] = field(default_factory=dict)
    kept_alive: list[Value] = field(default_factory=list)
    reach: dict[str, tuple[int, int]] = field(default_factory=dict)
    borders: dict[str, tuple[int, int]] = field(default_factory=dict)
    narrowed: set[tuple[object, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.used_names.update((buffer.name, 1) for buffer in self.inputs)

    # ---- loops -------------------------------------------------------------------------------------------------------

    def open(self, atom: str, kind: LoopKind, reach: tuple[int, int] | None = None) -> None:
        """Open a loop over all values of ``atom``, or over those from the first of ``reach`` to its last."""
        if reach:
            self.reach[atom] = reach
        self.blocks.append(
            Block(atom, self.extents[atom], kind, before=[dict(b.known) for b in self.blocks] if reach else None)
        )

    def close(self, reduces: tuple[Accumulator, ...] = ()) -> None:
        block = self.blocks.pop()
        extent, bounds = block.extent, None
        if block.before is not None:  # an element known for part of the range need not be known for the rest
            first, last = self.reach.pop(block.atom)
            extent, bounds = last + 1 - first, (position(first), position(last + 1))
            for outer, known in zip(self.blocks, block.before, strict=True):
                outer.known = known
        statements = without_branches(block.statements) if block.kind == "vector" else block.statements
        loop = For(block.atom, extent, tuple(statements), block.kind, reduces, bounds)
        self.blocks[-1].statements.append(loop)

    def add(self, statement: Statement) -> None:
        """Append to the innermost open loop."""
        self.blocks[-1].statements.append(statement)

    def fresh(self, hint: str) -> str:
        """A new name: ``hint``, with a number if a value or buffer has that name.

        Raises:
            NotAffine: there are ``MAX_NAMES`` already.
        """
        if len(self.used_names) > MAX_NAMES:
            raise NotAffine(f"a kernel would compute more than {MAX_NAMES:,} elements one by one")
        name, count = hint, self.used_names.get(hint, 0)
        while name in self.used_names:
            count += 1
            name = f"{hint}_{count}"
        self.used_names[name] = 1
        self.used_names[hint] = max(count, 1)
        return name

    def depth_of(self, index: Affine) -> int:
        atoms = index.atoms()
        return max((d for d, block in enumerate(self.blocks) if block.atom in atoms), default=0)

    # ---- elements ----------------------------------------------------------------------------------------------------

    def element(self, value: Value, index: Index, guard: Expression | None = None) -> Expression:
        """The variable or number that is ``value[index]``. Where ``guard`` is false, nothing is read and it is
        arbitrary.

        Raises:
            SplitNeeded, NotAffine: see :mod:`fuse.kernel.arithmetic.index`.
        """
        if guard is not None and self._is_inside(index, value.shape):
            guard = None  # so that nested pieces share their reads of one element
        key = (id(value), index, guard)
        for block in self.blocks:
            if (known := block.known.get(key)) is not None:
                return known
        found = self._compute(value, index, guard)
        self.blocks[self.depth(found)].known[key] = found
        self.kept_alive.append(value)
        return found

    def _compute(self, value: Value, index: Index, guard: Expression | None) -> Expression:
        if id(value) in self.stored:
            buffer, where, at = self.stored[id(value)]
            if index == at:
                return self._load(buffer, where, (), guard, buffer.name)
        match value:
            case Input():
                where = offset(index, value.strides)
                buffer = self.inputs[value.position]
                return self._load(buffer, where, (), guard, buffer.name)
            case Constant():
                return Literal(register(value.dtype), value.number)
            case Iota():
                where = index[value.dim] * int(value.step) + int(value.start)
                return self._let("position", converted(position(where), torch.int64, value.dtype))
            case Map():
                args = [self.element(a, index, guard) for a in value.args]
                if value.is_copy:
                    return args[0]
                return self._let(self.names.get(id(value), "value"), applied(value.formula, args))
            case Reindex():
                return self.element(value.source, value.where(index, self.extents), guard)
            case Reduce():
                return self._result(value, index)
            case Concat():
                return self._piece(value, index, guard)
            case Pad():
                return self._padded(value, index, guard)
            case Gather():
                return self._gathered(value, index, guard)
            case Product():
                raise NotAffine("a product's result is read in another order than it is computed")
        raise NotAffine(f"{type(value).__name__} has no element")

    def depth(self, expression: Expression | None) -> int:
        """The number of the outermost block in which all operands of an expression are known."""
        match expression:
            case Variable():
                return self.depths.get(expression.name, 0)
            case Position():
                return self.depth_of(expression.index)
            case Operation():
                return max(map(self.depth, expression.operands), default=0)
            case _:
                return 0

    def _let(self, hint: str, value: Expression) -> Expression:
        return self._defined(Let(self.fresh(hint), value), self.depth(value))

    def _defined(self, statement: Let | Load, depth: int) -> Variable:
        self.blocks[depth].statements.append(statement)
        self.depths[statement.name] = depth
        return statement.variable

    def _load(
        self,
        buffer: Buffer,
        where: Affine,
        indirect: tuple[Indirect, ...],
        guard: Expression | None,
        hint: str,
    ) -> Variable:
        depth = max([self.depth_of(where), self.depth(guard), *(self.depth(term.position) for term in indirect)])
        name = self.fresh(f"{hint}_element" if buffer.role == "scratch" else f"{hint}_at")
        return self._defined(Load(name, buffer, where, indirect, guard), depth)

    def _result(self, value: Reduce, index: Index) -> Expression:
        if id(value) not in self.results:
            raise NotAffine("a reduction feeds another over different dimensions")
        result, at = self.results[id(value)]
        if at != index:
            raise NotAffine("the result of a reduction is read in another order than it is computed")
        return result

    def _piece(self, value: Concat, index: Index, guard: Expression | None) -> Expression:
        """The element of the piece that contains the index: a chain of ``select``, each piece read under its condition.

        Pieces outside of the index's range are left out. If one piece is left, there is no condition.
        """
        along = index[value.dim]
        first, last = self._range(along)
        reached, start = [], 0
        for piece in value.pieces:
            end = start + piece.shape[value.dim]
            if may_reach(end - 1, first) and may_reach(last, start):
                reached.append((piece, start, end))
            start = end
        if len(reached) > MAX_PIECES_IN_EXPRESSION:
            raise NotAffine("many pieces are read in the middle of a kernel")
        found: list[tuple[Expression, Expression]] = []
        for piece, start, end in reached or [(value.pieces[0], 0, 0)]:
            shifted = (*index[: value.dim], along + -start, *index[value.dim + 1 :])
            if len(reached) < 2:
                return self.element(piece, shifted, guard)
            inside = self._inside([_within(along, start, end)], guard)
            found.append((inside, self.element(piece, shifted, inside)))
        whole = found[-1][1]
        for inside, element in reversed(found):
            whole = select(inside, element, whole)
        return self._let("piece", whole)

    def _padded(self, value: Pad, index: Index, guard: Expression | None) -> Expression:
        conditions, shifted = [], []
        fill = Literal(register(value.dtype), value.fill)
        for where, before, own in zip(index, value.before, value.source.shape, strict=True):
            inner = where + -before
            first, last = self._range(inner)
            if not may_reach(last, 0) or not may_reach(own - 1, first):
                return fill
            if may_reach(-first, 1) or may_reach(last, own):
                self._note_borders(inner, own)
                conditions.append(_within(inner, 0, own))
            shifted.append(inner)
        if not conditions:
            return self.element(value.source, tuple(shifted), guard)
        inside = self._inside(conditions, guard)
        return self._let("padded", select(inside, self.element(value.source, tuple(shifted), inside), fill))

    def _is_inside(self, index: Index, shape: Sequence[int]) -> bool:
        """Whether an index stays inside of ``shape`` for all values of the loop variables, guards ignored."""
        ranges = map(self._range, index)
        return not any(
            may_reach(-first, 1) or may_reach(last, n) for (first, last), n in zip(ranges, shape, strict=True)
        )

    def _range(self, index: Affine) -> tuple[float, float]:
        """The least and the largest value of an index, guards ignored; infinite where it depends on sizes."""
        if index.sized:
            return -math.inf, math.inf
        ends = [(c, *self.reach.get(atom, (0, self.extents[atom] - 1))) for atom, c in index.terms]
        pairs = [(c * first, c * last) for c, first, last in ends]
        least = sum(one if one <= other else other for one, other in pairs)
        return index.constant + least, index.constant + sum(two if two >= one else one for one, two in pairs)

    def _note_borders(self, index: Affine, extent: int) -> None:
        """Narrow ``borders`` to the values of the index's only loop variable for which it lies in ``range(extent)``."""
        if len(index.terms) != 1 or index.sized or index.terms[0][1] < 0:
            return
        ((atom, step),) = index.terms
        first, last = self.borders.get(atom, (0, self.extents[atom]))
        inside = -(index.constant // step), (extent - 1 - index.constant) // step + 1
        narrowed = atom, *map(terms_of, inside)
        if narrowed in self.narrowed:  # by another read: a minimum of sizes is a longer text each time
            return
        self.narrowed.add(narrowed)
        self.borders[atom] = larger(first, inside[0]), smaller(last, inside[1])

    def _inside(self, conditions: Sequence[Expression], guard: Expression | None) -> Expression:
        return self._let("inside", reduce(both, conditions if guard is None else [guard, *conditions]))

    def _gathered(self, value: Gather, index: Index, guard: Expression | None) -> Expression:
        table, extent = value.table, value.table.shape[value.dim]
        if isinstance(table, Constant):
            return Literal(register(table.dtype), table.number)  # read at no index, so guarded by nothing
        row = self.element(value.positions, value.position_index(index), guard)
        if value.wraps:
            row = self._let("row", select(row < 0, row + extent, row))
        strides = table.strides[: value.dim] + table.strides[value.dim + 1 :]
        buffer = self.inputs[table.position]
        where = offset(value.rest(index), strides)
        looked_up = Indirect(row, table.strides[value.dim], extent)
        return self._load(buffer, where, (looked_up,), guard, buffer.name)


def _within(where: Affine, start: int, end: int) -> Expression:
    at = position(where)
    return both(at >= start, at < end)
