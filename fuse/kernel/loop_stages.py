"""The stages of one step of a loop, and the memory that they work on.

    gates = h @ W.t()          product: its own kind of loops
    e = exp(q . k)             kept: computed for all of its elements before what follows reads it

Both leave their result in memory, where it is an input of what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.fx import Node

from fuse.graph.loop import LoopSpec
from fuse.graph.strides import contiguous_strides
from fuse.kernel.index import Stride
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
    """``value`` is computed for all of its elements before what reads ``result``."""

    value: Value
    result: Input


Stage = StepProduct | Kept

Cut = Literal["as needed", "concatenations", "reductions"]
"""What is in memory before something else reads it: what must be; concatenations of what is computed, too; the result
of every reduction, too."""


@dataclass(frozen=True)
class StepValues:
    """The operands, stages and results of a loop step.

    ``inputs`` by position: the operands' parts that a step reads (states, step inputs, invariants), then results of
    stages. ``results``: the next states, then what is collected. ``names`` are names by position of an input,
    ``result_names`` those of the results, ``value_names`` those of values by ``id``; ``lines`` the user's lines.
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
    """State while the body's nodes are read in order: memory by position, its names, the stages so far.

    ``cut`` says what is kept beside what must be. ``factors`` are left operands of products that are in memory, by
    ``id`` of the value.
    """

    spec: LoopSpec
    cut: Cut
    operands: int
    packing: Packing
    is_kept: Callable[[str], bool]
    inputs: list[Input] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    value_names: dict[int, str] = field(default_factory=dict)
    named: list[Value] = field(default_factory=list)  # kept alive: no other value may get the ``id`` of one
    taken: dict[str, int] = field(default_factory=dict)
    factors: dict[int, tuple[Value, Input]] = field(default_factory=dict)

    def name(self, wanted: str) -> str:
        """A name for memory, never one that the target keeps for itself."""
        stem = plain_name(wanted)
        if self.is_kept(stem):
            stem += "_input"
        self.taken[stem] = self.taken.get(stem, 0) + 1
        return stem if self.taken[stem] == 1 else f"{stem}_{self.taken[stem]}"

    def hint(self, node: Node) -> str:
        """The name of elements that ``node`` computes."""
        stem = plain_name(node.name)
        return f"{stem}_value" if stem in self.taken else stem

    def input(self, shape: Shape, dtype: torch.dtype, strides: tuple[Stride, ...], name: str) -> Input:
        """Memory called ``name``, which is taken."""
        value = Input(shape, dtype, len(self.inputs), strides)
        self.inputs.append(value)
        self.names[value.position] = name
        return value

    def keep(self, value: Value, name: str) -> Input:
        """``value`` in memory."""
        result = self.input(value.shape, value.dtype, contiguous_strides(value.shape), self.name(name))
        self.stages.append(Kept(value, result))
        return result
