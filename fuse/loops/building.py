"""Build the ``Loop`` of proved steps: its body is a copy of one step.

    h3 = tanh(xs[2] + h2 @ w)      ->      body(h, x, w):  next = tanh(x + h @ w);  return next, next
                                           loop(h0, xs, w)            the next state, and the collected output

A state that is read several steps later passes through a carry for each step: ``body(h1, h2) -> (new, h1)``.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fuse import ops
from fuse.graph.fakes.fake_operators import mode_of
from fuse.graph.functional.short_graphs import remaining
from fuse.graph.loop import Loop, LoopSpec, StepInput
from fuse.graph.outputs import add_placeholder, finished
from fuse.loops import short_loops
from fuse.loops.body_operands import BodyOperand, Carry, Computed, MovingInput, StateRead, StepResult, TableRead, Within
from fuse.loops.collectors import COLLECTORS
from fuse.loops.loop_programs import copied, lasts_to_copy
from fuse.loops.moving_reads import Moved
from fuse.loops.reads import Link, Read, is_link, leaves, parts, read_of, replace_leaves
from fuse.loops.rolling import Rolled
from fuse.loops.step_constants import Numbers, StepTable, counted
from fuse.rewrite import surgery
from fuse.rewrite.regions import owner, results_of_call

LoopOperand = Node | Moved | Numbers | StepTable


@dataclass(frozen=True)
class Built:
    """A loop module, its operands, the metadata of its operands, and the outputs that it collects of every step."""

    loop: Loop
    operands: tuple[LoopOperand, ...]
    values: tuple[torch.Tensor, ...]
    collected: tuple[StepResult, ...]


def build(rolled: Rolled, *, persistent: bool = True) -> Built:
    """Build the body and its loop, without a change of the graph."""
    operands: tuple[LoopOperand, ...] = (
        *(c.firsts[0] for c in rolled.carries),
        *rolled.inputs,
        *rolled.constants,
        *rolled.invariants,
    )
    values = tuple(_operand_value(rolled, operand) for operand in operands)
    body = _Body(rolled, values)
    for j, node in enumerate(rolled.typical):
        body.copy(j, node)
    collected = _read_outside(rolled)
    results = [body.next_state(carry) for carry in rolled.carries] + [body.result(r, r.links) for r in collected]
    module = finished(body.graph, results)
    source = rolled.typical[0].meta.get("source", "")
    inputs = (*(m.how for m in rolled.inputs), *(StepInput(0, 0, 1) for _ in rolled.constants))
    spec = LoopSpec(rolled.count, len(rolled.carries), inputs, len(collected), source, persistent=persistent)
    return Built(Loop(module, spec), operands, values, tuple(collected))


def _operand_value(rolled: Rolled, operand: LoopOperand) -> torch.Tensor:
    """The metadata of an operand, which may not be in the graph yet."""
    mode = surgery.fake_mode(rolled.typical[0].graph)
    match operand:
        case Numbers() | StepTable():
            return mode.from_tensor(operand.tensor())
        case Moved():
            value: torch.Tensor = operand.source.meta["val"]
            with mode, torch.no_grad():
                for op, args, kwargs in operand.windows:
                    value = op(value, *args, **dict(kwargs))  # type: ignore[operator]
            return value
    return operand.meta["val"]  # type: ignore[no-any-return]


def operand_node(graph: GraphModule, operand: LoopOperand, before: Node) -> Node:
    """The node of an operand; if there is none yet, it is made in front of ``before``."""
    match operand:
        case Numbers():
            origin = counted(operand, surgery.fake_mode(graph.graph))
            return surgery.add_constant(graph, operand.tensor(), like=before, origin=origin)
        case StepTable():
            return surgery.add_constant(graph, operand.tensor(), like=before)
        case Moved():
            node = operand.source
            for op, args, kwargs in operand.windows:
                node = surgery.insert(before, op, node, *args, **dict(kwargs))  # type: ignore[arg-type]
            return node
    return operand


def call_loop(
    graph: GraphModule, loop: Loop, operands: Sequence[Node], values: Sequence[torch.Tensor], after: Node
) -> list[Node]:
    """Call ``loop`` behind ``after``; returns the nodes of its results, whose metadata is ``values``.

    If the loop runs its body as a program, last states that share memory with another result or operand are copied.
    """
    number = graph.meta.get("loops_made", 0)
    while hasattr(graph, f"loop_{number}"):  # loop-by-loop gradients have added loops already
        number += 1
    graph.meta["loops_made"] = number + 1
    name = f"loop_{number}"
    graph.add_submodule(name, loop)
    with graph.graph.inserting_after(after):
        call = graph.graph.call_module(name, tuple(operands))
    call.meta.update(val=tuple(values), source=loop.spec.source)
    parts = results_of_call(call, range(len(values)))
    for position in [] if loop.persistent else sorted(lasts_to_copy(loop)):
        parts[position] = copied(parts[position], parts[-1].next, values[position].stride())
    return parts


class _Body:
    """A body under construction: receives copies of the nodes of a typical step."""

    def __init__(self, rolled: Rolled, values: Sequence[torch.Tensor]) -> None:
        self.rolled = rolled
        self.graph = Graph()
        self.inner: dict[Node, Node] = {}
        given = iter(values)
        self.states: dict[Carry, Node] = {}
        for number, (carry, held) in enumerate(rolled.carries.items()):
            next(given)
            self.states[carry] = self._placeholder(f"state_{number}", held)
        self.reads: dict[Moved | Numbers | StepTable, Node] = {}
        for number, moved in enumerate(rolled.inputs):
            self.reads[moved] = self._part(f"read_{number}", next(given), moved.how)
        for number, numbers in enumerate(rolled.constants):
            self.reads[numbers] = self._part(f"number_{number}", next(given), StepInput(0, 0, 1))
        self.fixed = {node: self._placeholder(node.name, next(given)) for node in rolled.invariants}

    def _placeholder(self, name: str, value: object) -> Node:
        node = add_placeholder(self.graph, name)
        node.meta.update(val=value, source="")
        return node

    def _part(self, name: str, source: Any, how: StepInput) -> Node:
        with mode_of(source):
            return self._placeholder(name, source.select(how.dim, how.start))

    def copy(self, j: int, node: Node) -> None:
        """Copy node ``j`` of the typical step."""
        slots = [self.rolled.slots.get((j, position)) for position in range(len(leaves(node)))]
        self.inner[node] = self._copied(node, slots)

    def _copied(self, node: Node, slots: Sequence[BodyOperand | None]) -> Node:
        """A copy of ``node`` that reads ``slots``; for a slot of None, it reads its own operand."""
        operands = leaves(node)
        resolved = iter(
            leaf if slot is None else self._operand(slot, node) for leaf, slot in zip(operands, slots, strict=True)
        )
        args, kwargs = replace_leaves(node, lambda leaf: next(resolved))
        target: Any = node.target
        if any(isinstance(slot, Numbers) for slot in slots):
            target = ops.tensor_form(target)
        copy = self.graph.create_node(node.op, target, args, kwargs, node.name)
        copy.meta.update(node.meta)
        return copy

    def _operand(self, slot: BodyOperand, reader: Node) -> Node:
        match slot:
            case Within():
                return self._apply(slot.links, self.inner[self.rolled.typical[slot.position]], reader)
            case StateRead():
                return self._apply(slot.links, self.states[slot.carry], reader)
            case MovingInput():
                return self._apply(slot.links, self.reads[slot.moved], reader)
            case Numbers():
                return self.reads[slot]
            case TableRead():
                return self._apply(slot.links, self.reads[slot.table], reader)
            case Computed():
                slots = [slot.slots.get(position) for position in range(len(leaves(slot.typical)))]
                return self._apply(slot.links, self._copied(slot.typical, slots), reader)
        return self.fixed[slot]

    def next_state(self, carry: Carry) -> Node:
        """The value of ``carry`` in the next step."""
        younger = carry.younger
        return self.states[younger] if younger else self.result(carry.result, carry.links)

    def result(self, result: StepResult, views: tuple[Link, ...]) -> Node:
        """Views of a result of the step."""
        node = self.rolled.typical[result.position]
        links = views if result.part is None else ((operator.getitem, (result.part,), ()), *views)
        return self._apply(links, self.inner[node], node)

    def _apply(self, links: tuple[Link, ...], start: Node, like: Node) -> Node:
        """Copy a chain of views into the body; equal views are copied once."""
        node = start
        for op, args, kwargs in links:
            node = self._shared(op, (node, *args), dict(kwargs), like)
        return node

    def _shared(self, op: object, args: tuple[Any, ...], kwargs: dict[str, Any], like: Node) -> Node:
        first: Node = args[0]
        for user in first.users:
            if user.target is op and user.args == args and user.kwargs == kwargs:
                return user
        node = self.graph.call_function(op, args, kwargs)  # type: ignore[arg-type]
        value = first.meta["val"]
        if op is operator.getitem:
            node.meta["val"] = value[args[1]]
        else:
            with mode_of(value), torch.no_grad():
                node.meta["val"] = op(value, *args[1:], **kwargs)  # type: ignore[operator]
        node.meta["source"] = like.meta.get("source", "")
        return node


def last_states(rolled: Rolled) -> dict[tuple[StepResult, int], int]:
    """The step results that are last states of the loop, or stand for them: (result, step) -> number of the carry."""
    count = len(rolled.steps)
    return {(carry.result, count - carry.lag): number for number, carry in enumerate(rolled.carries) if not carry.links}


def _read_outside(rolled: Rolled) -> list[StepResult]:
    """Results that other nodes than the loop's read, except last states.

    If all readers read the same views of a result, the views are collected.
    """
    position_of = {node: (k, j) for k, step in enumerate(rolled.steps) for j, node in enumerate(step)}
    states = last_states(rolled)
    chains: dict[StepResult, dict[tuple[Link, ...], list[Node]]] = {}
    for node, (k, j) in position_of.items():
        for part, value in parts(node):
            result = StepResult(j, part)
            if (result, k) in states:
                continue
            for read in outside_reads(value, position_of):
                chains.setdefault(result, {}).setdefault(read.links[len(read_of(value).links) :], []).append(read.node)
    wanted = [_collected(result, found) for result, found in chains.items()]
    return sorted(wanted, key=lambda r: (r.position, r.part or 0))


def _collected(result: StepResult, chains: Mapping[tuple[Link, ...], Sequence[Node]]) -> StepResult:
    """The collected part of a result that is read through ``chains`` of views: those views, or all of it."""
    (links, views), *others = chains.items()
    if others or not all(map(_may_be_collected, views)):
        return result
    return replace(result, links=links)


def _may_be_collected(view: Node) -> bool:
    """Whether the loop may collect ``view`` instead of its base."""
    held, whole = view.meta["val"], owner(view).meta["val"]
    if isinstance(whole, torch.Tensor) and held.numel() > whole.numel():
        return False
    return held.is_contiguous() or all(user.target in _COLLECTING for user in view.users)


_COLLECTING = frozenset([*COLLECTORS, *short_loops.COLLECTORS, remaining])


def outside_reads(node: Node, position_of: Mapping[Node, object]) -> list[Read]:
    """The views of ``node``, itself included, that operators outside of the loop or the graph's output read."""
    found = []
    stack = [node]
    while stack:
        view = stack.pop()
        views = [user for user in view.users if is_link(user)]
        if any(user not in position_of and not is_link(user) for user in view.users):
            found.append(read_of(view))
        stack += views
    return found
