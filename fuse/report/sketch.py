"""What a picture of a graph shows: operators, boxes around fused groups and repeated steps, and arrows.

    addmm   tanh   mul              +- x 64 ---------------------+
    addmm   tanh   mul      ->      |  addmm  ->  +- 2 -> 1 --+  |
    ...                             |             | tanh mul  |  |
                                    +-----------------------------+

The same sketch is laid out by Graphviz (``dot.py``) and, without it, by ``layered.py``. Weights and the views of them
are left out: every operator that has a weight says so by its name, and the arrows would hide the data's path.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.report.repeats import Run, fold, representatives
from fuse.rewrite.nested import called_module, kind, trip_count

READABLE_NODES = 400


@dataclass(frozen=True)
class Mark:
    """One operator, input or output of the picture. ``count`` says how many operators it stands for."""

    label: str
    detail: str
    kind: str
    source: str
    count: int = 1


@dataclass(frozen=True)
class Box:
    """A frame around marks (by number) and other boxes: a fused group (``region``), or a ``repeat``."""

    kind: str
    label: str
    parts: tuple[int | Box, ...]


@dataclass(frozen=True)
class Arrow:
    """Data from one mark to another; ``carried`` when it goes to the next step of a repetition, against the order."""

    start: int
    stop: int
    carried: bool


@dataclass(frozen=True)
class Sketch:
    """One graph as it is drawn."""

    marks: dict[int, Mark]
    parts: tuple[int | Box, ...]
    arrows: tuple[Arrow, ...]


@dataclass(frozen=True)
class _Entry:
    """One node of the graph: leaves ``start`` to ``stop``, several for a fused group, whose nodes are ``parts``."""

    token: Hashable
    kind: str
    label: str
    source: str
    start: int
    stop: int
    parts: tuple[_Entry, ...] = ()


@dataclass
class _Reading:
    """The leaves read so far, and for each of them the leaves whose results it uses."""

    marks: list[Mark] = field(default_factory=list)
    uses: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, mark: Mark, uses: Iterable[int]) -> int:
        self.marks.append(mark)
        self.uses.append(tuple(uses))
        return len(self.marks) - 1


# What a node hands to its users: the leaves its value comes from (none: a weight), or these for each of its results.
_Origin = tuple[int, ...] | tuple[tuple[int, ...], ...]


def sketch(graph: GraphModule, limit: int = READABLE_NODES) -> Sketch:
    """What to draw of a captured graph, before or after passes, in time proportional to its size.

    Stretches that repeat are drawn once. If more than ``limit`` marks remain, the operators of one kind in one user
    line become one mark, and if that is still too many, the operators of one name.

    >>> class Twice(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.ops.aten.tanh.default(torch.ops.aten.tanh.default(x))
    >>> drawing = sketch(torch.fx.symbolic_trace(Twice()))
    >>> [mark.label for mark in drawing.marks.values()]
    ['x', 'tanh', 'tanh', 'output']
    """
    reading = _Reading()
    entries = _read(graph, reading, inputs=None)[0]
    chosen: dict[int, int] = {}
    parts = _arrange(entries, reading, chosen)
    keys: tuple[Callable[[_Entry], Hashable], ...] = (
        lambda entry: (entry.kind, entry.source or entry.label),
        lambda entry: (entry.kind, entry.label),
    )
    merged: dict[int, Mark] = {}
    for key in keys:
        if len(set(chosen.values())) <= limit:
            break
        merged = _merge(entries, key, chosen)
        parts = tuple(merged)
    drawn = sorted(set(chosen.values()))
    marks = {leaf: merged.get(leaf, reading.marks[leaf]) for leaf in drawn}
    return Sketch(marks, parts, tuple(_arrows(reading, chosen)))


def short_name(target: object) -> str:
    """An operator's name as its users know it.

    >>> short_name(torch.ops.aten.add.Tensor)
    'add'
    """
    if isinstance(target, torch._ops.OpOverload):
        return target._opname
    return getattr(target, "__name__", str(target))


def describe(value: Any) -> str:
    """Shape and dtype of a node's value, as in ``f32[4, 128]``; several results are joined by a comma.

    >>> describe(torch.zeros(4, 128))
    'f32[4, 128]'
    """
    if isinstance(value, torch.Tensor):
        return f"{_SHORT_DTYPE.get(value.dtype, str(value.dtype)[6:])}{[*value.shape]}"
    if isinstance(value, (tuple, list)):
        return ", ".join(describe(part) for part in value if isinstance(part, torch.Tensor))
    return ""


_SHORT_DTYPE = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


def _read(
    graph: GraphModule, reading: _Reading, inputs: Sequence[tuple[int, ...]] | None
) -> tuple[list[_Entry], tuple[tuple[int, ...], ...]]:
    """The entries of ``graph`` and the origins of its results; a nested graph is given those of its ``inputs``."""
    signature = graph.meta.get("signature")
    origins: dict[Node, _Origin] = {}
    entries: list[_Entry] = []
    results: tuple[tuple[int, ...], ...] = ()
    position = 0
    for node in graph.graph.nodes:
        uses = dict.fromkeys(leaf for argument in node.all_input_nodes for leaf in _flat(origins[argument]))
        if node.op == "placeholder":
            spec = signature.inputs[position] if signature is not None and inputs is None else None
            if inputs is not None:
                origins[node] = inputs[position]
            elif spec is not None and spec.kind != "argument":
                origins[node] = ()
            else:
                name = str(node.target) if spec is None else spec.name
                origins[node] = _add(node, "input", name, (), reading, entries)
            position += 1
        elif node.op == "get_attr":
            origins[node] = ()
        elif node.op == "output":
            values = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
            results = tuple(_flat(origins[value]) if isinstance(value, Node) else () for value in values)
            if inputs is None:
                _add(node, "output", "output", uses, reading, entries)
        elif node.target is operator.getitem:
            whole, index = origins[node.args[0]], node.args[1]
            origins[node] = whole[index] if whole and isinstance(whole[0], tuple) else whole
        elif kind(node) == "region":
            arguments = [_flat(origins[value]) if isinstance(value, Node) else () for value in node.args]
            origins[node] = _group(node, arguments, reading, entries)
        elif kind(node) == "loop" and (loop := called_module(node)) is not None:
            label = f"loop x {trip_count(loop)}"
            origins[node] = _add(node, "loop", label, uses, reading, entries)
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            view = ops.is_view(node.target)
            if view and not uses:
                origins[node] = ()
            else:
                sort = "view" if view else ops.kind(node.target)
                origins[node] = _add(node, sort, short_name(node.target), uses, reading, entries)
        else:
            origins[node] = _add(node, "other", short_name(node.target), uses, reading, entries)
    return entries, results


def _flat(origin: _Origin) -> tuple[int, ...]:
    """All leaves of an origin, also those of a value with several results."""
    return tuple(leaf for part in origin for leaf in (part if isinstance(part, tuple) else (part,)))


def _add(
    node: Node, sort: str, label: str, uses: Iterable[int], reading: _Reading, entries: list[_Entry]
) -> tuple[int, ...]:
    """Read one operator, input or output; its origin is itself."""
    mark = Mark(label, describe(node.meta.get("val")), sort, node.meta.get("source", ""))
    leaf = reading.add(mark, uses)
    # Two inputs with equal names and shapes do not exist, so that inputs never repeat.
    entries.append(_Entry((mark.label, mark.detail, mark.source), sort, label, mark.source, leaf, leaf + 1))
    return (leaf,)


def _group(
    node: Node, arguments: Sequence[tuple[int, ...]], reading: _Reading, entries: list[_Entry]
) -> tuple[tuple[int, ...], ...]:
    """Read a fused group; the origins of its results are the operators inside that compute them."""
    region = called_module(node)
    assert isinstance(region, GraphModule)
    start = len(reading.marks)
    parts, results = _read(region, reading, arguments)
    fused = sum(mark.kind != "view" for mark in reading.marks[start:])
    label = f"{fused} -> 1"
    token = ("region", tuple(part.token for part in parts))
    source = node.meta.get("source", "")
    entries.append(_Entry(token, "region", label, source, start, len(reading.marks), tuple(parts)))
    return results


def _arrange(entries: Sequence[_Entry], reading: _Reading, chosen: dict[int, int]) -> tuple[int | Box, ...]:
    """Boxes and marks for ``entries`` with repeats folded; ``chosen`` learns which leaf is drawn for each leaf."""
    folding = fold([entry.token for entry in entries])
    stands_for = representatives(folding, len(entries))
    boxes: dict[int, int | Box] = {}
    for position, entry in enumerate(entries):
        drawn = entries[stands_for[position]]
        if drawn is entry:
            boxes[position] = entry.start
            chosen[entry.start] = entry.start
            if entry.parts:
                boxes[position] = Box(entry.kind, entry.label, _arrange(entry.parts, reading, chosen))
        else:
            # Equal tokens mean equal structure, so that leaves correspond by their place inside the entry.
            for leaf in range(entry.start, entry.stop):
                chosen[leaf] = chosen[drawn.start + leaf - entry.start]

    def place(parts: Iterable[int | Run]) -> Iterator[int | Box]:
        for part in parts:
            if isinstance(part, int):
                yield boxes[part]
            elif isinstance(single := boxes[part.start], int) and part.period == 1:
                reading.marks[single] = replace(reading.marks[single], count=part.count)
                yield single
            else:
                yield Box("repeat", f"x {part.count}", tuple(place(part.body)))

    return tuple(place(folding))


def _merge(entries: Sequence[_Entry], key: Callable[[_Entry], Hashable], chosen: dict[int, int]) -> dict[int, Mark]:
    """One mark for all entries with the same key, drawn at the first of them."""
    members: dict[Hashable, list[_Entry]] = {}
    for entry in entries:
        members.setdefault(key(entry), []).append(entry)
    merged: dict[int, Mark] = {}
    for together in members.values():
        first = together[0]
        labels = dict.fromkeys(entry.label for entry in together)
        label = ", ".join(labels) if len(labels) <= 3 else f"{len(labels)} operators"
        sources = {entry.source for entry in together}
        merged[first.start] = Mark(label, "", first.kind, first.source if len(sources) == 1 else "", len(together))
        for entry in together:
            for leaf in range(entry.start, entry.stop):
                chosen[leaf] = first.start
    return merged


def _arrows(reading: _Reading, chosen: dict[int, int]) -> Iterator[Arrow]:
    """Every pair of drawn marks between which data flows, once."""
    seen: set[tuple[int, int]] = set()
    for leaf, uses in enumerate(reading.uses):
        stop = chosen[leaf]
        for used in uses:
            start = chosen[used]
            if start != stop and (start, stop) not in seen:
                seen.add((start, stop))
                yield Arrow(start, stop, carried=start > stop)
