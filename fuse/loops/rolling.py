"""Prove that a stretch of a graph is an unrolled loop.

    h1 = tanh(xs[0] + h0 @ w)                 carried    h  (first: h0)
    h2 = tanh(xs[1] + h1 @ w)        ->       per step   xs[t]
    h3 = tanh(xs[2] + h2 @ w)                 invariant  w

Each operand of node ``j`` must be of the same kind in every step ``k``: a value of the step, the same value a fixed
number of steps before, one outside value, a part of one outside tensor that moves by a constant stride with ``k``, or a
number. Anything else is a reason not to roll. If only steps at either end differ, they are peeled: they stay as they
are, outside of the loop.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch.fx import Node

from fuse.graph.periods import smallest_period
from fuse.loops.body_operands import BodyOperand, Carry, Computed, MovingInput, StateRead, StepResult, TableRead, Within
from fuse.loops.loop_boundaries import transitions
from fuse.loops.moving_reads import Moved, outside_read
from fuse.loops.reads import (
    DEEPEST_AMBIENT,
    Leaf,
    Link,
    Obstacle,
    Read,
    below,
    layout,
    leaves,
    may_be_ambient,
    parts,
    read_of,
    tensors_of,
    token,
)
from fuse.loops.step_constants import Numbers, StepTable, numbers_of, table_of

aten = torch.ops.aten

LEAST_STEPS = 4
"""The fewest equal steps of a loop. Three steps are as fast unrolled as in a loop kernel: models/lstm_loop.py,
gru_loop.py and lstm_layernorm.py with ``seq_length=3`` took 91, 71 and 43 us unrolled, and 119, 70 and 56 us rolled
(one thread of an EPYC, the shortest of 200 calls)."""
MOST_PEELED = 3
"""The most steps peeled at the beginning of a loop, and at its end. Peeled steps launch kernels of their own."""
ATTEMPTS = 4
"""The most attempts to peel or group steps before the search gives up; each is a proof over all steps."""


@dataclass
class Rolled:
    """A proved loop, ready to be built. ``slots``: the kind of each operand, by positions of node and leaf.

    ``left_out``: the loop takes so many steps more, which the graph does not have (:mod:`fuse.loops.short_loops`).
    """

    steps: list[list[Node]]
    carries: dict[Carry, Any] = field(default_factory=dict)  # with the metadata of the state
    inputs: dict[Moved, None] = field(default_factory=dict)
    constants: dict[Numbers | StepTable, None] = field(default_factory=dict)
    invariants: dict[Node, None] = field(default_factory=dict)
    slots: dict[tuple[int, int], BodyOperand] = field(default_factory=dict)
    left_out: int = 0

    @property
    def count(self) -> int:
        """The number of steps that the loop takes."""
        return len(self.steps) + self.left_out

    @property
    def typical(self) -> list[Node]:
        """A step that reads no state from outside."""
        return self.steps[-1]

    @property
    def reads(self) -> list[Node]:
        """The outside nodes that the loop reads."""
        return [*(c.firsts[0] for c in self.carries), *(m.source for m in self.inputs), *self.invariants]


@dataclass(frozen=True)
class RolledPart:
    """A loop, and the steps left outside of it, with reasons."""

    rolled: Rolled
    peeled: tuple[tuple[list[Node], str], ...] = ()


def find_loop(steps: list[list[Node]]) -> RolledPart | Obstacle:
    """The loop whose unrolled form is ``steps``: all of them, all but a few, or several as one step."""
    peeled: list[tuple[list[Node], str]] = []
    for _ in range(ATTEMPTS):
        found = prove(steps)
        if isinstance(found, Rolled):
            return RolledPart(found, tuple(peeled))
        obstacle = found
        first, last = _without_ends(found.odd, len(steps))
        if found.odd and first <= MOST_PEELED and len(steps) - last <= MOST_PEELED and last - first >= LEAST_STEPS:
            outside = [*steps[:first], *steps[last:]]
            peeled.append((outside[0], f"peeled: {found.reason}"))
            steps = steps[first:last]
        elif found.group > 1 and len(steps) // found.group >= LEAST_STEPS:
            steps, rest = _grouped(steps, found.group)
            if rest:
                peeled.append((rest[0], f"peeled: the loop takes {found.group} of these steps at a time"))
        else:
            break
    return obstacle


def lasting(rolled: Rolled) -> set[int]:
    """The positions in a step that the next step depends on, except sums that nothing else reads."""
    reads = Counter(slot.carry for slot in rolled.slots.values() if isinstance(slot, StateRead))
    worklist = []
    for carry in rolled.carries:
        j = carry.result.position
        operands = [rolled.slots.get((j, position)) for position in (0, 1)]
        own = [slot for slot in operands if isinstance(slot, StateRead) and slot.carry == carry]
        if rolled.typical[j].target is not aten.add.Tensor or len(own) != 1 or reads[carry] > 1:
            worklist.append(j)
    needed: dict[int, list[int]] = {}
    for (j, _), slot in rolled.slots.items():
        if isinstance(slot, Within):
            needed.setdefault(j, []).append(slot.position)
    found: set[int] = set()
    while worklist:
        j = worklist.pop()
        if j not in found:
            found.add(j)
            worklist += needed.get(j, [])
    return found


def bytes_carried(steps: Sequence[Sequence[Node]]) -> list[int]:
    """The bytes live across a step boundary, for each position at which steps may begin."""
    period = len(steps[0])
    sample = [node for step in steps[-LEAST_STEPS:] for node in step]
    position_of = {node: at for at, node in enumerate(sample)}
    last = dict.fromkeys(sample[:period], 0)
    for at, node in enumerate(sample):
        for operand in node.all_input_nodes:
            if (root := read_of(operand).root) in last:
                last[root] = at
    change = [0] * (2 * period + 1)  # of the live bytes, from one cut to the next
    for node, end in last.items():
        begin = position_of[node]
        if end > begin:
            bytes_ = sum(t.numel() * t.itemsize for _, part in parts(node) for t in tensors_of(part))
            change[begin + 1] += bytes_
            change[begin + 1 + (end - begin) % period] -= bytes_
    alive = list(accumulate(change))
    return [alive[cut] + alive[cut + period] for cut in range(period)]


def _without_ends(odd: frozenset[int], count: int) -> tuple[int, int]:
    """The range of steps between the odd ones at the beginning and those at the end."""
    middle = _typical_step(count)
    first = max((k + 1 for k in odd if k <= middle), default=0)
    return first, min((k for k in odd if k > middle), default=count)


def _typical_step(count: int) -> int:
    """The step to compare others with: a late one, because first steps read initial states."""
    return count - 1 - max(0, min(count - LEAST_STEPS, MOST_PEELED))


def _grouped(steps: list[list[Node]], size: int) -> tuple[list[list[Node]], list[list[Node]]]:
    """Groups of ``size`` steps as one step each, and the remaining steps."""
    end = len(steps) // size * size
    return [[n for step in steps[k : k + size] for n in step] for k in range(0, end, size)], steps[end:]


def prove(steps: list[list[Node]]) -> Rolled | Obstacle:
    """The loop whose unrolled form is ``steps``, or why there is none."""
    position_of = {node: (k, j) for k, step in enumerate(steps) for j, node in enumerate(step)}
    rolled = Rolled(steps)
    obstacles: list[Obstacle] = []
    for j in range(len(steps[0])):
        nodes = [step[j] for step in steps]
        found = _operands(nodes, position_of)
        if isinstance(found, Obstacle):
            obstacles.append(found)
        elif not obstacles:
            _note(rolled, j, found)
    if obstacles:
        odd = frozenset[int]().union(*(o.odd for o in obstacles))
        return Obstacle(obstacles[0].reason, odd, math.lcm(*(o.group for o in obstacles)))
    if not rolled.carries:
        return Obstacle("no value is carried from one step to the next")
    if late := _computed_by_steps(rolled.reads, position_of, steps[0][0]):
        return Obstacle(f"{late.name} is computed by the steps and needed before them")
    return rolled


def _note(rolled: Rolled, j: int, slots: dict[int, BodyOperand]) -> None:
    typical = leaves(rolled.typical[j])
    for position, found in slots.items():
        rolled.slots[(j, position)] = found
        _note_slot(rolled, found, typical[position])


def _note_slot(rolled: Rolled, found: BodyOperand, typical: Leaf) -> None:
    match found:
        case StateRead():
            value = below(typical, len(found.links)).meta["val"]  # type: ignore[arg-type]
            carry: Carry | None = found.carry
            while carry is not None:
                rolled.carries.setdefault(carry, value)
                carry = carry.younger
        case MovingInput():
            rolled.inputs.setdefault(found.moved)
        case Numbers():
            rolled.constants.setdefault(found)
        case TableRead():
            rolled.constants.setdefault(found.table)
        case Computed():
            inner = leaves(found.typical)
            for position, slot in found.slots.items():
                _note_slot(rolled, slot, inner[position])
        case Node():
            rolled.invariants.setdefault(found)


def _operands(
    nodes: Sequence[Node], position_of: dict[Node, tuple[int, int]], depth: int = DEEPEST_AMBIENT
) -> dict[int, BodyOperand] | Obstacle:
    """The operands of corresponding nodes of all steps, by position of the leaf, without constant numbers."""
    operands = [leaves(node) for node in nodes]
    slots: dict[int, BodyOperand] = {}
    obstacles = []
    for position, leaf in enumerate(operands[0]):
        if not isinstance(leaf, Node):
            continue
        found = _classify([read_of(o[position]) for o in operands], position_of, depth)  # type: ignore[arg-type]
        if isinstance(found, Obstacle):
            where = f"operand {position} of {nodes[0].name} ({nodes[0].meta.get('source', '')})"
            obstacles.append(Obstacle(f"{where} {found.reason}", found.odd, found.group))
        else:
            slots[position] = found
    numbers = numbers_of(nodes, operands, _typical_step(len(nodes)))
    if isinstance(numbers, Obstacle):
        obstacles.append(numbers)
    else:
        slots |= numbers
    if not obstacles:
        return slots
    odd = frozenset[int]().union(*(o.odd for o in obstacles))
    return Obstacle(obstacles[0].reason, odd, math.lcm(*(o.group for o in obstacles)))


def _classify(reads: Sequence[Read], position_of: dict[Node, tuple[int, int]], depth: int) -> BodyOperand | Obstacle:
    """The kind of one operand over all steps."""
    at = [position_of.get(read.root) for read in reads]
    middle = _typical_step(len(reads))
    found: BodyOperand | tuple[Moved, tuple[Link, ...]] | Obstacle
    if here := at[middle]:
        found = _inside(reads, at, middle - here[0], here[1], middle)
    else:
        found = outside_read(reads, middle)
        inside = frozenset(k for k, where in enumerate(at) if where)
        if inside and not isinstance(found, Obstacle):
            found = Obstacle("is computed by the loop in some steps, and outside of it in others", inside)
        elif isinstance(found, Obstacle) and not inside:
            found = _known(reads) or _computed(reads, middle, position_of, depth) or found
    if isinstance(found, Obstacle):
        return Obstacle(found.reason, found.odd, math.lcm(found.group, _group(reads, at)))
    return MovingInput(*found) if isinstance(found, tuple) else found


def _known(reads: Sequence[Read]) -> TableRead | None:
    """Constants that change from step to step."""
    found = table_of(reads)
    return None if found is None else TableRead(*found)


def _computed(
    reads: Sequence[Read], middle: int, position_of: dict[Node, tuple[int, int]], depth: int
) -> Computed | Obstacle | None:
    """An outside value that each step could recompute by equal operators on operands of a step; None for any other."""
    typical = reads[middle]
    if not depth or not may_be_ambient(typical.root):
        return None
    kind = token(typical.root), typical.links
    odd = frozenset(k for k, read in enumerate(reads) if (token(read.root), read.links) != kind)
    if odd:
        return Obstacle("is computed in another way in some steps", odd)
    slots = _operands([read.root for read in reads], position_of, depth - 1)
    if isinstance(slots, Obstacle):
        return slots
    if any(isinstance(slot, (StateRead, Within)) for slot in slots.values()):
        return None
    return Computed(typical.root, slots, typical.links)


def _inside(
    reads: Sequence[Read], at: Sequence[tuple[int, int] | None], lag: int, position: int, middle: int
) -> BodyOperand | Obstacle:
    """A value of the same step, or of ``lag`` steps before."""
    links = reads[middle].links
    odd = {k for k in range(lag, len(reads)) if at[k] != (k - lag, position) or reads[k].links != links}
    odd |= {k for k in range(lag) if at[k] is not None}
    if odd:
        outside = any(at[k] is None for k in odd)
        kind = "an outside value" if outside else "another value of the loop"
        return Obstacle(f"is {kind} in some steps", frozenset(odd))
    return _state(position, reads[:lag], reads[middle]) if lag else Within(position, links)


def _state(position: int, firsts: Sequence[Read], typical: Read) -> StateRead | Obstacle:
    """A value of an earlier step. The state is its base if the first steps read the same views of equal layouts."""
    links = typical.links
    several = not isinstance(typical.root.meta["val"], torch.Tensor)
    result = StepResult(position, links[0][1][0]) if several else StepResult(position)  # type: ignore[arg-type]
    views = links[1:] if several else links
    if all(views == first.links[len(first.links) - len(views) :] for first in firsts):
        wholes = tuple(below(first.node, len(views)) for first in firsts)
        if {layout(whole) for whole in wholes} == {layout(below(typical.node, len(views)))}:
            return StateRead(Carry(result, (), wholes), views)
    odd = frozenset(k for k, first in enumerate(firsts) if layout(first.node) != layout(typical.node))
    if odd:
        return Obstacle("has another shape or dtype in the first step", odd)
    return StateRead(Carry(result, views, tuple(first.node for first in firsts)), ())


def _group(reads: Sequence[Read], at: Sequence[tuple[int, int] | None]) -> int:
    """The period, in steps, of operands that differ from step to step; 1 if there is none."""
    ways = transitions(reads, at)
    return smallest_period(ways[len(ways) // LEAST_STEPS : len(ways) - MOST_PEELED]) or 1


def _computed_by_steps(nodes: Iterable[Node], position_of: dict[Node, tuple[int, int]], first: Node) -> Node | None:
    """A node of the loop that one of ``nodes`` depends on; all nodes of the loop come at or after ``first``."""
    seen: set[Node] = set()
    worklist = list(nodes)
    while worklist:
        node = worklist.pop()
        if node in position_of:
            return node
        if node not in seen and first < node:
            seen.add(node)
            worklist.extend(node.all_input_nodes)
    return None
