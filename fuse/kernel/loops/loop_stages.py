"""The stages of one step of a loop, each of which stores its result in memory before later stages read it.

gates = h @ W.t()          StepProduct: a matrix product in packed panels
e = exp(q . k)             Kept: any other value that is stored
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.fx import Node

from fuse.graph.loop import LoopSpec
from fuse.graph.strides import contiguous_strides
from fuse.kernel.arithmetic.index import Stride
from fuse.kernel.names import plain_name
from fuse.kernel.packing import Packing
from fuse.kernel.placement import StridedPlace
from fuse.kernel.values import Input, Shape, Value


@dataclass(frozen=True)
class StepProduct:
    """``result = left @ right`` in float or double.

    ``left`` is in memory, dense along its second dimension; ``right`` is the same in every step.
    """

    left: Input
    right: StridedPlace
    result: Input


@dataclass(frozen=True)
class Kept:
    """``value`` is stored in ``result``, all of its elements before any is read."""

    value: Value
    result: Input


Stage = StepProduct | Kept

Cut = Literal["as needed", "concatenations", "reductions"]
"""The values that are stored before they are read: only those that must be; costly concatenations too; or, besides
these, the result of every reduction."""


@dataclass(frozen=True)
class StepValues:
    """The inputs, stages and results of a loop step.

    Attributes:
        inputs: by position, the parts of the operands that a step reads (states, step inputs, invariants), then the
            results of the stages.
        stages: in the order in which they run.
        results: the next states, then the collected outputs.
        names: names of the inputs, by position.
        result_names: names of the results.
        value_names: names of values, by ``id``.
        lines: the user's lines that the step computes.
    """

    inputs: tuple[Input, ...]
    stages: tuple[Stage, ...]
    results: tuple[Value, ...]
    names: Mapping[int, str]
    result_names: tuple[str, ...]
    value_names: Mapping[int, str]
    lines: tuple[str, ...]


@dataclass
class StepReader:
    """State while the nodes of a loop body are read in order: inputs, names and stages so far.

    ``cut`` chooses the values that are stored. ``operands`` is the number of operands. ``is_reserved`` is true for
    names that the target reserves. ``factors`` are stored left operands of products, by the ``id`` of their value.
    """

    spec: LoopSpec
    cut: Cut
    operands: int
    packing: Packing
    is_reserved: Callable[[str], bool]
    inputs: list[Input] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    value_names: dict[int, str] = field(default_factory=dict)
    named: list[Value] = field(default_factory=list)  # kept alive: no other value may get the ``id`` of one
    taken: dict[str, int] = field(default_factory=dict)
    factors: dict[int, tuple[Value, Input]] = field(default_factory=dict)

    def name(self, wanted: str) -> str:
        """A new name for memory, made from ``wanted``, and not one that the target reserves."""
        stem = plain_name(wanted)
        if self.is_reserved(stem):
            stem += "_input"
        self.taken[stem] = self.taken.get(stem, 0) + 1
        return stem if self.taken[stem] == 1 else f"{stem}_{self.taken[stem]}"

    def hint(self, node: Node) -> str:
        """The name of the elements that ``node`` computes, unlike the names of memory."""
        stem = plain_name(node.name)
        return f"{stem}_value" if stem in self.taken else stem

    def input(self, shape: Shape, dtype: torch.dtype, strides: tuple[Stride, ...], name: str) -> Input:
        """A new input in memory called ``name``, which :meth:`name` returned."""
        value = Input(shape, dtype, len(self.inputs), strides)
        self.inputs.append(value)
        self.names[value.position] = name
        return value

    def keep(self, value: Value, name: str) -> Input:
        """Store ``value`` in contiguous memory; returns that memory as an input of later values."""
        result = self.input(value.shape, value.dtype, contiguous_strides(value.shape), self.name(name))
        self.stages.append(Kept(value, result))
        return result
