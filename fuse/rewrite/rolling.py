"""Prove that a stretch of a graph is a loop unrolled.

    h1 = tanh(xs[0] + h0 @ w)                 carried    h  (first: h0)
    h2 = tanh(xs[1] + h1 @ w)        ->       per step   xs[t]
    h3 = tanh(xs[2] + h2 @ w)                 invariant  w

Step by step and operand by operand, node ``j`` of step ``k`` must read the same kind of thing as node ``j`` of every
other step: a value of its own step, the same value of a fixed number of steps before, one and the same outside value,
the part of one outside tensor that moves evenly with ``k``, or a number. Anything else is a reason not to roll. Steps
at either end that alone differ are peeled: left as they are, outside of the loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch.fx import Node

from fuse import ops
from fuse.graph.periods import smallest_period
from fuse.rewrite import surgery
from fuse.rewrite.moving import Moved, outside_read
from fuse.rewrite.reads import (
    Leaf,
    Link,
    Obstacle,
    Read,
    below,
    layout,
    leaves,
    link_of,
    parts,
    read_of,
    replace_leaves,
    tensors_of,
)
from fuse.rewrite.segments import transitions

LEAST_STEPS = 4
MOST_PEELED = 3
"""Steps that may stay outside of a loop at its beginning, and as many at its end."""

ATTEMPTS = 4
"""How often steps are peeled or grouped before the rest is given up."""

EXACT_INTEGERS = 2**53
NUMBER_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)


@dataclass(frozen=True)
class Result:
    """``links`` of what node ``position`` of a step computes, or of one ``part`` where it computes several tensors."""

    position: int
    part: int | None = None
    links: tuple[Link, ...] = ()

    def of(self, step: Sequence[Node]) -> list[Node]:
        """The nodes of ``step`` that stand for it; none where it is not read."""
        node = step[self.position]
        found = [node] if self.part is None else [n for part, n in parts(node) if part == self.part]
        for number in range(len(self.links)):
            found = [user for node in found for user in node.users if link_of(user) == self.links[number]]
        return found


@dataclass(frozen=True)
class Carry:
    """State: ``links`` of ``result`` as it was ``lag`` steps before; ``firsts`` in the first ``lag`` steps."""

    result: Result
    links: tuple[Link, ...]
    firsts: tuple[Node, ...]

    @property
    def lag(self) -> int:
        return len(self.firsts)

    @property
    def younger(self) -> Carry | None:
        """The state whose value this one takes over in the next step; None: it takes the result itself."""
        return Carry(self.result, self.links, self.firsts[1:]) if self.lag > 1 else None


@dataclass(frozen=True)
class StateRead:
    """``links`` of a state."""

    carry: Carry
    links: tuple[Link, ...]


@dataclass(frozen=True)
class MovingInput:
    """``links`` of what a step reads of a tensor."""

    moved: Moved
    links: tuple[Link, ...]


@dataclass(frozen=True, eq=False)
class Numbers:
    """A number for each step, as what the arithmetic makes of them: tensors of one element of ``dtype``."""

    values: tuple[int | float, ...]
    dtype: torch.dtype

    @property
    def exact(self) -> bool:
        """Whether arithmetic in ``dtype`` sees the same numbers, whether they are Python's or in a tensor."""
        if not self.dtype.is_floating_point:
            limits = torch.iinfo(self.dtype)
            return all(isinstance(v, int) and limits.min <= v <= limits.max for v in self.values)
        largest = torch.finfo(self.dtype).max
        return all(
            abs(v) <= (EXACT_INTEGERS if isinstance(v, int) else largest) or not math.isfinite(v) for v in self.values
        )

    def tensor(self) -> torch.Tensor:
        return torch.tensor(self.values, dtype=self.dtype)


@dataclass(frozen=True)
class Within:
    """A value of the same step."""

    position: int
    links: tuple[Link, ...]


Slot = StateRead | MovingInput | Numbers | Within | Node
"""What an operand of the body is; a bare node is an invariant."""


@dataclass
class Rolled:
    """A proved loop, ready to be built. ``slots``: what the leaves of nodes are, by their positions."""

    steps: list[list[Node]]
    carries: dict[Carry, Any] = field(default_factory=dict)  # with the metadata of the state
    inputs: dict[Moved, None] = field(default_factory=dict)
    numbers: dict[Numbers, None] = field(default_factory=dict)
    invariants: dict[Node, None] = field(default_factory=dict)
    slots: dict[tuple[int, int], Slot] = field(default_factory=dict)

    @property
    def typical(self) -> list[Node]:
        """A step that reads no state from outside."""
        return self.steps[-1]

    @property
    def reads(self) -> list[Node]:
        """The outside nodes that the loop reads."""
        return [*(c.firsts[0] for c in self.carries), *(m.source for m in self.inputs), *self.invariants]


