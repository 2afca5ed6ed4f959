"""Parts of a region that do the same to different tensors: a loop over them, in one kernel for any number of them.

    y1 = exp(x1 * scale)              for member in 99:
    ...                        ->         x = args[member], scale = args[99], y = args[100 + member]
    y99 = exp(x99 * scale)                y = exp(x * scale)

A model that returns a list with one tensor a step has such regions, of as many parts as there are steps. In its
backward pass, the results of all parts are stacked. Parts must not share values, and their arguments must be equally
far apart. Few parts are a loop only if their number varies: side by side, they read what they share once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fuse.graph.outputs import add_placeholder, finished, outputs_of
from fuse.kernel.sizes.region_text import NodeNumber, layouts

FEWEST = 8
"""Fewest parts that become a loop where their number is not known to vary."""

_STACK, _CAT = torch.ops.aten.stack.default, torch.ops.aten.cat.default


@dataclass(frozen=True)
class ArgumentPlace:
    """An argument of a member: the number of the kernel's argument that it is for the first member, the distance to
    that of the next member, and the distance of their first elements in one argument."""

    first: int
    step: int
    elements: int


@dataclass(frozen=True)
class Members:
    """``count`` equal computations, and the ``places`` of the inputs, then the outputs, of each of them."""

    count: int
    places: tuple[ArgumentPlace, ...]


@dataclass(frozen=True)
class _End:
    """Where a result of a part is written: the number of the argument, the first element, and the strides."""

    number: int
    element: int
    strides: tuple[int, ...]


def alike_parts(region: GraphModule) -> tuple[GraphModule, Members] | None:
    """The first of a region's parts, and where the arguments of all are; None if they differ, or if there is one."""
    given = {node: number for number, node in enumerate(region.graph.find_nodes(op="placeholder"))}
    results = outputs_of(region.graph)
    joined = results[0] if len(results) == 1 and results[0].target in (_STACK, _CAT) else None
    ends = _pieces(joined, len(given)) if joined else _separate(results, len(given))
    parts = _parts(region.graph, joined) if len(ends) > 1 else None
    if parts is None:
        return None
    parts += [[node] for node in ends if node in given]
    spelled = [_spelled(part, given, ends) for part in parts]
    text, read, written = spelled[0]
    if len(parts) < 2 or not written or any(other != text for other, *_ in spelled):
        return None
    spelled.sort(key=lambda part: (ends[part[2][0]].number, ends[part[2][0]].element))  # written in order
    arguments = [
        [*((given[node], 0) for node in inputs), *((ends[node].number, ends[node].element) for node in outputs)]
        for _, inputs, outputs in spelled
    ]
    places = list(map(_place, zip(*arguments, strict=True)))
    if None in places:
        return None
    strides = [ends[node].strides for node in written]
    return _part(parts[0], read, written, strides), Members(len(parts), tuple(place for place in places if place))


def _separate(results: Sequence[Node], first: int) -> dict[Node, _End]:
    """The ends of results that are an output each; none if one is returned twice, or is an input."""
    if len(set(results)) < len(results) or any(node.op == "placeholder" for node in results):
        return {}
    return {node: _End(number, 0, node.meta["val"].stride()) for number, node in enumerate(results, first)}


def _pieces(joined: Node, number: int) -> dict[Node, _End]:
    """The ends of the pieces of a stack or a concatenation; none if they have several shapes or another dtype than the
    whole, or if one comes twice."""
    pieces: Any = joined.args[0]
    whole: Tensor = joined.meta["val"]
    kinds = {(tuple(piece.meta["val"].shape), piece.meta["val"].dtype) for piece in pieces}
    if len(set(pieces)) < len(pieces) or len(kinds) > 1 or pieces[0].meta["val"].dtype != whole.dtype:
        return {}
    dim = int(joined.args[1] if len(joined.args) > 1 else joined.kwargs.get("dim", 0)) % whole.dim()  # type: ignore[arg-type]  # FX types arguments loosely
    stacked = joined.target is _STACK
    strides = tuple(stride for d, stride in enumerate(whole.stride()) if d != dim or not stacked)
    apart = whole.stride(dim) * (whole.shape[dim] // len(pieces))
    return {piece: _End(number, apart * i, strides) for i, piece in enumerate(pieces)}


def _parts(graph: Graph, joined: Node | None) -> list[list[Node]] | None:
    """The operators of a graph but ``joined``, those that depend on one another together; None if it calls modules."""
    parts: dict[int, list[Node]] = {}
    of: dict[Node, int] = {}
    for number, node in enumerate(graph.nodes):
        if node.op in ("placeholder", "output") or node is joined:
            continue
        if node.op != "call_function":
            return None
        below = {of[one] for one in node.all_input_nodes if one in of}
        mine, *others = sorted(below, key=lambda i: -len(parts[i])) or [number]
        for other in others:
            moved = parts.pop(other)
            of.update(dict.fromkeys(moved, mine))
            parts[mine] += moved
        parts.setdefault(mine, []).append(node)
        of[node] = mine
    order = {node: number for number, node in enumerate(of)}
    return [sorted(part, key=order.__getitem__) for part in parts.values()]


def _spelled(
    part: Sequence[Node], given: Mapping[Node, int], ends: Mapping[Node, _End]
) -> tuple[str, list[Node], list[Node]]:
    """A text that is equal for parts that do the same, and the nodes that this one reads and returns."""
    numbers: dict[Node, int] = {}
    lines: list[str] = []

    def named(node: Node) -> Any:
        if node not in numbers:  # an input, because operands come first
            numbers[node] = len(numbers)
            lines.append(layouts(node))
        return NodeNumber(numbers[node])

    for node in part:
        if node in given:
            named(node)
            continue
        args = map_arg((node.args, node.kwargs), named)
        numbers[node] = len(numbers)
        lines.append(f"{node.target} {args!r} {layouts(node)} {node in ends}")
    return "\n".join(lines), [node for node in numbers if node in given], [node for node in part if node in ends]


def _place(column: Sequence[tuple[int, int]]) -> ArgumentPlace | None:
    """The place of an argument with these numbers and first elements; None if members are not equally far apart.

    >>> _place([(3, 0), (5, 0), (7, 0)]), _place([(4, 0), (4, 8), (4, 16)]), _place([(3, 0), (5, 0), (6, 0)])
    (ArgumentPlace(first=3, step=2, elements=0), ArgumentPlace(first=4, step=0, elements=8), None)
    """
    (first, start), (second, after), *_ = column
    step, elements = second - first, after - start
    expected = [(first + step * i, elements * i) for i in range(len(column))]
    return ArgumentPlace(first, step, elements) if list(column) == expected and start == 0 else None


def _part(
    part: Sequence[Node], read: Sequence[Node], written: Sequence[Node], strides: Sequence[tuple[int, ...]]
) -> GraphModule:
    """A region of one part, whose results have these strides."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in read:
        copies[node] = add_placeholder(graph, node.name)
        copies[node].meta = dict(node.meta)
    for node in part:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    stored: list[Node] = []
    for node, own in zip(written, strides, strict=True):
        value = node.meta["val"]
        stored.append(copies[node])
        if value.stride() != own or node in read:  # a piece of a larger result
            stored[-1] = graph.call_function(torch.ops.aten.clone.default, (copies[node],))
            stored[-1].meta = {**node.meta, "val": value.new_empty_strided(value.shape, own)}
    return finished(graph, stored)
