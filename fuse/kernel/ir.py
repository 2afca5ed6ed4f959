"""The kernel IR: loops over buffers, small enough to print.

A kernel is a list of statements. Memory is touched only by ``Load`` and ``Store`` (and ``Contract``), whose offsets are
affine in the loop variables plus optional indirect terms, so that a transformation can reason about them; arithmetic in
between is C++ text over names that are defined once.

    for i in 64 (parallel):
        best = -inf
        for j in 768 (vector, reduces best):       x = load a[768*i + j];  best = max(best, x)
        for j in 768 (vector):                     store b[768*i + j] = x - best

Loops over time are ``sequential``: their body runs once a step, in order, over ``Buffer``s with role ``carried``. A
``partition`` loop runs one share of the work in each of its iterations, all at the same time, and a ``Barrier`` inside
waits for every share: names do not outlive it (a thread may run several shares, one after another up to the barrier),
so what crosses it goes through a buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fuse.kernel.index import ZERO, Affine, Stride
from fuse.kernel.values import ReduceOp

BufferRole = Literal["input", "output", "scratch", "carried", "packed"]
LoopKind = Literal["serial", "vector", "parallel", "sequential", "partition"]


@dataclass(frozen=True)
class Buffer:
    """Memory of ``extent`` elements of C type ``ctype``; inputs and outputs are arguments, the rest is local."""

    name: str
    ctype: str
    role: BufferRole
    extent: int = 0


@dataclass(frozen=True)
class Indirect:
    """``stride * variable``; the variable was checked to lie in ``range(extent)``."""

    variable: str
    stride: Stride
    extent: int


@dataclass(frozen=True)
class Load:
    """``name = buffer[offset + sum of indirect terms]``, or zero where ``guard`` is false."""

    name: str
    ctype: str
    buffer: Buffer
    offset: Affine
    indirect: tuple[Indirect, ...] = ()
    guard: str = ""


@dataclass(frozen=True)
class Let:
    """``name = text``: arithmetic on names defined before. ``atoms`` are the loop variables that ``text`` names."""

    name: str
    ctype: str
    text: str
    atoms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Store:
    buffer: Buffer
    offset: Affine
    text: str


@dataclass(frozen=True)
class Accumulator:
    """Declares ``name`` with the identity of ``op``; arg-reductions keep ``name`` and ``name_at``."""

    name: str
    ctype: str
    op: ReduceOp


@dataclass(frozen=True)
class Accumulate:
    """``accumulator = op(accumulator, text)``; arg-reductions remember ``position``."""

    accumulator: Accumulator
    text: str
    position: Affine = ZERO


@dataclass(frozen=True)
class Contract:
    """``out[m, n] (+)= sum_k left[m, k] * right[k, n]``.

    ``right`` is packed in panels of ``panel`` columns: ``[n/panel][k][panel]``.
    """

    out: Buffer
    left: Buffer
    right: Buffer
    rows: int
    columns: int
    depth: int
    out_offset: Affine = ZERO
    left_offset: Affine = ZERO
    left_stride: int = 0
    out_stride: int = 0
    panel: int = 16
    accumulate: bool = False


@dataclass(frozen=True)
class Barrier:
    """All shares of the enclosing ``partition`` loop wait for one another.

    It stands directly in that loop, or in a ``sequential`` loop in it.
    """


@dataclass(frozen=True)
class Declare:
    """A buffer that lives until the end of the enclosing block."""

    buffer: Buffer


@dataclass(frozen=True)
class Fail:
    """Leave the kernel with status 1 if ``condition`` (a name) is true: an index is out of range, eager says which."""

    condition: str


@dataclass(frozen=True)
class Comment:
    text: str


@dataclass(frozen=True)
class Loop:
    """``for atom in range(extent)``; ``reduces`` names the accumulators that a vector loop combines lane by lane.

    ``bounds`` are C++ texts of the first iteration and the one behind the last, where only a share of them is run.
    """

    atom: str
    extent: int
    body: tuple[Statement, ...]
    kind: LoopKind = "serial"
    reduces: tuple[Accumulator, ...] = ()
    bounds: tuple[str, str] | None = None


@dataclass(frozen=True)
class Scope:
    """Statements whose names are not seen outside, so that loop nests side by side need not know each other's."""

    body: tuple[Statement, ...]


Statement = Load | Let | Store | Accumulator | Accumulate | Contract | Barrier | Declare | Fail | Comment | Loop | Scope


@dataclass(frozen=True)
class KernelBody:
    """What the emitter prints: arguments in order, then statements."""

    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    statements: tuple[Statement, ...]
    lines: tuple[str, ...] = field(default=())