@dataclass(frozen=True)
class Found:
    """A loop, and why some of the steps that were given are outside of it."""

    rolled: Rolled
    peeled: tuple[tuple[list[Node], str], ...] = ()


def find_loop(steps: list[list[Node]]) -> Found | Obstacle:
    """The loop that ``steps`` are the unrolled form of: with all of them, or without a few, or several at a time."""
    peeled: list[tuple[list[Node], str]] = []
    for _ in range(ATTEMPTS):
        found = prove(steps)
        if isinstance(found, Rolled):
            return Found(found, tuple(peeled))
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


def narrowest_cut(steps: Sequence[Sequence[Node]]) -> int:
    """The position in a step at which the fewest bytes are alive: where a step had better begin.

    Repeats may have been found from the middle of the user's step on, because the first one differs.
    """
    period = len(steps[0])
    sample = [node for step in steps[-LEAST_STEPS:] for node in step]
    place = {node: at for at, node in enumerate(sample)}
    last = dict.fromkeys(sample[:period], 0)
    for at, node in enumerate(sample):
        for operand in node.all_input_nodes:
            if (root := read_of(operand).root) in last:
                last[root] = at
    change = [0] * (2 * period + 1)  # of the bytes alive, from one cut to the next
    for node, end in last.items():
        begin = place[node]
        if end > begin:
            bytes_ = sum(t.numel() * t.itemsize for t in tensors_of(node))
            change[begin + 1] += bytes_
            change[begin + 1 + (end - begin) % period] -= bytes_
    alive = list(accumulate(change))
    return min(range(period), key=lambda cut: (alive[cut] + alive[cut + period], cut))


def _without_ends(odd: frozenset[int], count: int) -> tuple[int, int]:
    """The stretch of steps between the odd ones at the beginning and the odd ones at the end."""
    middle = _typical_step(count)
    first = max((k + 1 for k in odd if k <= middle), default=0)
    return first, min((k for k in odd if k > middle), default=count)


def _typical_step(count: int) -> int:
    """The step that others are compared with: late, because the first ones read outside values for states."""
    return count - 1 - max(0, min(count - LEAST_STEPS, MOST_PEELED))


def _grouped(steps: list[list[Node]], size: int) -> tuple[list[list[Node]], list[list[Node]]]:
    """Steps of ``size`` steps each, and what is left over."""
    end = len(steps) // size * size
    return [[n for step in steps[k : k + size] for n in step] for k in range(0, end, size)], steps[end:]


def prove(steps: list[list[Node]]) -> Rolled | Obstacle:
    """The loop that ``steps`` are the unrolled form of, or the reason why they are none."""
    place = {node: (k, j) for k, step in enumerate(steps) for j, node in enumerate(step)}
    rolled = Rolled(steps)
    obstacles: list[Obstacle] = []
    for j in range(len(steps[0])):
        nodes = [step[j] for step in steps]
        found = _operands(nodes, place)
        if isinstance(found, Obstacle):
            obstacles.append(found)
        elif not obstacles:
            _note(rolled, j, found)
    if obstacles:
        odd = frozenset[int]().union(*(o.odd for o in obstacles))
        return Obstacle(obstacles[0].reason, odd, math.lcm(*(o.group for o in obstacles)))
    if not rolled.carries:
        return Obstacle("no value is carried from one step to the next")
    if late := _computed_by_steps(rolled.reads, place, steps[0][0]):
        return Obstacle(f"{late.name} is computed by the steps and needed before them")
    return rolled


def _note(rolled: Rolled, j: int, slots: dict[int, Slot]) -> None:
    typical = leaves(rolled.typical[j])
    for position, found in slots.items():
        rolled.slots[(j, position)] = found
        match found:
            case StateRead():
                value = below(typical[position], len(found.links)).meta["val"]  # type: ignore[arg-type]
                carry: Carry | None = found.carry
                while carry is not None:
                    rolled.carries.setdefault(carry, value)
                    carry = carry.younger
            case MovingInput():
                rolled.inputs.setdefault(found.moved)
            case Numbers():
                rolled.numbers.setdefault(found)
            case Node():
                rolled.invariants.setdefault(found)


def _operands(nodes: Sequence[Node], place: dict[Node, tuple[int, int]]) -> dict[int, Slot] | Obstacle:
    """What corresponding nodes of all steps read, by the positions of their leaves; numbers that stay are left out."""
    operands = [leaves(node) for node in nodes]
    slots: dict[int, Slot] = {}
    obstacles = []
    for position, leaf in enumerate(operands[0]):
        if not isinstance(leaf, Node):
            continue
        found = _classify([read_of(o[position]) for o in operands], place)  # type: ignore[arg-type]
        if isinstance(found, Obstacle):
            where = f"operand {position} of {nodes[0].name} ({nodes[0].meta.get('source', '')})"
            obstacles.append(Obstacle(f"{where} {found.reason}", found.odd, found.group))
        else:
            slots[position] = found
    numbers = _numbers(nodes, operands)
    if isinstance(numbers, Obstacle):
        obstacles.append(numbers)
    else:
        slots |= numbers
    if not obstacles:
        return slots
    odd = frozenset[int]().union(*(o.odd for o in obstacles))
    return Obstacle(obstacles[0].reason, odd, math.lcm(*(o.group for o in obstacles)))


