"""The memory of a loop kernel, by name, and the loop nests of one step, for any target.

state  h:     h_start (operand)  ->  h, h_next (in the workspace)  ->  h_last (result)
input  x:     x_steps (operand)  ->  x (the part that this step reads)
result y:     y_steps (result)   ->  y (the part that this step writes)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fuse.graph.loop import LoopSpec
from fuse.graph.strides import contiguous_strides
from fuse.kernel.arithmetic.index import ZERO, Affine, NotAffine, Size, Stride
from fuse.kernel.ir import Buffer, For, Scope, Statement, Store
from fuse.kernel.loops.loop_sizes import sizes_of, strides_in
from fuse.kernel.loops.loop_stages import StepProduct, StepValues
from fuse.kernel.nests.schedule import schedule
from fuse.kernel.values import Computation, Concat, Input, Output, Value

MOST_PIECES = 16
"""Most pieces of concatenations that become outputs of their own, in nests with other results. More pieces would make
many nests; then each concatenation is one output, whose pieces are written one after another."""


@dataclass(frozen=True)
class Frame:
    """A loop to generate code for: the values of its step, its trip count and carries, and the tensors around it.

    ``varying`` are sizes that vary between calls, besides the trip count and strides that every loop takes.
    """

    step: StepValues
    spec: LoopSpec
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    varying: tuple[Size, ...] = ()

    @property
    def states(self) -> tuple[Input, ...]:
        return self.step.inputs[: self.spec.carries]

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Sizes passed to the kernel in every call, in this order."""
        names = [self.step.names[position] for position in range(len(self.operands))]
        own = sizes_of(self.spec, self.operands, self.results, names, self.step.result_names)
        return (*own, *self.varying)

    def name(self, value: Input) -> str:
        return self.step.names[value.position]


def operand_name(frame: Frame, position: int) -> str:
    """The name of a whole operand: with ``_start`` for a state, with ``_steps`` for a step input."""
    inputs = frame.spec.carries + len(frame.spec.step_inputs)
    suffix = "_start" if position < frame.spec.carries else "_steps" if position < inputs else ""
    return f"{frame.step.names[position]}{suffix}"


def result_name(frame: Frame, number: int) -> str:
    """The name of a whole result: with ``_last`` for a last state, with ``_steps`` for a collected output."""
    if number < frame.spec.carries:
        return f"{frame.step.names[number]}_last"
    return f"{frame.step.result_names[number]}_steps"


def elements(value: Input) -> int:
    """Elements of the kernel's own memory that ``value`` takes, padding included."""
    return value.shape[0] * known(value.strides[0]) if value.shape else 1


def known(stride: Stride) -> int:
    """A stride in the kernel's own memory, which is a number known when the code is generated."""
    assert isinstance(stride, int)
    return stride


@dataclass(frozen=True)
class Destination:
    """``value`` is stored in the memory ``name`` with these strides (elements), from element ``start`` on."""

    value: Value
    name: str
    strides: tuple[Stride, ...]
    start: Affine = ZERO

    def pieces(self) -> list[Destination]:
        """One destination for each piece of a concatenation; the destination itself for another value."""
        if not isinstance(self.value, Concat):
            return [self]
        found, start = [], self.start
        for piece in self.value.pieces:
            found += replace(self, value=piece, start=start).pieces()
            start += Affine((), piece.shape[self.value.dim]).times(self.strides[self.value.dim])
        return found


def results_of(frame: Frame) -> list[Destination]:
    """The destinations of a step's results: next states, then collected outputs."""
    step, carries = frame.step, frame.spec.carries
    found = []
    for number, value in enumerate(step.results):
        if number < carries:
            found.append(Destination(value, f"{step.names[number]}_next", step.inputs[number].strides))
        else:
            name = step.result_names[number]
            found.append(Destination(value, name, strides_in(frame.results[number], name, without=0)))
    return found


def starts_of(frame: Frame) -> tuple[list[Input], dict[int, str], list[Destination]]:
    """The copies of the start states into the kernel's own memory: the inputs, their names, the destinations."""
    names = {s.position: operand_name(frame, s.position) for s in frame.states}
    sources = [
        Input(s.shape, s.dtype, s.position, strides_in(frame.operands[s.position], names[s.position]))
        for s in frame.states
    ]
    return sources, names, [Destination(s, f"{frame.name(s)}_memory", contiguous_strides(s.shape)) for s in sources]


def lasts_of(frame: Frame) -> list[Destination]:
    """The copies of the last states to the results."""
    names = [result_name(frame, s.position) for s in frame.states]
    results = [frame.results[s.position] for s in frame.states]
    return [Destination(s, n, strides_in(r, n)) for s, n, r in zip(frame.states, names, results, strict=True)]


def nest(
    inputs: Sequence[Input],
    names: Mapping[int, str],
    destinations: Sequence[Destination],
    value_names: Mapping[int, str],
) -> list[Statement]:
    """The loops that compute and store ``destinations``.

    Few pieces of a concatenation are stored like separate results, so that common subexpressions are computed once.

    Raises:
        NotAffine: there are no such loops; the message is a reason for the user.
    """

    def stored(destinations: Sequence[Destination]) -> list[Statement]:
        outputs = tuple(Output(d.value, d.strides) for d in destinations)
        body = schedule(Computation(tuple(inputs), outputs, names, value_names))
        places = {f"out{i}": d for i, d in enumerate(destinations)}
        return [_renamed(s, places) for s in body.statements]

    pieces = [piece for destination in destinations for piece in destination.pieces()]
    if len(destinations) < len(pieces) <= len(destinations) + MOST_PIECES:
        with contextlib.suppress(NotAffine):
            return stored(pieces)
    return stored(destinations)


def _renamed(statement: Statement, places: Mapping[str, Destination]) -> Statement:
    if isinstance(statement, (For, Scope)):
        return replace(statement, body=tuple(_renamed(s, places) for s in statement.body))
    if isinstance(statement, Store) and statement.buffer.role == "output":
        buffer, place = statement.buffer, places[statement.buffer.name]
        offset = statement.offset + place.start
        return replace(statement, buffer=Buffer(place.name, buffer.dtype, buffer.role), offset=offset)
    return statement


def multiplications(frame: Frame) -> int:
    """Number of multiplications in the packed products of one step."""
    products = [s for s in frame.step.stages if isinstance(s, StepProduct)]
    return sum(math.prod(p.result.shape) * p.left.shape[1] for p in products)
