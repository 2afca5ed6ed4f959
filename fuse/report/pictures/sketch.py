"""Sketch of a graph for pictures: operators, boxes around fused groups and repeated steps, and arrows.

    addmm   tanh   mul              +- x 64 ---------------------+
    addmm   tanh   mul      ->      |  addmm  ->  +- 2 -> 1 --+  |
    ...                             |             | tanh mul  |  |
                                    +-----------------------------+

Graphviz lays the sketch out (``dot.py``) or, without it, ``layered.py``. Weights and views of them are left out: an
operator's name tells that it has a weight, and the arrows would hide the data's path. Consecutive views are one mark.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from fuse.report.pictures.reading import Entry, LeafReading, Mark, read
from fuse.report.repeats import Repeat, fold, representatives

READABLE_NODES = 400


@dataclass(frozen=True)
class Box:
    """A frame around marks (by number) and other boxes: a fused group (``region``), a ``loop``, or a ``repeat``."""

    kind: str
    label: str
    parts: tuple[int | Box, ...]


@dataclass(frozen=True)
class Arrow:
    """Data from one mark to another; ``carried`` if it goes to the next step of a repetition, against the order."""

    start: int
    stop: int
    carried: bool


@dataclass(frozen=True)
class Sketch:
    """One graph as it is drawn."""

    marks: dict[int, Mark]
    parts: tuple[int | Box, ...]
    arrows: tuple[Arrow, ...]


def sketch(graph: GraphModule, limit: int = READABLE_NODES) -> Sketch:
    """The sketch of a captured graph, before or after passes, in time proportional to its size.

    Stretches that repeat are drawn once. If more than ``limit`` marks remain, the operators of one kind in one user
    line become one mark, and if that is still too many, the operators of one name.

    >>> import torch
    >>> class Twice(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.ops.aten.tanh.default(torch.ops.aten.tanh.default(x))
    >>> drawing = sketch(torch.fx.symbolic_trace(Twice()))
    >>> [mark.label for mark in drawing.marks.values()]
    ['x', 'tanh', 'tanh', 'output']
    """
    reading, entries = read(graph)
    chosen: dict[int, int] = {}
    parts = _arrange(entries, reading, chosen)
    keys: tuple[Callable[[Entry], Hashable], ...] = (
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


def marks_of(part: int | Box) -> Iterator[int]:
    """The numbers of the marks inside of a part.

    >>> list(marks_of(Box("loop", "x 8", (3, Box("region", "2 -> 1", (4, 5))))))
    [3, 4, 5]
    """
    if isinstance(part, int):
        yield part
    else:
        for inner in part.parts:
            yield from marks_of(inner)


def boxes_of(parts: Iterable[int | Box]) -> Iterator[Box]:
    """Every box among ``parts`` and inside of them, outer ones first.

    >>> [box.label for box in boxes_of((1, Box("loop", "x 8", (3, Box("region", "2 -> 1", (4, 5))))))]
    ['x 8', '2 -> 1']
    """
    for part in parts:
        if isinstance(part, Box):
            yield part
            yield from boxes_of(part.parts)


def _arrange(entries: Sequence[Entry], reading: LeafReading, chosen: dict[int, int]) -> tuple[int | Box, ...]:
    """Boxes and marks for ``entries``, repeats folded; ``chosen`` gets the drawn leaf for each leaf."""
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

    def place(parts: Iterable[int | Repeat]) -> Iterator[int | Box]:
        for part in parts:
            if isinstance(part, int):
                yield boxes[part]
            elif isinstance(single := boxes[part.start], int) and part.period == 1:
                reading.marks[single] = replace(reading.marks[single], count=part.count)
                yield single
            else:
                yield Box("repeat", f"x {part.count:,}", tuple(place(part.body)))

    return tuple(place(folding))


def _merge(entries: Sequence[Entry], key: Callable[[Entry], Hashable], chosen: dict[int, int]) -> dict[int, Mark]:
    """One mark for all entries with the same key, drawn at the first of them."""
    members: dict[Hashable, list[Entry]] = {}
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


def _arrows(reading: LeafReading, chosen: dict[int, int]) -> Iterator[Arrow]:
    """Every pair of drawn marks between which data flows, once."""
    seen: set[tuple[int, int]] = set()
    for leaf, uses in enumerate(reading.uses):
        stop = chosen[leaf]
        for used in uses:
            start = chosen[used]
            if start != stop and (start, stop) not in seen:
                seen.add((start, stop))
                yield Arrow(start, stop, carried=start > stop)
