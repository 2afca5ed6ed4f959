"""Read a graph for drawing: its operators in program order, the sources of their data, and its groups.

    add --> tanh (both in a region)  -->  mul
    leaf 0  leaf 1                        leaf 2        entries: region (leaves 0 and 1), mul (leaf 2)

The reading follows values through fused groups and loops, indexed results and chains of views, so that arrows begin and
end at operators. It reads the body of a loop once: a reader of a state uses the leaf that computes the state in the
step before, which comes later in the body.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.graph.describing import describe
from fuse.graph.loop import Loop
from fuse.graph.loop_with_ends import LoopWithEnds
from fuse.graph.outputs import outputs_of
from fuse.rewrite.launches import node_launches
from fuse.rewrite.nested import called_module, kind


@dataclass(frozen=True)
class Mark:
    """One operator, input or output of the picture. ``count`` says how many operators it stands for."""

    label: str
    detail: str
    kind: str
    source: str
    count: int = 1


@dataclass(frozen=True)
class Entry:
    """One node with the leaves ``start`` to ``stop``; a fused group or a loop has several, and its nodes as ``parts``.

    Entries with equal tokens look alike, and their leaves correspond by position.
    """

    token: Hashable
    kind: str
    label: str
    source: str
    start: int
    stop: int
    parts: tuple[Entry, ...] = ()


@dataclass
class LeafReading:
    """The leaves of a graph: the mark of each, and the leaves whose results it uses."""

    marks: list[Mark] = field(default_factory=list)
    uses: list[tuple[int, ...]] = field(default_factory=list)


# The sources of a node's value: leaves (none for a weight), or leaves for each of several results.
Leaves = tuple[int, ...]
Origin = Leaves | tuple[Leaves, ...]


def read(graph: GraphModule) -> tuple[LeafReading, list[Entry]]:
    """The leaves and the entries of a captured graph, in time proportional to its size.

    Weights and the views of them are left out.

    >>> import torch
    >>> class Pair(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.ops.aten.tanh.default(torch.ops.aten.neg.default(x))
    >>> reading, entries = read(torch.fx.symbolic_trace(Pair()))
    >>> [(entry.label, reading.uses[entry.start]) for entry in entries]
    [('x', ()), ('neg', (0,)), ('tanh', (1,)), ('output', (2,))]
    """
    level = _Level(LeafReading())
    signature = graph.meta.get("signature")
    placeholders = graph.graph.find_nodes(op="placeholder")
    for position, node in enumerate(placeholders):
        spec = None if signature is None else signature.inputs[position]
        if spec is None or spec.kind == "argument":
            level.add(node, "input", str(node.target) if spec is None else spec.name, ())
        else:
            level.origins[node] = ()
    level.read_body(graph)
    output = graph.graph.output_node()
    level.add(output, "output", "output", level.used_by(output))
    return level.reading, level.entries


def short_name(target: object) -> str:
    """An operator's name as its users know it.

    >>> import torch
    >>> short_name(torch.ops.aten.add.Tensor)
    'add'
    """
    if isinstance(target, OpOverload):
        return target._opname
    return getattr(target, "__name__", str(target))


@dataclass
class _Level:
    """One graph, the captured one or the body of a fused group or loop, while it is read."""

    reading: LeafReading
    origins: dict[Node, Origin] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    views: dict[Node, int] = field(default_factory=dict)

    def read_body(self, graph: GraphModule) -> None:
        for node in graph.graph.nodes:
            if node.op in ("call_function", "call_module", "get_attr"):
                self._read_node(node)

    def used_by(self, node: Node) -> Leaves:
        """The leaves whose results a node uses."""
        leaves = (leaf for argument in node.all_input_nodes for leaf in self.leaves(argument))
        return tuple(dict.fromkeys(leaves))

    def leaves(self, value: object) -> Leaves:
        """The source leaves of a value, all of them if it has several results."""
        if not isinstance(value, Node):
            return ()
        return tuple(leaf for part in self.origins[value] for leaf in (part if isinstance(part, tuple) else (part,)))

    def add(self, node: Node, sort: str, label: str, uses: Leaves) -> None:
        """One more leaf, which is its own entry."""
        mark = Mark(label, describe(node.meta.get("val")), sort, node.meta.get("source", ""))
        leaf = len(self.reading.marks)
        self.reading.marks.append(mark)
        self.reading.uses.append(uses)
        self.origins[node] = (leaf,)
        self.entries.append(Entry((label, mark.detail, mark.source), sort, label, mark.source, leaf, leaf + 1))

    def _read_node(self, node: Node) -> None:
        target = node.target
        if node.op == "get_attr":
            self.origins[node] = ()
        elif target is operator.getitem:
            whole, index = self.origins[node.args[0]], node.args[1]  # type: ignore[index]  # FX types arguments loosely
            several = bool(whole) and isinstance(whole[0], tuple)
            self.origins[node] = whole[index] if several else whole  # type: ignore[assignment, index]  # an argument
        elif kind(node) == "region":
            self._add_region(node, called_module(node))
        elif isinstance(module := called_module(node), LoopWithEnds):
            self._add_region(node, module.body)
        elif isinstance(loop := called_module(node), Loop):
            self._add_loop(node, loop)
        elif ops.is_view(target):
            self._add_view(node)
        else:
            self.add(node, _sort(target), short_name(target), self.used_by(node))

    def _add_view(self, node: Node) -> None:
        """Add a view: a view of a view joins its mark, and a view of a weight is not drawn."""
        uses = self.used_by(node)
        base = node.all_input_nodes[0] if node.all_input_nodes else None
        if not uses:
            self.origins[node] = ()
            return
        if base in self.views and len(base.users) == 1:
            place = self.views[base]
            entry = self.entries[place]
            mark = self.reading.marks[entry.start]
            label = f"{mark.label}, {short_name(node.target)}"
            mark = replace(mark, label=label, detail=describe(node.meta.get("val")))
            self.reading.marks[entry.start] = mark
            self.entries[place] = replace(entry, token=(label, mark.detail, mark.source), label=label)
            self.origins[node] = self.origins[base]
        else:
            place = len(self.entries)
            self.add(node, "view", short_name(node.target), uses)
        self.views[node] = place

    def _add_region(self, node: Node, region: object) -> None:
        """A fused group, or a loop with prologue and epilogue; its results come from operators inside."""
        assert isinstance(region, GraphModule)
        start = len(self.reading.marks)
        inside = self._read_inside(region, [self.leaves(argument) for argument in node.args])
        self.origins[node] = tuple(inside.leaves(value) for value in outputs_of(region.graph))
        self._add_box(node, str(kind(node)), f"{self._operators_from(start)} -> 1", start, inside)

    def _add_loop(self, node: Node, loop: Loop) -> None:
        """A loop, drawn as one step of its body; a state comes from outside at first, then from the step before."""
        start = len(self.reading.marks)
        operands = [self.leaves(argument) for argument in node.args]
        carries = loop.spec.carries
        # The body reads a state before it computes it. Until the body is read, a negative number represents the state.
        inside = self._read_inside(loop.body, [(-1 - i,) for i in range(carries)] + operands[carries:])
        results = [inside.leaves(value) for value in outputs_of(loop.body.graph)]
        begun = [first + later for first, later in zip(operands, results[:carries], strict=False)]
        uses = self.reading.uses
        uses[start:] = [_with_states(leaves, begun) for leaves in uses[start:]]
        # After the last step, states come from steps; a state that is never computed keeps its initial value.
        self.origins[node] = tuple(_with_states(r, results) or _with_states(r, begun) for r in results)
        steps = loop.trip_count
        label = f"loop x {steps:,}: {self._operators_from(start) * steps:,} -> {node_launches(node):,}"
        self._add_box(node, "loop", label, start, inside)

    def _read_inside(self, body: GraphModule, operands: Sequence[Leaves]) -> _Level:
        """Read the graph inside a node; ``operands`` are the sources of its placeholders."""
        inside = _Level(self.reading)
        inside.origins.update(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
        inside.read_body(body)
        return inside

    def _operators_from(self, start: int) -> int:
        return sum(mark.kind != "view" for mark in self.reading.marks[start:])

    def _add_box(self, node: Node, sort: str, label: str, start: int, inside: _Level) -> None:
        """One entry for all leaves from ``start`` on."""
        token = (sort, label, tuple(part.token for part in inside.entries))
        source = node.meta.get("source", "")
        stop = len(self.reading.marks)
        self.entries.append(Entry(token, sort, label, source, start, stop, tuple(inside.entries)))


def _with_states(leaves: Leaves, results: Sequence[Leaves]) -> Leaves:
    """``leaves`` with every state, a negative number, replaced by the leaves that compute it."""
    found = dict.fromkeys(leaves)
    pending = [leaf for leaf in found if leaf < 0]
    while pending:
        for leaf in results[-1 - pending.pop()]:
            if leaf not in found:
                found[leaf] = None
                if leaf < 0:
                    pending.append(leaf)
    return tuple(leaf for leaf in found if leaf >= 0)


def _sort(target: object) -> str:
    """The kind of an operator; one without launches has the kind of a view."""
    if not isinstance(target, OpOverload):
        return "other"
    known = ops.info(target)
    return "view" if known is not None and not known.launches else ops.kind(target)
