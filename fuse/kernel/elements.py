"""Write down the statements that compute one element of a value: the step from values to loops.

``Builder`` keeps the stack of open loops. Asked for an element at an index, it appends loads and arithmetic to the
outermost loop in which all that they depend on is known (so what does not change in a loop is computed outside of it),
and answers with the C++ name that holds the element. An element that was asked for before is not computed again while
its loop is open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fuse.kernel import ctypes, printer
from fuse.kernel.dtypes import register
from fuse.kernel.expressions import Variable, applied
from fuse.kernel.index import Affine, Index, NotAffine, offset
from fuse.kernel.ir import Accumulator, Buffer, Indirect, Let, Load, Loop, LoopKind, Statement
from fuse.kernel.values import Concat, Constant, Gather, Input, Iota, Map, Pad, Product, Reduce, Reindex, Value

MAX_PIECES_IN_EXPRESSION = 8
MAX_NAMES = 30_000
"""Elements that one kernel may name. A chain of pieces within pieces reads each under its own condition, and doubles
with every link: beyond this, compiling would take minutes."""


@dataclass
class Block:
    """One open loop (or the top of the kernel): its statements so far and the elements that are known inside it;
    ``before``: what was known in each block around it, where it runs over some values of its variable only."""

    atom: str
    extent: int
    kind: LoopKind
    statements: list[Statement] = field(default_factory=list)
    known: dict[tuple[int, Index, str], str] = field(default_factory=dict)
    before: list[dict[tuple[int, Index, str], str]] | None = None


@dataclass
class Builder:
    """Statements under construction; ``extents`` gives the trip count of every loop variable.

    ``reach`` are the first and the last value of loop variables that do not take all of them. ``borders`` are, for each
    variable, between which of its values (the last excluded) padding is not read.
    """

    inputs: list[Buffer]
    extents: dict[str, int]
    names: Mapping[int, str] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=lambda: [Block("", 1, "serial")])
    depths: dict[str, int] = field(default_factory=dict)
    used_names: dict[str, int] = field(default_factory=dict)
    results: dict[int, tuple[str, Index]] = field(default_factory=dict)
    stored: dict[int, tuple[Buffer, Affine, Index]] = field(default_factory=dict)
    kept_alive: list[Value] = field(default_factory=list)
    reach: dict[str, tuple[int, int]] = field(default_factory=dict)
    borders: dict[str, tuple[int, int]] = field(default_factory=dict)

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
        if block.before is not None:  # what is known of some values need not hold for others
            first, last = self.reach.pop(block.atom)
            extent, bounds = last + 1 - first, (str(first), str(last + 1))
            for outer, known in zip(self.blocks, block.before, strict=True):
                outer.known = known
        loop = Loop(block.atom, extent, tuple(block.statements), block.kind, reduces, bounds)
        self.blocks[-1].statements.append(loop)

    def add(self, statement: Statement) -> None:
        """Append to the innermost open loop."""
        self.blocks[-1].statements.append(statement)

    def fresh(self, hint: str) -> str:
        """A C++ name: the hint, with a number when it is taken (by another name or by a buffer)."""
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

    def element(self, value: Value, index: Index, guard: str = "") -> str:
        """The name (or literal) of ``value[index]``; where ``guard`` is false, nothing is read and it is arbitrary.

        Raises:
            SplitNeeded, NotAffine: see :mod:`fuse.kernel.index`.
        """
        key = (id(value), index, guard)
        for block in self.blocks:
            if name := block.known.get(key):
                return name
        name, depth = self._compute(value, index, guard)
        self.blocks[depth].known[key] = name
        self.kept_alive.append(value)
        return name

    def _compute(self, value: Value, index: Index, guard: str) -> tuple[str, int]:
        if id(value) in self.stored:
            buffer, where, at = self.stored[id(value)]
            if index == at:
                return self._load(buffer, value.dtype, where, (), guard, buffer.name)
        match value:
            case Input():
                where = offset(index, value.strides)
                buffer = self.inputs[value.position]
                return self._load(buffer, value.dtype, where, (), guard, buffer.name)
            case Constant():
                return ctypes.literal(value.number, value.dtype), 0
            case Iota():
                position = index[value.dim] * int(value.step) + int(value.start)
                text = f"{ctypes.register(value.dtype)}({position})"
                return self._let("position", value.dtype, text, self.depth_of(position), position.atoms())
            case Map():
                args = [self.element(a, index, guard) for a in value.args]
                if value.is_copy:
                    return args[0], self.depth(args[0])
                named = [Variable(register(v.dtype), a) for v, a in zip(value.args, args, strict=True)]
                text = printer.text(applied(value.formula, named))
                hint = self.names.get(id(value), "value")
                return self._let(hint, value.dtype, text, max((self.depth(a) for a in args), default=0))
            case Reindex():
                name = self.element(value.source, value.where(index, self.extents), guard)
                return name, self.depth(name)
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

    def depth(self, name: str) -> int:
        return self.depths.get(name, 0)

    def _let(
        self, hint: str, dtype: torch.dtype, text: str, depth: int, atoms: tuple[str, ...] = ()
    ) -> tuple[str, int]:
        name = self.fresh(hint)
        self.blocks[depth].statements.append(Let(name, ctypes.register(dtype), text, atoms))
        self.depths[name] = depth
        return name, depth

    def _load(
        self,
        buffer: Buffer,
        dtype: torch.dtype,
        where: Affine,
        indirect: tuple[Indirect, ...],
        guard: str,
        hint: str,
    ) -> tuple[str, int]:
        depth = max([self.depth_of(where), self.depth(guard), *(self.depth(term.variable) for term in indirect)])
        name = self.fresh(f"{hint}_element" if buffer.role == "scratch" else f"{hint}_at")
        self.blocks[depth].statements.append(Load(name, ctypes.register(dtype), buffer, where, indirect, guard))
        self.depths[name] = depth
        return name, depth

    def _result(self, value: Reduce, index: Index) -> tuple[str, int]:
        if id(value) not in self.results:
            raise NotAffine("a reduction feeds another over different dimensions")
        name, at = self.results[id(value)]
        if at != index:
            raise NotAffine("the result of a reduction is read in another order than it is computed")
        return name, self.depth(name)

    def _piece(self, value: Concat, index: Index, guard: str) -> tuple[str, int]:
        """The piece that holds the index: a chain of conditions, each piece read only where it holds.

        Pieces that the index never comes to are left out; where it is only ever in one, there is no condition.
        """
        along = index[value.dim]
        first, last = self._range(along)
        reached, start = [], 0
        for piece in value.pieces:
            end = start + piece.shape[value.dim]
            if first < end and start <= last:
                reached.append((piece, start, end))
            start = end
        if len(reached) > MAX_PIECES_IN_EXPRESSION:
            raise NotAffine("many pieces are read in the middle of a kernel")
        text, names = "", []
        for piece, start, end in reached or [(value.pieces[0], 0, 0)]:
            shifted = (*index[: value.dim], along + -start, *index[value.dim + 1 :])
            if len(reached) < 2:
                name = self.element(piece, shifted, guard)
                return name, self.depth(name)
            inside, _ = self._test(f"({along}) >= {start} && ({along}) < {end}", along, guard)
            name = self.element(piece, shifted, inside)
            names += [inside, name]
            text += f"{inside} ? {name} : "
        depth = max(self.depth(n) for n in names)
        return self._let("piece", value.dtype, f"({text}{names[-1]})", depth)

    def _padded(self, value: Pad, index: Index, guard: str) -> tuple[str, int]:
        conditions, shifted, atoms = [], [], []
        fill = ctypes.literal(value.fill, value.dtype)
        for position, before, own in zip(index, value.before, value.source.shape, strict=True):
            inner = position + -before
            first, last = self._range(inner)
            if last < 0 or first >= own:
                return fill, 0
            if first < 0 or last >= own:
                self._note_borders(inner, own)
                conditions.append(f"({inner}) >= 0 && ({inner}) < {own}")
                atoms.append(inner)
            shifted.append(inner)
        if not conditions:
            name = self.element(value.source, tuple(shifted), guard)
            return name, self.depth(name)
        joined = atoms[0]
        for more in atoms[1:]:
            joined = Affine(tuple(sorted({*joined.terms, *more.terms})), 0)
        inside, _ = self._test(" && ".join(conditions), joined, guard)
        name = self.element(value.source, tuple(shifted), inside)
        return self._let(
            "padded", value.dtype, f"({inside} ? {name} : {fill})", max(self.depth(inside), self.depth(name))
        )

    def _range(self, index: Affine) -> tuple[float, float]:
        """The least and the largest number that an index comes to, were it not for guards."""
        if index.sized:
            return -math.inf, math.inf
        ends = [(c, *self.reach.get(atom, (0, self.extents[atom] - 1))) for atom, c in index.terms]
        least = sum(min(c * first, c * last) for c, first, last in ends)
        return index.constant + least, index.constant + sum(max(c * first, c * last) for c, first, last in ends)

    def _note_borders(self, index: Affine, extent: int) -> None:
        """Remember for which values of its only loop variable an index lies in ``range(extent)``."""
        if len(index.terms) != 1 or index.sized or index.terms[0][1] < 0:
            return
        ((atom, step),) = index.terms
        first, last = self.borders.get(atom, (0, self.extents[atom]))
        inside = -(index.constant // step), (extent - 1 - index.constant) // step + 1
        self.borders[atom] = max(first, inside[0]), min(last, inside[1])

    def _test(self, text: str, over: Affine, guard: str) -> tuple[str, int]:
        depth = max(self.depth_of(over), self.depth(guard))
        return self._let("inside", torch.bool, f"{guard} && {text}" if guard else text, depth, over.atoms())

    def _gathered(self, value: Gather, index: Index, guard: str) -> tuple[str, int]:
        table, extent = value.table, value.table.shape[value.dim]
        row = self.element(value.positions, value.position_index(index), guard)
        if value.wraps:
            row, _ = self._let("row", torch.int64, f"({row} < 0 ? {row} + {extent} : {row})", self.depth(row))
        strides = table.strides[: value.dim] + table.strides[value.dim + 1 :]
        buffer = self.inputs[table.position]
        where = offset(value.rest(index), strides)
        looked_up = Indirect(row, table.strides[value.dim], extent)
        return self._load(buffer, table.dtype, where, (looked_up,), guard, buffer.name)
