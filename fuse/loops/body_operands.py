"""The kinds of operands of a loop's body.

a value of its own step                          Within
a value of a fixed number of steps before        StateRead
a part of an outside tensor that moves evenly    MovingInput
a number, or a constant tensor, for each step    Numbers, TableRead
an outside value computed from these             Computed
the same outside value in every step             the node itself
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from fuse.loops.moving_reads import Moved
from fuse.loops.reads import Link, link_of, parts
from fuse.loops.step_constants import Numbers, StepTable


@dataclass(frozen=True)
class StepResult:
    """``links`` of the result of node ``position`` of a step, or of one ``part`` of its several results."""

    position: int
    part: int | None = None
    links: tuple[Link, ...] = ()

    def of(self, step: Sequence[Node]) -> list[Node]:
        """The nodes of ``step`` with this value; empty if nothing reads it."""
        node = step[self.position]
        found = [node] if self.part is None else [n for part, n in parts(node) if part == self.part]
        for number in range(len(self.links)):
            found = [user for node in found for user in node.users if link_of(user) == self.links[number]]
        return found


@dataclass(frozen=True)
class Carry:
    """A state: ``links`` of ``result`` from ``lag`` steps before; in the first ``lag`` steps, one of ``firsts``."""

    result: StepResult
    links: tuple[Link, ...]
    firsts: tuple[Node, ...]

    @property
    def lag(self) -> int:
        return len(self.firsts)

    @property
    def younger(self) -> Carry | None:
        """The state whose value this one takes in the next step; None if it takes the result itself."""
        return Carry(self.result, self.links, self.firsts[1:]) if self.lag > 1 else None


@dataclass(frozen=True)
class StateRead:
    """``links`` of a state."""

    carry: Carry
    links: tuple[Link, ...]


@dataclass(frozen=True)
class MovingInput:
    """``links`` of the part of a tensor that a step reads."""

    moved: Moved
    links: tuple[Link, ...]


@dataclass(frozen=True)
class TableRead:
    """``links`` of a step's row of a table."""

    table: StepTable
    links: tuple[Link, ...]


@dataclass(frozen=True)
class Within:
    """A value of the same step."""

    position: int
    links: tuple[Link, ...]


@dataclass(frozen=True, eq=False)
class Computed:
    """``links`` of an outside node of each step: all are ``typical`` with other operands, and the body recomputes it.

    ``slots``: the kinds of its operands, by position.
    """

    typical: Node
    slots: Mapping[int, BodyOperand]
    links: tuple[Link, ...]


BodyOperand = StateRead | MovingInput | Numbers | TableRead | Within | Computed | Node
"""The kind of an operand of the body; a bare node is an invariant."""
