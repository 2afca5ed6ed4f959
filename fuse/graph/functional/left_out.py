"""Leave equal steps of loops out of a graph while it is recorded, and add them where they are needed.

    noted operators: 1,024 equal steps          16 steps, whose operands from outside are openings
    stack([h1, ..., h1024])             ->      stack_of_steps([h1, ..., h16, remaining(h16)])
    mul(h1024, 2)                               mul(closing(h16), 2)

Of equal steps (:mod:`fuse.graph.functional.repeated_steps`), only the first get nodes. A later result has neither a
node nor an alias until it is asked for. A result of the last steps then gets a stand-in, and so do the results of all
steps that ``stack`` or ``cat`` collects. If any other result is asked for, all steps get their nodes. A tensor that
steps fill (:mod:`fuse.graph.functional.filled`) becomes a stack after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from fuse.graph.functional.aliases import Alias, Base
from fuse.graph.functional.appending import Appender
from fuse.graph.functional.call_templates import CallTemplate
from fuse.graph.functional.filled import Filled, value_at, values_filled
from fuse.graph.functional.repeated_steps import (
    LEAST_STEPS,
    Noted,
    Part,
    RepeatedSteps,
    place_of,
    repeats_in,
    results_of,
)
from fuse.graph.functional.short_graphs import (
    COLLECTORS,
    STEPS_KEPT,
    Slot,
    closing,
    given,
    opening,
    remaining,
    selected,
    stack_of_steps,
)
from fuse.graph.strides import contiguous_strides

if TYPE_CHECKING:
    from fuse.graph.functional.tensor_values import Functionalizer

aten = torch.ops.aten

MOST_BEFORE = 512
"""Operators before the latest ones that may belong to the first step."""

LAST_STEPS = 2
"""Steps at the end whose results may be read one by one."""


@dataclass(frozen=True)
class _Loop:
    """A loop whose first steps only are in the graph: all its operators, and the ``last`` of their nodes.

    ``known``: by ``id``, the aliases of operands from outside and of results of the steps at hand, as they were at the
    end of these steps. ``bases``: for the ``id`` of a base in ``known``, the base itself.
    """

    number: int
    repeat: RepeatedSteps
    noted: Sequence[Noted]
    last: Node
    known: Mapping[int, Alias]
    bases: Mapping[int, Base]

    @property
    def left_out(self) -> int:
        return self.repeat.count - STEPS_KEPT

    def then(self, tensor: Tensor) -> Node:
        """The value of ``tensor``, a result of the steps at hand, at the end of these."""
        alias = self.known[id(tensor)]
        return alias.node if alias.chain else alias.base.node


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
    filled: dict[Node, tuple[_Loop, Tensor]] = field(default_factory=dict)
    """The value of a tensor that steps of a loop filled, behind these."""

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
            for tensor in repeat.outside.values():
                self.functional.value(tensor)
            had_left_out = self.functional.steps is not self  # one of these
            if had_left_out or not all(self._can_fill(one, repeat) for one in repeat.filled):
                self.functional.put(steps)
            else:
                self._put_steps(steps, repeat)
            done = repeat.end
        self.functional.put(noted[done:])

    def _part(self, tensor: Tensor) -> Part | None:
        """The source node, dimension and index that an outside tensor selects; None if it is no selected part."""
        alias = self.aliases.get(id(tensor))
        return None if alias is None or alias.version != alias.base.version else selected(alias.node)

    def _put_steps(self, noted: Sequence[Noted], repeat: RepeatedSteps) -> None:
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
        before = [functional.value(one.whole) for one in repeat.filled]
        functional.put(noted[: STEPS_KEPT * period], instead)
        made = [one for _, call in noted[: STEPS_KEPT * period] for one in results_of(call)]
        known, bases = self._as_they_are((*repeat.outside.values(), *made))
        loop = _Loop(number, repeat, noted, functional.graph._root.prev, known, bases)
        self.loops.append(loop)
        for one, node in zip(repeat.filled, before, strict=True):
            self._fill(loop, one, node)

    def _as_they_are(self, tensors: Iterable[Tensor]) -> tuple[dict[int, Alias], dict[int, Base]]:
        """Copies of the aliases of ``tensors``, and the base for the ``id`` of each copied base."""
        known: dict[int, Alias] = {}
        copies: dict[int, Base] = {}
        bases: dict[int, Base] = {}
        for tensor in tensors:
            alias = self.aliases[id(tensor)]
            base = copies.get(id(alias.base))
            if base is None:
                base = copies[id(alias.base)] = replace(alias.base)
                bases[id(base)] = alias.base
            known[id(tensor)] = replace(alias, base=base)
        return known, bases

    # ---- tensors that steps fill -------------------------------------------------------------------------------------

    def _can_fill(self, filled: Filled, repeat: RepeatedSteps) -> bool:
        """Whether steps write to nothing that they read under another name, and leave out few places."""
        alias = self.aliases[id(filled.whole)]
        start, end = filled.bounds(repeat.count)
        whole = filled.whole
        sharing = [one for one in repeat.outside.values() if self.aliases[id(one)].base is alias.base]
        plain = not alias.chain and whole.stride() == contiguous_strides(whole.shape)
        return plain and len(sharing) == 1 and start + whole.shape[filled.dim] - end <= STEPS_KEPT

    def _fill(self, loop: _Loop, filled: Filled, before: Node) -> None:
        """Give the tensor that steps fill its value behind all of them: a stack of the values and of places that are
        left."""
        functional, whole = self.functional, filled.whole
        base = self.aliases[id(whole)].base
        written = values_filled(base.node, STEPS_KEPT)
        args = written[-1], loop.number, loop.left_out
        pieces = [*written, self._stand_in(remaining, args, written[-1].meta["val"], written[-1].meta["source"])]
        start, end = filled.bounds(loop.repeat.count)

        def left(at: int) -> Node:
            value = value_at(before, filled.dim, at)
            if isinstance(value, Node):
                return value
            functional.source = base.node.meta["source"]
            self.stand_ins.append(functional.emit(aten.select.int, value, {}))
            return self.stand_ins[-1]

        others = [left(at) for at in (*range(start), *range(end, whole.shape[filled.dim]))]
        pieces = [*others[:start], *(pieces[::-1] if filled.down else pieces), *others[start:]]
        node = self._stand_in(stack_of_steps, (pieces, filled.dim), base.node.meta["val"], base.node.meta["source"])
        self.filled[node] = loop, whole
        base.node, base.version = node, base.version + loop.left_out

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
        alike = place.at(place.step - loop.left_out)
        if place.step <= last - LAST_STEPS or not _is_whole(loop.known[id(alike)]):
            self.functional.whole()
            return
        tensor, value, version = place.at(place.step), loop.then(alike), loop.known[id(alike)].base.version
        args = value, loop.number, last - place.step, loop.left_out
        node = self._stand_in(closing, args, tensor, value.meta["source"])
        self.closings[key] = node
        self.aliases[key] = Alias(tensor, Base(tensor, node, version), (), node, version, node)

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
            last = place.loop.then(place.at(STEPS_KEPT - 1))
            args = last, place.loop.number, steps
            nodes.append(self._stand_in(remaining, args, last.meta["val"], last.meta["source"]))
            self.remaining[nodes[-1]] = tensors[at : at + steps]
            at, some = at + steps, True
        return nodes if some else None

    def _all_from(self, tensors: Any, at: int, place: _Place) -> int:
        """The number of steps left out, where ``tensors`` has those of all of them from ``at`` on; or 0."""
        count = place.loop.left_out
        end = place.loop.repeat.count
        like = place.at(STEPS_KEPT - 1)
        then, now = place.loop.known[id(like)], self.aliases[id(like)].base.version
        if not _is_whole(then) and not then.version == then.base.version == now:  # views of what was written since
            return 0
        if any(self.aliases[key].base.node is not stand_in for key, stand_in in self.closings.items()):
            return 0
        steps = range(STEPS_KEPT, end) if place.step == STEPS_KEPT else range(end - 1, STEPS_KEPT - 1, -1)
        if place.step != steps[0] or at + count > len(tensors):
            return 0
        return count if all(place.at(k) is tensors[at + n] for n, k in enumerate(steps)) else 0

    def are_alike(self, fact: Callable[[Tensor], object]) -> bool:
        """Whether a fact holds of results that were left out as it holds of those of the last step at hand."""
        for loop in self.loops:
            period, calls = loop.repeat.period, loop.noted
            for j in range(period):
                typical = [fact(one) for one in results_of(calls[(STEPS_KEPT - 1) * period + j][1])]
                for _, call in calls[STEPS_KEPT * period + j :: period]:
                    if [fact(one) for one in results_of(call)] != typical:
                        return False
        return True

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
        functional, real = self.functional, self.aliases
        scratch, bases = dict(loop.known), dict(loop.bases)  # they may have been written since
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
                instead[self.closings[key]], real[key].made = alias.base.node, alias.made
        for node, (filler, whole) in self.filled.items():
            if filler is loop:
                instead[node] = scratch[id(whole)].base.node
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


def _is_whole(alias: Alias) -> bool:
    """Whether the tensor is the first of its memory, not a view of another or the same as another."""
    return alias.tensor is alias.base.root


def replaced(args: list[Any], instead: Sequence[tuple[Slot, Node]]) -> list[Any]:
    """Arguments with other nodes in some slots."""
    args = [list(one) if type(one) in (tuple, list) else one for one in args]
    for slot, node in instead:
        if slot.item < 0:
            args[slot.at] = node
        else:
            args[slot.at][slot.item] = node
    return args
