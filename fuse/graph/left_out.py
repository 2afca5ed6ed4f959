"""Leave equal steps of loops out of a graph while it is recorded, and put them into it where somebody needs them.

    noted operators: 1,024 equal steps          16 steps, whose operands from outside are openings
    stack([h1, ..., h1024])             ->      stack_of_steps([h1, ..., h16, remaining(h16)])
    mul(h1024, 2)                               mul(closing(h16), 2)

What :mod:`fuse.graph.repeated_steps` finds equal has nodes for the first steps alone. Later results have neither a node
nor an alias until somebody asks for one: results of the last steps then get a stand-in, as do those that ``stack`` or
``cat`` collect of all steps. Where any other is asked for, all steps get their nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from fuse.graph.aliases import Alias, Base
from fuse.graph.appending import Appender
from fuse.graph.call_templates import CallTemplate
from fuse.graph.repeated_steps import LEAST_STEPS, Noted, Part, RepeatedSteps, place_of, repeats_in, results_of
from fuse.graph.short_graphs import (
    COLLECTORS,
    STEPS_KEPT,
    Slot,
    closing,
    given,
    opening,
    remaining,
    selected,
)

if TYPE_CHECKING:
    from fuse.graph.functional import Functionalizer

aten = torch.ops.aten
_Known = tuple[Alias, Node, int]

MOST_BEFORE = 512
"""Operators before the latest ones that may belong to the first step."""

LAST_STEPS = 2
"""Steps at the end whose results may be read one by one."""


@dataclass(frozen=True)
class _Loop:
    """A loop of which the graph has the first steps: all its operators, and the ``last`` node there is of them.

    ``known``: by ``id``, operands from outside and results of the steps at hand, with the node and the version that
    each alias had.
    """

    number: int
    repeat: RepeatedSteps
    noted: Sequence[Noted]
    last: Node
    known: Mapping[int, _Known]

    @property
    def left_out(self) -> int:
        return self.repeat.count - STEPS_KEPT


@dataclass(frozen=True)
class _Place:
    """Result number ``result`` of operator ``position`` of a step."""

    loop: _Loop
    step: int
    position: int
    result: int

    def at(self, step: int) -> Tensor:
        """The same result of another step."""
        _, call = self.loop.noted[step * self.loop.repeat.period + self.position]
        found: Tensor = results_of(call)[self.result]
        return found


class _Aliases(dict[int, Alias]):
    """Aliases by the ``id`` of their tensors; those of steps that are left out are made when they are asked for."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps.functional.aliases)
        self._steps = steps

    def __missing__(self, key: int) -> Alias:
        self._steps.make(key)
        if key not in self:
            raise KeyError(key)
        return self[key]


