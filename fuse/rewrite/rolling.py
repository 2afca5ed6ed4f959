"""Prove that a stretch of a graph is a loop unrolled, and roll it up.

    h1 = tanh(xs[0] + h0 @ w)                 carried    h  (first: h0)
    h2 = tanh(xs[1] + h1 @ w)        ->       per step   xs[t]
    h3 = tanh(xs[2] + h2 @ w)                 invariant  w

Step by step and operand by operand, node ``j`` of step ``k`` must read the same kind of thing as node ``j`` of every
other step: a value of its own step, the same value of the step before, one and the same outside value, or the part of
one outside tensor that moves evenly with ``k``. Anything else is a reason not to roll.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.nn import Module

from fuse.graph.loop import Loop, LoopSpec, StepInput
from fuse.rewrite import effects, surgery
from fuse.rewrite.regions import is_constructor, owner

aten = torch.ops.aten

Link = tuple[object, tuple[object, ...], tuple[tuple[str, object], ...]]
"""One view of a chain: operator, arguments after the first, keyword arguments."""


@dataclass(frozen=True)
class Read:
    """What one operand is: ``links`` (views) applied to ``root``, outermost last; ``node`` is the operand itself."""

    root: Node
    links: tuple[Link, ...]
    node: Node


@dataclass
class Rolled:
    """A proved loop, ready to be built."""

    steps: list[list[Node]]
    carries: dict[Carry, Any] = field(default_factory=dict)  # with the metadata of the state in the second step
    inputs: list[MovingInput] = field(default_factory=list)
    invariants: list[Node] = field(default_factory=list)
    slots: dict[tuple[int, int], Slot] = field(default_factory=dict)

    @property
    def operands(self) -> tuple[Node, ...]:
        """What the loop reads: first states, sources of the inputs that move, invariants."""
        return (*(c.first for c in self.carries), *(m.source for m in self.inputs), *self.invariants)


@dataclass(frozen=True)
class Result:
    """What node ``position`` of a step computes, or one ``part`` of it where it computes several tensors."""

    position: int
    part: int | None = None

    def of(self, step: Sequence[Node]) -> list[Node]:
        """The nodes of ``step`` that stand for it; none where a part is not read."""
        node = step[self.position]
        return [node] if self.part is None else [n for part, n in _parts(node) if part == self.part]


@dataclass(frozen=True)
class Carry:
    """State: ``links`` of ``result`` of the step before; ``first`` in the first step."""

    result: Result
    links: tuple[Link, ...]
    first: Node


@dataclass(frozen=True)
class StateRead:
    """``links`` of a state."""

    carry: Carry
    links: tuple[Link, ...]


@dataclass(frozen=True)
class MovingInput:
    """``select(source, dim, start + step * k)``, then ``links``."""

    source: Node
    how: StepInput
    links: tuple[Link, ...]


@dataclass(frozen=True)
class Within:
    """A value of the same step."""

    position: int
    links: tuple[Link, ...]


Slot = StateRead | MovingInput | Within | Node
"""What an operand of the body is; a bare node is an invariant."""


def anchors(graph: Graph) -> list[Node]:
    """The nodes that compute something, in program order: the letters in which repeats are looked for."""
    return [
        node for node in graph.nodes if node.op == "call_function" and owner(node) is node and not is_constructor(node)
    ]


def letter(node: Node) -> object:
    """What two corresponding nodes have in common: operator, constants, layouts, and which operands are the same."""
    numbers = {operand: number for number, operand in enumerate(node.all_input_nodes)}
    pattern = map_arg((node.args, node.kwargs), lambda n: (numbers[n], _layout(n)))
    return (node.target, surgery.constant_key(pattern), _layout(node))


def _layout(node: Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return tuple((p.dtype, tuple(p.shape)) if isinstance(p, torch.Tensor) else p for p in parts)


def read_of(node: Node) -> Read:
    """``node`` as a chain of views over the node that computes its memory."""
    links: list[Link] = []
    current = node
    while True:
        if current.target is operator.getitem:
            links.append((operator.getitem, current.args[1:], ()))
        elif effects.view_base(current) is not None:
            links.append((current.target, _frozen(current.args[1:]), tuple(sorted(current.kwargs.items()))))
        else:
            return Read(current, tuple(reversed(links)), node)
        current = current.args[0]  # type: ignore[assignment]


def _frozen(value: object) -> tuple[object, ...]:
    return tuple(tuple(v) if isinstance(v, list) else v for v in value)  # type: ignore[attr-defined]


def prove(steps: list[list[Node]]) -> Rolled | str:
    """The loop that ``steps`` are the unrolled form of, or the reason why they are none."""
    place = {node: (k, j) for k, step in enumerate(steps) for j, node in enumerate(step)}
    rolled = Rolled(steps)
    for j in range(len(steps[0])):
        operands = [list(step[j].all_input_nodes) for step in steps]
        if len({len(o) for o in operands}) != 1:
            return f"{steps[0][j].name} reads one value twice in some steps only"
        for slot in range(len(operands[0])):
            reads = [read_of(o[slot]) for o in operands]
            found = _classify(reads, place)
            if isinstance(found, str):
                return f"operand {slot} of {steps[0][j].name} ({steps[0][j].meta.get('source', '')}) {found}"
            rolled.slots[(j, slot)] = found
            _note(rolled, found, reads[1])
    if not rolled.carries:
        return "no value is carried from one step to the next"
    if late := _depends_on(rolled.operands, place):
        return f"{late.name} is read by the steps and depends on one of them"
    return rolled


def _note(rolled: Rolled, found: Slot, second: Read) -> None:
    match found:
        case StateRead():
            rolled.carries.setdefault(found.carry, _below(second.node, len(found.links)).meta["val"])
        case MovingInput():
            if all((found.source, found.how) != (m.source, m.how) for m in rolled.inputs):
                rolled.inputs.append(found)
        case Node():
            if found not in rolled.invariants:
                rolled.invariants.append(found)


def _classify(reads: Sequence[Read], place: dict[Node, tuple[int, int]]) -> Slot | str:
    """One operand over all steps."""
    at = [place.get(read.root) for read in reads]
    inside = at[1:]
    if all(p is not None for p in inside):
        positions = {p[1] for p in inside if p is not None}
        lags = {k - p[0] for k, p in enumerate(inside, start=1) if p is not None}
        if len(positions) != 1 or len({read.links for read in reads[1:]}) != 1:
            return "is another value in some step"
        if lags == {0}:
            same = at[0] == (0, *positions) and reads[0].links == reads[1].links
            return Within(positions.pop(), reads[1].links) if same else "is another value in the first step"
        if lags != {1}:
            return f"comes from {max(lags)} steps before"
        if at[0] is not None:
            return "is carried, and in the first step a value of that step"
        return _state(positions.pop(), reads[0], reads[1])
    if any(p is not None for p in at):
        return "is a value of the loop in some steps and an outside one in others"
    return _outside(reads)


def _state(position: int, first: Read, second: Read) -> StateRead | str:
    """A value of the step before. The state is the whole of it where the first step reads the same view of the like."""
    links = second.links
    several = not isinstance(second.root.meta["val"], torch.Tensor)
    result = Result(position, links[0][1][0]) if several else Result(position)  # type: ignore[arg-type]
    views = links[1:] if several else links
    if views == first.links[len(first.links) - len(views) :]:
        whole = _below(first.node, len(views))
        if _layout(whole) == _layout(_below(second.node, len(views))):
            return StateRead(Carry(result, (), whole), views)
    if _layout(first.node) != _layout(second.node):
        return "has another shape or dtype in the first step"
    return StateRead(Carry(result, views, first.node), ())


def _below(node: Node, links: int) -> Node:
    """What the last ``links`` views of a chain are views of."""
    for _ in range(links):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _outside(reads: Sequence[Read]) -> Slot | str:
    """An operand from outside the loop: the same in every step, or moving evenly."""
    first = reads[0]
    if all(read.root is first.root and read.links == first.links for read in reads):
        return first.node
    if any(read.root is not first.root or len(read.links) != len(first.links) for read in reads):
        return "is a different outside value in each step"
    moving = [i for i in range(len(first.links)) if any(read.links[i] != first.links[i] for read in reads)]
    if len(moving) != 1:
        return "moves along several dimensions at once"
    links = [read.links[moving[0]] for read in reads]
    starts = [_selected(link) for link in links]
    if any(s is None for s in starts) or len({s[0] for s in starts if s}) != 1:
        return "is cut differently in each step"
    indices = [s[1] for s in starts if s]
    step = indices[1] - indices[0]
    if any(b - a != step for a, b in pairwise(indices)):
        return "is read at positions that are not evenly spaced"
    source = _below(first.node, len(first.links) - moving[0])
    dim = starts[0][0] % source.meta["val"].dim()  # type: ignore[index]
    extent = source.meta["val"].shape[dim]
    start = indices[0] % extent
    if not 0 <= start + step * (len(reads) - 1) < extent:
        return "is read around the end of a tensor"
    tail = first.links[moving[0] + 1 :]
    if links[0][0] is aten.slice.Tensor:
        tail = ((aten.unsqueeze.default, (dim,), ()), *tail)
    return MovingInput(source, StepInput(dim, start, step), tail)


def _selected(link: Link) -> tuple[int, int] | None:
    """Dimension and position of a ``select``, or of a ``slice`` of one position."""
    op, args, kwargs = link
    if kwargs:
        return None
    if op is aten.select.int:
        return int(args[0]), int(args[1])  # type: ignore[call-overload]
    if op is aten.slice.Tensor and len(args) >= 3 and isinstance(args[1], int) and args[2] == args[1] + 1:
        return int(args[0]), args[1]  # type: ignore[call-overload]
    return None


def _depends_on(nodes: Sequence[Node], place: dict[Node, tuple[int, int]]) -> Node | None:
    """The first of ``nodes`` that needs a node of the loop."""
    in_order: Iterable[Node] = nodes[0].graph.nodes
    late: set[Node] = set(place)
    wanted = set(nodes)
    for node in in_order:
        if node not in place and any(n in late for n in node.all_input_nodes):
            late.add(node)
            if node in wanted:
                return node
    return next((n for n in nodes if n in place), None)


# ---- building --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """A loop module, its operands, and what it collects of every step."""

    loop: Loop
    operands: tuple[Node, ...]
    collected: tuple[Result, ...]


def build(rolled: Rolled) -> Built:
    """The body and its loop; nothing in the graph is touched."""
    typical = rolled.steps[1]
    body = Graph()
    states = {c: _placeholder(body, f"state_{i}", value) for i, (c, value) in enumerate(rolled.carries.items())}
    reads = [_read_placeholder(body, i, m) for i, m in enumerate(rolled.inputs)]
    fixed = [_placeholder(body, n.name, n.meta["val"]) for n in rolled.invariants]
    inner: dict[Node, Node] = {}
    for j, node in enumerate(typical):
        resolved: dict[Node, Node] = {}
        for slot, operand in enumerate(node.all_input_nodes):
            found = rolled.slots[(j, slot)]
            match found:
                case Within():
                    resolved[operand] = _apply(body, found.links, inner[typical[found.position]], node)
                case StateRead():
                    resolved[operand] = _apply(body, found.links, states[found.carry], node)
                case MovingInput():
                    which = next(
                        i for i, m in enumerate(rolled.inputs) if (m.source, m.how) == (found.source, found.how)
                    )
                    resolved[operand] = _apply(body, found.links, reads[which], node)
                case Node():
                    resolved[operand] = fixed[rolled.invariants.index(found)]
        inner[node] = body.node_copy(node, lambda n, r=resolved: r[n])  # type: ignore[misc]
    collected = _read_outside(rolled)
    ends = [*((c.result, c.links) for c in rolled.carries), *((result, ()) for result in collected)]
    results = []
    for result, views in ends:
        links = views if result.part is None else ((operator.getitem, (result.part,), ()), *views)
        node = typical[result.position]
        results.append(_apply(body, links, inner[node], node))
    output = body.output(tuple(results))
    output.meta.update(val=tuple(r.meta["val"] for r in results), source="")
    module = _LazyGraphModule(Module(), body)
    source = typical[0].meta.get("source", "")
    spec = LoopSpec(len(rolled.steps), len(states), tuple(m.how for m in rolled.inputs), len(collected), source)
    return Built(Loop(module, spec), rolled.operands, tuple(collected))


def _placeholder(body: Graph, name: str, value: object) -> Node:
    node = body.placeholder(name)
    node.meta.update(val=value, source="")
    return node


def _read_placeholder(body: Graph, number: int, moving: MovingInput) -> Node:
    source = moving.source.meta["val"]
    with source.fake_mode:
        return _placeholder(body, f"read_{number}", source.select(moving.how.dim, moving.how.start))


def _apply(body: Graph, links: tuple[Link, ...], start: Node, like: Node) -> Node:
    """Copy a chain of views into the body, sharing equal ones."""
    node = start
    for op, args, kwargs in links:
        node = _shared_call(body, op, (node, *args), dict(kwargs), like)
    return node


def _shared_call(body: Graph, op: object, args: tuple[object, ...], kwargs: dict[str, object], like: Node) -> Node:
    first = args[0]
    assert isinstance(first, Node)
    for user in first.users:
        if user.target is op and user.args == args and user.kwargs == kwargs:
            return user
    node = body.call_function(op, args, kwargs)  # type: ignore[arg-type]
    value = first.meta["val"]
    if op is operator.getitem:
        node.meta["val"] = value[args[1]]
    else:
        with value.fake_mode, torch.no_grad():
            node.meta["val"] = op(value, *args[1:], **kwargs)  # type: ignore[operator]
    node.meta["source"] = like.meta.get("source", "")
    return node


def _read_outside(rolled: Rolled) -> list[Result]:
    """Results that are read outside of the loop, other than as a last state."""
    place = {node: (k, j) for k, step in enumerate(rolled.steps) for j, node in enumerate(step)}
    last = len(rolled.steps) - 1
    states = {c.result for c in rolled.carries if not c.links}
    wanted: set[Result] = set()
    for node, (k, j) in place.items():
        for part, value in _parts(node):
            result = Result(j, part)
            if (k < last or result not in states) and result not in wanted and outside_users(value, place):
                wanted.add(result)
    return sorted(wanted, key=lambda r: (r.position, r.part or 0))


def _parts(node: Node) -> list[tuple[int | None, Node]]:
    """The tensors that ``node`` computes: itself, or the parts that are read."""
    if isinstance(node.meta["val"], torch.Tensor):
        return [(None, node)]
    return [(user.args[1], user) for user in node.users if user.target is operator.getitem]  # type: ignore[misc]


def outside_users(node: Node, place: dict[Node, tuple[int, int]]) -> list[Node]:
    """Users of ``node`` outside of the loop that compute something or are the output, views looked through."""
    found = []
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if user in place:
            continue
        if user.op == "call_function" and owner(user) is not user:
            stack.extend(user.users)
        else:
            found.append(user)
    return found
