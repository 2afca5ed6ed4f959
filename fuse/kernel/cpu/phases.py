"""Loop distribution: a loop with a long body becomes short loops over one block at a time, with arrays between them.

    for i in n:                               for each 256 of n:
        a = f(x[i])               ->              for i of them:  kept[i - first] = f(x[i])
        y[i] = g(a)                               for i of them:  y[i] = g(kept[i - first])

An out-of-order processor overlaps several iterations if their bodies are short. Of a chain of 20 dependent
exponentials, it does not hold even one iteration. Kernels with chains of 3, 6 and 20 exponentials ran 1.5, 2.2 and 4
times as fast in short loops, which store and load a few values in the L1 cache. Compile time also falls, because it
grows with the square of a loop's body (GCC's ``combine`` pass): 100 sines took 62 s of processor time in one loop, 2.9
s in short loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import cast

import torch

from fuse.kernel.arithmetic.expressions import (
    Expression,
    Literal,
    Operation,
    Position,
    Variable,
    fn,
    names_in,
    parts,
    position,
    select,
)
from fuse.kernel.arithmetic.extents import estimate, varies
from fuse.kernel.arithmetic.index import ZERO, Affine
from fuse.kernel.arithmetic.scalar_operators import COSTS
from fuse.kernel.ir import Buffer, Declare, For, Let, Load, Scope, Statement, Store

BLOCK = 256
"""Elements of a block: an array of float32 takes 1 KiB, so that tens of arrays fit into the L1 cache."""
SHORT = 20
"""Largest weight of a short loop's body: one function and a few arithmetic operations. Half and twice of it were slower
for most of 14 chains of functions, products and selections."""
LONG_CHAIN = 45
"""Largest weight of a dependency chain in a loop that is not distributed. A chain of 3 exponentials ran 1.5 times as
fast distributed; a chain of 40 products, which weighs less, 0.9 times."""
LONG_BODY = 300
"""Largest weight of a body that is not distributed, to bound the compile time: one loop with 20 sines compiles in 3
s."""
SHORT_ROW = 64
"""Fewest iterations of a loop that is distributed for its chain; fewer leave no iterations to overlap."""
OF_A_FUNCTION = 15
"""Weight of a function, such as an exponential. An arithmetic operation weighs 1."""


def in_phases(statements: Sequence[Statement]) -> list[Statement]:
    """The statements with long loops distributed."""
    found: list[Statement] = []
    for statement in statements:
        match statement:
            case For() if _is_long(statement):
                found.append(_parted(statement))
            case For() | Scope():
                found.append(replace(statement, body=tuple(in_phases(statement.body))))
            case _:
                found.append(statement)
    return found


def weight(statement: Statement) -> int:
    """The weight of a statement: 1 for an arithmetic operation, ``OF_A_FUNCTION`` for a function."""
    value = statement.value if isinstance(statement, (Let, Store)) else None
    operations = [part for part in parts(value) if isinstance(part, Operation)] if value is not None else []
    return max(1, sum(OF_A_FUNCTION if COSTS.get(part.operator) else 1 for part in operations))


def _is_long(loop: For) -> bool:
    """Whether to distribute a loop: it is long, and its iterations are independent."""
    if loop.kind != "vector" or loop.reduces or not all(isinstance(s, (Load, Let, Store)) for s in loop.body):
        return False
    if loop.bounds and not isinstance(loop.bounds[0], Position):
        return False
    chained = estimate(loop.extent) >= SHORT_ROW and _longest_chain(loop.body) > LONG_CHAIN
    return chained or sum(map(weight, loop.body)) > LONG_BODY


def _longest_chain(body: Sequence[Statement]) -> int:
    """The largest weight of a chain of dependent statements."""
    chains: dict[str, int] = {}
    for statement in body:
        before = max((chains.get(name, 0) for name in names_read(statement)), default=0)
        if isinstance(statement, (Load, Let)):
            chains[statement.name] = before + weight(statement)
    return max(chains.values(), default=0)


def _parted(loop: For) -> Statement:
    """A loop over blocks around the short loops, or the short loops alone if there is one block."""
    begin = cast(Position, loop.bounds[0]).index if loop.bounds else ZERO
    if not varies(loop.extent) and loop.extent <= BLOCK:
        offset = Affine.of(loop.atom) + begin * -1
        return Scope(_short_loops(loop, offset))
    block = f"{loop.atom}_block"
    first = begin + Affine.of(block) * BLOCK
    behind, end = position(first + BLOCK), position(begin + loop.extent)
    last = behind if not varies(loop.extent) and loop.extent % BLOCK == 0 else select(behind < end, behind, end)
    share = replace(loop, extent=BLOCK, bounds=(position(first), last))
    loops = _short_loops(share, Affine.of(loop.atom) + first * -1)
    return For(block, -(-loop.extent // BLOCK), loops, "parallel")


def _short_loops(loop: For, offset: Affine) -> tuple[Statement, ...]:
    """The declarations of the arrays, then the short loops; ``offset`` is the index of an iteration in the arrays."""
    loops: list[Statement] = []
    memory = _Memory(loop.extent)
    phases = _phases(loop.body)
    last_reader = {name: number for number, phase in enumerate(phases) for s in phase for name in names_read(s)}
    again: dict[str, list[Statement]] = {}  # how a later loop reads a value
    for number, phase in enumerate(phases):
        read = sorted({name for statement in phase for name in names_read(statement)} & again.keys())
        body: list[Statement] = [*(statement for name in read for statement in again[name]), *phase]
        for statement in phase:
            if not isinstance(statement, (Load, Let)) or last_reader.get(statement.name, number) == number:
                continue
            if isinstance(statement, Load) and not statement.indirect and statement.guard is None:
                again[statement.name] = [statement]
            else:
                stored, again[statement.name] = memory.keep(statement.variable, offset)
                body.append(stored)
        memory.free(name for name in read if last_reader[name] == number)
        loops.append(replace(loop, body=tuple(body)))
    return (*map(Declare, memory.buffers), *loops)


@dataclass
class _Memory:
    """Allocator of arrays for values that later loops read; reuses arrays of values that are dead."""

    extent: int
    buffers: list[Buffer] = field(default_factory=list)
    unused: dict[torch.dtype, list[Buffer]] = field(default_factory=dict)
    held: dict[str, Buffer] = field(default_factory=dict)

    def keep(self, value: Variable, offset: Affine) -> tuple[Store, list[Statement]]:
        """The statement that stores a value in an array, and the statements that load it again.

        Bools are stored as 32-bit integers, because compilers do not vectorise bytes among floats.
        """
        truth = value.dtype is torch.bool
        buffer = self.held[value.name] = self._buffer(torch.int32 if truth else value.dtype)
        if not truth:
            return Store(buffer, offset, value), [Load(value.name, buffer, offset)]
        one, zero = Literal(torch.int32, 1), Literal(torch.int32, 0)
        number = Load(f"fuse_{value.name}", buffer, offset)
        read = Let(value.name, fn.unequal(number.variable, zero))
        return Store(buffer, offset, select(value, one, zero)), [number, read]

    def free(self, names: Iterable[str]) -> None:
        """Allow the arrays of these values to be reused."""
        for buffer in (self.held.pop(name) for name in names if name in self.held):
            self.unused.setdefault(buffer.dtype, []).append(buffer)

    def _buffer(self, dtype: torch.dtype) -> Buffer:
        if unused := self.unused.get(dtype):
            return unused.pop()
        self.buffers.append(Buffer(f"fuse_kept{len(self.buffers)}", dtype, "scratch", self.extent))
        return self.buffers[-1]


def _phases(body: Sequence[Statement]) -> list[list[Statement]]:
    """The statements of each short loop, cut where few values are live.

    All stores are in the last loop, because an output may share memory with an input that earlier loops read.
    """
    computing: list[Statement] = [statement for statement in body if not isinstance(statement, Store)]
    stores = [statement for statement in body if isinstance(statement, Store)]
    known = _known(computing, stores)
    found: list[list[Statement]] = []
    begin = 0
    while begin < len(computing):
        end, spent, at_least = begin, 0, begin + 1
        while end < len(computing) and (end == begin or spent + weight(computing[end]) <= SHORT):
            spent += weight(computing[end])
            end += 1
            at_least = end if spent <= SHORT // 2 else at_least
        if end < len(computing):
            end = min(range(max(at_least, begin + 1), end + 1), key=lambda cut: (known[cut], -cut))
        found.append(computing[begin:end])
        begin = end
    return [*found[:-1], [*(found[-1] if found else ()), *stores]]


def _known(computing: Sequence[Statement], stores: Sequence[Statement]) -> list[int]:
    """Number of live values before each statement, and after the last: defined before, and read later."""
    defined: dict[str, int] = {}
    read: dict[str, int] = {}
    for number, statement in enumerate((*computing, *stores)):
        for name in names_read(statement):
            read[name] = min(number, len(computing))
        if isinstance(statement, (Load, Let)):
            defined[statement.name] = number
    changes = [0] * (len(computing) + 2)
    for name, number in defined.items():
        if name in read:
            changes[number + 1] += 1
            changes[read[name] + 1] -= 1
    return list(accumulate(changes))


def names_read(statement: Statement) -> set[str]:
    """The names of values that a load, a definition or a store reads."""
    match statement:
        case Let() | Store():
            asked: list[Expression] = [statement.value]
        case Load():
            asked = [term.position for term in statement.indirect]
            asked += [] if statement.guard is None else [statement.guard]
        case _:
            asked = []
    return {name for expression in asked for name in names_in(expression)}