@dataclass
class Steps:
    """The steps that are left out of the graph of ``functional``."""

    functional: Functionalizer
    loops: list[_Loop] = field(default_factory=list)
    before: list[CallTemplate | None] = field(default_factory=list)
    """Forms of the latest operators that have nodes; None for those that are asked for each time."""
    stand_ins: list[Node] = field(default_factory=list)
    closings: dict[int, Node] = field(default_factory=dict)
    """Stand-ins for single results, by ``id``."""
    remaining: dict[Node, Sequence[Tensor]] = field(default_factory=dict)
    """Stand-in for several tensors -> these tensors."""

    def __post_init__(self) -> None:
        self.aliases = _Aliases(self)

    # ---- leaving out -------------------------------------------------------------------------------------------------

    def put(self, noted: Sequence[Noted]) -> None:
        """Nodes of operators, but for repeated steps."""
        done = 0
        repeats = repeats_in(self.before, noted, self._part) if len(noted) >= LEAST_STEPS else []
        self.before += [template for template, _ in noted[-MOST_BEFORE:]]
        del self.before[:-MOST_BEFORE]
        for repeat in repeats:
            self.functional.put(noted[done : repeat.start])
            steps = noted[repeat.start : repeat.end]
            outside = {key: self._known(tensor) for key, tensor in repeat.outside.items()}
            if self.functional.steps is not self:  # one of these had been left out itself
                self.functional.put(steps)
            else:
                self._put_steps(steps, repeat, outside)
            done = repeat.end
        self.functional.put(noted[done:])

    def _part(self, tensor: Tensor) -> Part | None:
        """The source node, dimension and index that an outside tensor selects; None if it is no selected part."""
        alias = self.aliases.get(id(tensor))
        return None if alias is None or alias.version != alias.base.version else selected(alias.node)

    def _put_steps(self, noted: Sequence[Noted], repeat: RepeatedSteps, known: dict[int, _Known]) -> None:
        functional, number, period = self.functional, len(self.loops), repeat.period
        openings: dict[Node, Node] = {}

        def opened(node: Node) -> Node:
            if node not in openings:
                openings[node] = self._stand_in(opening, (node, number), node.meta["val"], node.meta["source"])
            return openings[node]

        instead: dict[int, list[tuple[Slot, Node]]] = {}
        for slot in repeat.moving:
            for position in range(slot.position, STEPS_KEPT * period, period):
                node = functional.value(given(slot, noted[position][1].args))
                instead.setdefault(position, []).append((slot, opened(node)))
        for slot in repeat.selected:
            for position in range(slot.position, STEPS_KEPT * period, period):
                call = noted[position][1]
                tensor = given(slot, call.args)
                part = selected(functional.value(tensor))
                assert part is not None
                args = opened(part[0]), *part[1:]
                node = functional.append(aten.select.int, args, {}, tensor, call.source)
                instead.setdefault(position, []).append((slot, node))
        for slot, lag in repeat.carried:
            for position in range(slot.position, lag * period, period):
                first = functional.value(given(slot, noted[position][1].args))
                instead.setdefault(position, []).append((slot, opened(first)))
        functional.put(noted[: STEPS_KEPT * period], instead)
        for _, call in noted[: STEPS_KEPT * period]:
            for one in results_of(call):
                known[id(one)] = self._known(one)
        loop = _Loop(number, repeat, noted, functional.graph._root.prev, known)
        self.loops.append(loop)

    def _known(self, tensor: Tensor) -> _Known:
        node = self.functional.value(tensor)
        alias = self.aliases[id(tensor)]
        return alias, node, alias.version

    # ---- stand-ins ---------------------------------------------------------------------------------------------------

    def _stand_in(self, target: Any, args: tuple[Any, ...], value: Any, source: str) -> Node:
        node = self.functional.append(target, args, {}, value, source)
        self.stand_ins.append(node)
        return node

    def has(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a result of a step that is left out."""
        return self._place(id(tensor)) is not None

    def _place(self, key: int) -> _Place | None:
        for loop in self.loops:
            made = loop.repeat.made.get(key)
            if made is not None:
                operator, result = place_of(made)
                step, position = divmod(operator, loop.repeat.period)
                return _Place(loop, step, position, result) if step >= STEPS_KEPT else None
        return None

    def make(self, key: int) -> None:
        """The alias of a result that was left out: a stand-in's, or that of its own node."""
        place = self._place(key)
        if place is None:
            return
        loop, last = place.loop, place.loop.repeat.count - 1
        alias = self.aliases[id(place.at(place.step - loop.left_out))] if place.step > last - LAST_STEPS else None
        if alias is None or alias.chain:
            self.functional.whole()
            return
        tensor, back = place.at(place.step), last - place.step
        args = alias.made, loop.number, back, loop.left_out
        node = self._stand_in(closing, args, tensor, alias.made.meta["source"])
        self.closings[key] = node
        self.aliases[key] = Alias(tensor, Base(tensor, node), (), node, 0, node)

    def pieces(self, tensors: Any) -> list[Node] | None:
        """Tensors that ``stack`` or ``cat`` takes, as nodes; those of all steps left out of a loop, in order or back,
        as one. None where there are none of these."""
        nodes: list[Node] = []
        at, some = 0, False
        while at < len(tensors):
            place = self._place(id(tensors[at]))
            steps = self._all_from(tensors, at, place) if place is not None else 0
            if place is None or not steps:
                nodes.append(self.functional.value(tensors[at]))
                at += 1
                continue
            last = self.aliases[id(place.at(STEPS_KEPT - 1))].made
            args = last, place.loop.number, steps
            nodes.append(self._stand_in(remaining, args, last.meta["val"], last.meta["source"]))
            self.remaining[nodes[-1]] = tensors[at : at + steps]
            at, some = at + steps, True
        return nodes if some else None

    def _all_from(self, tensors: Any, at: int, place: _Place) -> int:
        """The number of steps left out, where ``tensors`` has those of all of them from ``at`` on; or 0."""
        count = place.loop.left_out
        end = place.loop.repeat.count
        like = self.aliases[id(place.at(STEPS_KEPT - 1))]
        if like.chain and like.version != like.base.version:  # views of what was written since
            return 0
        if any(self.aliases[key].base.version for key in self.closings):
            return 0
        steps = range(STEPS_KEPT, end) if place.step == STEPS_KEPT else range(end - 1, STEPS_KEPT - 1, -1)
        if place.step != steps[0] or at + count > len(tensors):
            return 0
        return count if all(place.at(k) is tensors[at + n] for n, k in enumerate(steps)) else 0

    # ---- putting them back -------------------------------------------------------------------------------------------

    def expand(self) -> None:
        """Put all steps into the graph, in the places of their stand-ins."""
        functional = self.functional
        instead: dict[Node, Node] = {}
        for loop in self.loops:
            instead.update(self._put_back(loop))
        for node in self.stand_ins:
            if node.target is remaining:
                for collector in node.users:
                    if collector not in instead:
                        instead[collector] = self._collector(collector)
        for node, other in instead.items():
            node.replace_all_uses_with(other)
        for node in self.stand_ins:
            if node.target is opening:
                node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        for alias in self.aliases.values():
            alias.node = instead.get(alias.node, alias.node)
            alias.made = instead.get(alias.made, alias.made)
            alias.base.node = instead.get(alias.base.node, alias.base.node)
        functional.written = {instead.get(node, node) for node in functional.written}
        for node in (*instead, *self.stand_ins):
            if not node._erased and not node.users:
                functional.graph.erase_node(node)
        self.loops.clear()
        self.stand_ins.clear()

    def _put_back(self, loop: _Loop) -> dict[Node, Node]:
        """Make nodes and aliases of the steps that were left out; stand-ins, and the nodes that they stand for."""
        functional, bases, real = self.functional, dict[int, Base](), self.aliases
        scratch: dict[int, Alias] = {}
        for key, (alias, node, version) in loop.known.items():  # as they were then: they may have been written since
            then = Base(alias.base.root, node, version)
            bases[id(then)] = alias.base
            scratch[key] = Alias(alias.tensor, then, alias.chain, node, version, node)
        append, source = functional.append, functional.source
        functional.aliases, functional.append = scratch, Appender(functional.graph, loop.last.next)
        try:
            functional.put(loop.noted[STEPS_KEPT * loop.repeat.period :])
        finally:
            functional.aliases, functional.append, functional.source = real, append, source
        made = {key: alias for key, alias in scratch.items() if key not in loop.known}
        instead: dict[Node, Node] = {}
        for key, alias in made.items():
            if key in real:
                bases[id(alias.base)] = real[key].base
                instead[self.closings[key]] = alias.made
        for key, alias in made.items():
            alias.base = bases.get(id(alias.base), alias.base)
            if key not in real:
                real[key] = alias
        return instead

    def _collector(self, short: Node) -> Node:
        """``stack`` or ``cat`` of all pieces."""
        pieces: list[Node] = []
        for piece in short.args[0]:  # type: ignore[union-attr]  # the pieces
            if piece.target is remaining:  # type: ignore[union-attr]
                pieces += [self.functional.value(one) for one in self.remaining[piece]]  # type: ignore[index]
            else:
                pieces.append(piece)  # type: ignore[arg-type]
        op = next(op for op, stand_in in COLLECTORS.items() if stand_in is short.target)
        append = Appender(self.functional.graph, short)
        return append(op, (pieces, *short.args[1:]), dict(short.kwargs), short.meta["val"], short.meta["source"])


def replaced(args: list[Any], instead: Sequence[tuple[Slot, Node]]) -> list[Any]:
    """Arguments with other nodes in some slots."""
    args = [list(one) if type(one) in (tuple, list) else one for one in args]
    for slot, node in instead:
        if slot.item < 0:
            args[slot.at] = node
        else:
            args[slot.at][slot.item] = node
    return args
