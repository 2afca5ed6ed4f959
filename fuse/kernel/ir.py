"""The kernel IR: loops over buffers, small enough to print.

A kernel is a list of statements. Only ``Load`` and ``Store`` access memory. Their offsets are affine in the loop
variables, plus optional indirect terms, so that transformations can analyse them. Arithmetic is typed expressions
(:mod:`fuse.kernel.arithmetic.expressions`) over names that are defined once. The IR contains no text of a target.

    for i in 64 (parallel):
        best = -inf
        for j in 768 (vector, reduces best):       x = load a[768*i + j];  best = max(best, x)
        for j in 768 (vector):                     store b[768*i + j] = x - best
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal as OneOf

import torch

from fuse.kernel.arithmetic.dtypes import register
from fuse.kernel.arithmetic.expressions import (
    Expression,
    Literal,
    Operand,
    Operation,
    Variable,
    both,
    either,
    fn,
    operation,
)
from fuse.kernel.arithmetic.index import ZERO, Affine, Stride
from fuse.kernel.values import RankOrder, ReduceOp, SolveKind

BufferRole = OneOf["input", "output", "scratch"]
LoopKind = OneOf["serial", "vector", "parallel"]


@dataclass(frozen=True)
class Buffer:
    """Memory of ``extent`` elements. Inputs and outputs are arguments of the kernel, scratch is local to it."""

    name: str
    dtype: torch.dtype
    role: BufferRole
    extent: int = 0


@dataclass(frozen=True)
class Indirect:
    """The term ``stride * position`` of an offset; ``position`` has been checked to lie in ``range(extent)``."""

    position: Expression
    stride: Stride
    extent: int


@dataclass(frozen=True)
class Load:
    """``name = buffer[offset + sum of indirect terms]``, or zero where ``guard`` is false."""

    name: str
    buffer: Buffer
    offset: Affine
    indirect: tuple[Indirect, ...] = ()
    guard: Expression | None = None

    @property
    def variable(self) -> Variable:
        return Variable(register(self.buffer.dtype), self.name)


@dataclass(frozen=True)
class Let:
    """``name = value``: arithmetic on names defined before."""

    name: str
    value: Expression

    @property
    def variable(self) -> Variable:
        return Variable(self.value.dtype, self.name)


@dataclass(frozen=True)
class Pointer:
    """``name`` points to element ``offset`` of the memory ``base``."""

    name: str
    base: str
    offset: Affine


@dataclass(frozen=True)
class Store:
    buffer: Buffer
    offset: Affine
    value: Expression


@dataclass(frozen=True)
class Accumulator:
    """Declares ``name``, initialised with the identity of ``op``; arg-reductions declare a position ``name_at`` too."""

    name: str
    dtype: torch.dtype
    op: ReduceOp

    @property
    def result(self) -> Variable:
        """The accumulated value."""
        if self.op in ("argmax", "argmin"):
            return Variable(torch.int64, f"{self.name}_at")
        return Variable(self.dtype, self.name)


@dataclass(frozen=True)
class Accumulate:
    """``accumulator = op(accumulator, value)``; arg-reductions also store ``position``."""

    accumulator: Accumulator
    value: Expression
    position: Affine = ZERO


_COMBINING = {"sum": "add", "prod": "multiply", "max": "maximum", "min": "minimum", "any": "or", "all": "and"}


def combined(op: ReduceOp, so_far: Operand, element: Operand) -> Operation:
    """``op(so_far, element)``, for reductions other than arg-reductions.

    >>> str(combined("max", Variable(torch.float32, "best"), Variable(torch.float32, "x")))
    'maximum(best, x)'
    """
    return operation(_COMBINING.get(op, "larger"), so_far, element)


def better(op: ReduceOp, element: Expression, so_far: Expression, at: Expression) -> Operation:
    """Whether ``element`` replaces ``so_far`` in an arg-reduction: it is the first element, better, or the first
    NaN."""
    beats = element > so_far if op == "argmax" else element < so_far
    return either(either(at < 0, beats), both(fn.unequal(element, element), fn.equal(so_far, so_far)))


def identity(op: ReduceOp, dtype: torch.dtype) -> Literal:
    """The initial value of a reduction.

    >>> identity("sum", torch.float32).number, identity("min", torch.int8).number
    (0, 127)
    """
    if dtype.is_floating_point:
        lowest, highest = -math.inf, math.inf
    else:
        lowest, highest = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    starts = {"prod": 1, "all": 1, "max": lowest, "largest": lowest, "min": highest}
    return Literal(dtype, starts.get(op, 0))


@dataclass(frozen=True)
class Declare:
    """Declares a buffer that lives until the end of the enclosing block."""

    buffer: Buffer


@dataclass(frozen=True)
class Rank:
    """``best`` gets the positions of the largest elements of ``row`` (or smallest), equal ones in the given order."""

    best: Buffer
    row: Buffer
    largest: bool
    order: RankOrder


@dataclass(frozen=True)
class Solve:
    """``solution``, a matrix of this many ``rows`` and ``columns``, gets ``kind`` of ``sources``. The kernel returns
    status 1 where eager may raise."""

    kind: SolveKind
    solution: Buffer
    sources: tuple[Buffer, ...]
    rows: int
    columns: int


@dataclass(frozen=True)
class Fail:
    """Return status 1 from the kernel if ``condition`` (a name) is true: an index is out of range, and eager raises."""

    condition: str


@dataclass(frozen=True)
class Comment:
    text: str


@dataclass(frozen=True)
class For:
    """``for atom in range(extent)``.

    ``reduces`` are the accumulators that a vector loop combines lane by lane. ``bounds`` are the first iteration and
    the end of a loop that runs part of ``range(extent)``.
    """

    atom: str
    extent: int
    body: tuple[Statement, ...]
    kind: LoopKind = "serial"
    reduces: tuple[Accumulator, ...] = ()
    bounds: tuple[Expression, Expression] | None = None


@dataclass(frozen=True)
class Scope:
    """Statements with names of their own, so that neighbouring loop nests may use the same names."""

    body: tuple[Statement, ...]


Statement = (
    Load | Let | Pointer | Store | Accumulator | Accumulate | Declare | Rank | Solve | Fail | Comment | For | Scope
)


@dataclass(frozen=True)
class KernelBody:
    """A whole kernel: its arguments in order, its statements, and the user's ``lines`` that it computes."""

    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    statements: tuple[Statement, ...]
    lines: tuple[str, ...] = field(default=())
