"""A loop about to be written for a target: memory of its own, where values go, and the nests of one step.

state  h:     h_start (operand)  ->  h, h_next (the kernel's own)  ->  h_last (result)
input  x:     x_steps (operand)  ->  x (this step's part)
result y:     y_steps (result)   ->  y (this step's place)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fuse.graph.loop import LoopSpec
from fuse.graph.strides import contiguous_strides
from fuse.kernel.index import ZERO, Affine, NotAffine, Size, Stride
from fuse.kernel.ir import Buffer, For, Scope, Statement, Store
from fuse.kernel.loop_sizes import sizes_of, strides_in
from fuse.kernel.loop_stages import StepProduct, StepValues
from fuse.kernel.schedule import schedule
from fuse.kernel.values import Computation, Concat, Input, Output, Value

MOST_PIECES = 16
"""Pieces of concatenations that are stored by the nests of other results: many are written one after another."""


@dataclass(frozen=True)
class Frame:
    """A loop about to be written down: its step, how it is driven, and the tensors around it.

    ``told`` are sizes that vary between calls, beside those of every loop.
    """

    step: StepValues
    spec: LoopSpec
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    told: tuple[Size, ...] = ()

    @property
    def states(self) -> tuple[Input, ...]:
        return self.step.inputs[: self.spec.carries]

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Sizes passed to the kernel in every call, in this order."""
        names = [self.step.names[position] for position in range(len(self.operands))]
        own = sizes_of(self.spec, self.operands, self.results, names, self.step.result_names)
        return (*own, *self.told)

    def name(self, value: Input) -> str:
        return self.step.names[value.position]


def operand_name(frame: Frame, position: int) -> str:
    """The name of an operand where it is more than what a step reads of it."""
    inputs = frame.spec.carries + len(frame.spec.step_inputs)
    suffix = "_start" if position < frame.spec.carries else "_steps" if position < inputs else ""
    return f"{frame.step.names[position]}{suffix}"


def result_name(frame: Frame, number: int) -> str:
    """The name of a result: the last state, or what is kept of all steps."""
    if number < frame.spec.carries:
        return f"{frame.step.names[number]}_last"
    return f"{frame.step.result_names[number]}_steps"


def elements(value: Input) -> int:
    """Elements of memory of our own that ``value`` takes, padding included."""
    return value.shape[0] * known(value.strides[0]) if value.shape else 1


def known(stride: Stride) -> int:
    """A stride in memory of our own, which does not differ from call to call."""
    assert isinstance(stride, int)
    return stride


@dataclass(frozen=True)
class Destination:
    """``value`` goes to the memory named ``name`` with these strides (elements), from element ``start`` on."""

    value: Value
    name: str
    strides: tuple[Stride, ...]
    start: Affine = ZERO

    def pieces(self) -> list[Destination]:
        """The same as one destination for each piece of a concatenation."""
        if not isinstance(self.value, Concat):
            return [self]
        found, start = [], self.start
        for piece in self.value.pieces:
            found += replace(self, value=piece, start=start).pieces()
            start += Affine((), piece.shape[self.value.dim]).times(self.strides[self.value.dim])
        return found


def results_of(frame: Frame) -> list[Destination]:
    """Where the step's results go: next states, then what is collected."""
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
    """The copies of the operands' states into memory of our own: what is read, its names, where it goes."""
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

    Pieces of a concatenation are results like any other where they are few: what several need is computed once.

    Raises:
        NotAffine: there are no such loops; the message is a reason.
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
    """Multiplications of one step's products."""
    products = [s for s in frame.step.stages if isinstance(s, StepProduct)]
    return sum(math.prod(p.result.shape) * p.left.shape[1] for p in products)