def _classify(reads: Sequence[Read], place: dict[Node, tuple[int, int]]) -> Slot | Obstacle:
    """One operand over all steps."""
    at = [place.get(read.root) for read in reads]
    middle = _typical_step(len(reads))
    found: Slot | tuple[Moved, tuple[Link, ...]] | Obstacle
    if here := at[middle]:
        found = _inside(reads, at, middle - here[0], here[1], middle)
    else:
        found = outside_read(reads, middle)
        inside = frozenset(k for k, where in enumerate(at) if where)
        if inside and not isinstance(found, Obstacle):
            found = Obstacle("is a value of the loop in some steps and an outside one in others", inside)
    if isinstance(found, Obstacle):
        return Obstacle(found.reason, found.odd, _group(reads, at))
    return MovingInput(*found) if isinstance(found, tuple) else found


def _inside(
    reads: Sequence[Read], at: Sequence[tuple[int, int] | None], lag: int, position: int, middle: int
) -> Slot | Obstacle:
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
    """A value of steps before. The state is the whole of it where the first steps read the same view of the like."""
    links = typical.links
    several = not isinstance(typical.root.meta["val"], torch.Tensor)
    result = Result(position, links[0][1][0]) if several else Result(position)  # type: ignore[arg-type]
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
    """The number of steps after which operands repeat that differ from step to step; 1 where they do not."""
    ways = transitions(reads, at)
    return smallest_period(ways[len(ways) // LEAST_STEPS : len(ways) - MOST_PEELED]) or 1


def _numbers(nodes: Sequence[Node], operands: Sequence[Sequence[Leaf]]) -> dict[int, Numbers] | Obstacle:
    """The numbers among the operands, for nodes where one of them changes from step to step; else nothing."""
    positions = [i for i, leaf in enumerate(operands[0]) if not isinstance(leaf, Node)]
    keys = [surgery.constant_key([o[i] for i in positions]) for o in operands]
    if len(set(keys)) == 1:
        return {}
    odd = frozenset(k for k, key in enumerate(keys) if key != keys[_typical_step(len(keys))])
    node = nodes[-1]
    dtype = _arithmetic(node)
    if dtype not in NUMBER_DTYPES:
        return Obstacle(f"a number of {node.name} changes in arithmetic of {dtype}", odd)
    found = {i: Numbers(tuple(o[i] for o in operands), dtype) for i in positions}  # type: ignore[misc]
    if not all(numbers.exact for numbers in found.values()):
        return Obstacle(f"a number of {node.name} changes and does not fit {dtype}", odd)
    if _changed_layout(node, dtype):
        return Obstacle(f"{node.name} gives another dtype for a number that changes", odd)
    return found


def _arithmetic(node: Node) -> torch.dtype:
    """The dtype in which ``node`` combines its operands."""
    held: torch.dtype = node.meta["val"].dtype
    operands = leaves(node)
    if held is not torch.bool or len(operands) != 2 or not isinstance(operands[0], Node):
        return held
    return torch.result_type(operands[0].meta["val"], operands[1])  # type: ignore[arg-type]


def _changed_layout(node: Node, dtype: torch.dtype) -> bool:
    """Whether ``node`` gives another result when its numbers are tensors of ``dtype``."""
    with surgery.fake_mode(node.graph):
        element = torch.empty((), dtype=dtype)
    args, kwargs = replace_leaves(node, lambda leaf: leaf.meta["val"] if isinstance(leaf, Node) else element)
    with surgery.fake_mode(node.graph), torch.no_grad():
        made = ops.tensor_form(node.target)(*args, **kwargs)  # type: ignore[arg-type,misc]
    held = node.meta["val"]
    return bool(made.dtype != held.dtype or made.shape != held.shape)


def _computed_by_steps(nodes: Iterable[Node], place: dict[Node, tuple[int, int]], first: Node) -> Node | None:
    """A node of the loop that one of ``nodes`` needs; all of the loop comes at or after ``first``."""
    seen: set[Node] = set()
    worklist = list(nodes)
    while worklist:
        node = worklist.pop()
        if node in place:
            return node
        if node not in seen and first < node:
            seen.add(node)
            worklist.extend(node.all_input_nodes)
    return None
