"""Reads of an unrolled loop's steps: operands as chains of views, and numbers that may change from step to step.

    mul(h1, 0.5)     leaves: h1, 0.5             token: mul of [3, 20] and a number
    add(x[2], h1)    leaves: select(x, 0, 2), h1     read: (select, 0, 2) of x

Two nodes with equal tokens may be the same node of two steps of a loop: they differ in what they read only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from fuse import ops
from fuse.loops.collectors import COLLECTORS
from fuse.rewrite import effects, surgery
from fuse.rewrite.regions import is_constructor, owner

Link = tuple[object, tuple[object, ...], tuple[tuple[str, object], ...]]
"""One view of a chain: operator, arguments after the first, keyword arguments."""

DEEPEST_AMBIENT = 3
"""Operators one after another outside of a loop that its steps may compute again. Fewer than the least loop has steps:
what a step does to a state stands behind as many of its kind."""

Leaf = Node | int | float
"""What a node reads at one place: a node, or a number that could as well be a tensor of one element."""


@dataclass(frozen=True)
class Read:
    """What one operand is: ``links`` (views) applied to ``root``, outermost last; ``node`` is the operand itself."""

    root: Node
    links: tuple[Link, ...]
    node: Node


def anchors(graph: Graph) -> list[Node]:
    """The nodes that compute something, in program order: the tokens in which repeats are looked for."""
    return [
        node for node in graph.nodes if node.op == "call_function" and owner(node) is node and not is_constructor(node)
    ]


def may_be_ambient(node: Node) -> bool:
    """Whether a loop could as well compute ``node`` again in each step."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload) or not effects.is_pure(node):
        return False
    return isinstance(node.meta["val"], torch.Tensor) and (ops.is_pointwise(target) or target in COLLECTORS)


def token(node: Node) -> object:
    """What two corresponding nodes have in common: operator, layouts, and constants that no tensor can stand for."""
    args: tuple[Any, ...] = node.args
    numbers = number_positions(node)
    shown = [("number", type(arg)) if at in numbers else _shown(arg) for at, arg in enumerate(args)]
    options = [(name, _shown(value)) for name, value in sorted(node.kwargs.items())] if node.kwargs else ()
    return (node.target, tuple(shown), tuple(options), layout(node))


def _shown(value: Any) -> object:
    """An argument as tokens have it: a node's layout, a constant as it is."""
    if isinstance(value, Node):
        return ("node", layout(value))
    if isinstance(value, (tuple, list)):
        return ("sequence", *map(_shown, value))
    return surgery.constant_key(value)


def tensors_of(node: Node) -> list[torch.Tensor]:
    """The tensors that ``node`` computes."""
    value = node.meta["val"]
    return [p for p in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(p, torch.Tensor)]


def layout(node: Node) -> tuple[Any, ...]:
    """Dtype and shape of what ``node`` computes."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return ((value.dtype, value.shape),)
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return tuple((p.dtype, p.shape) if isinstance(p, torch.Tensor) else p for p in parts)


def leaves(node: Node) -> list[Leaf]:
    """What ``node`` reads, in the order of its arguments; a node that is read twice is there twice."""
    found: list[Leaf] = []
    numbers = number_positions(node)
    for position, argument in enumerate(node.args):
        if position in numbers:
            found.append(argument)  # type: ignore[arg-type]  # a number
        else:
            _collect(argument, found)
    for argument in node.kwargs.values():
        _collect(argument, found)
    return found


def _collect(argument: Any, found: list[Leaf]) -> None:
    """The nodes in an argument, in the order of ``torch.fx.node.map_aggregate``."""
    if isinstance(argument, Node):
        found.append(argument)
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            _collect(item, found)
    elif isinstance(argument, dict):
        for item in argument.values():
            _collect(item, found)
    elif isinstance(argument, slice):
        for item in (argument.start, argument.stop, argument.step):
            _collect(item, found)


def replace_leaves(node: Node, function: Callable[[Leaf], object]) -> tuple[Any, dict[str, Any]]:
    """The arguments of ``node`` with ``function`` of each leaf in its place; called in the order of :func:`leaves`."""
    numbers = number_positions(node)

    def replaced(value: Any) -> Any:
        return function(value) if isinstance(value, Node) else value

    args = tuple(
        function(argument) if position in numbers else map_aggregate(argument, replaced)  # type: ignore[arg-type]
        for position, argument in enumerate(node.args)
    )
    return args, {name: map_aggregate(argument, replaced) for name, argument in node.kwargs.items()}


def number_positions(node: Node) -> tuple[int, ...]:
    """The positions of arguments of ``node`` that are numbers and might be tensors of one element."""
    places = _places_of_tensors(node.target)
    if not places or not isinstance(node.meta["val"], torch.Tensor):
        return ()
    args = node.args
    return tuple([i for i in places if i < len(args) and type(args[i]) in (int, float)])


def _places_of_tensors(target: object) -> tuple[int, ...]:
    """The positions at which an operator takes a tensor of one element or, as well, a number."""
    known = _places.get(id(target))
    if known is None:
        form = ops.tensor_form(target) if isinstance(target, OpOverload) else None
        arguments = form._schema.arguments if form is not None else ()
        places = tuple(i for i, described in enumerate(arguments) if str(described.type) == "Tensor")
        known = _places[id(target)] = target, places
    return known[1]


_places: dict[int, tuple[object, tuple[int, ...]]] = {}
"""What :func:`_places_of_tensors` found, by the operators' ids, as :func:`fuse.ops.info` has it."""


def read_of(node: Node) -> Read:
    """``node`` as a chain of views over the node that computes its memory."""
    links: list[Link] = []
    current = node
    while (link := link_of(current)) is not None:
        links.append(link)
        current = current.args[0]  # type: ignore[assignment]
    return Read(current, tuple(reversed(links)), node)


def is_link(node: Node) -> bool:
    """Whether ``node`` views its first argument, or is a part of it."""
    return node.target is operator.getitem or effects.view_base(node) is not None


def link_of(node: Node) -> Link | None:
    """How ``node`` views its first argument, or is a part of it; None where it computes something."""
    if node.target is operator.getitem:
        return operator.getitem, node.args[1:], ()
    if effects.view_base(node) is not None:
        return node.target, _frozen(node.args[1:]), tuple(sorted(node.kwargs.items())) if node.kwargs else ()
    return None


def _frozen(values: Iterable[object]) -> tuple[object, ...]:
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


def below(node: Node, links: int) -> Node:
    """The base of the last ``links`` views of a chain."""
    for _ in range(links):
        node = node.args[0]  # type: ignore[assignment]
    return node


def parts(node: Node) -> Iterator[tuple[int | None, Node]]:
    """The tensors that ``node`` computes: itself, or the parts that are read."""
    if isinstance(node.meta["val"], torch.Tensor):
        yield None, node
        return
    for user in node.users:
        if user.target is operator.getitem:
            yield user.args[1], user  # type: ignore[misc]


@dataclass(frozen=True)
class Obstacle:
    """Why steps are no loop. ``odd``: the steps to blame; ``group``: taken so many at a time, they might be one."""

    reason: str
    odd: frozenset[int] = frozenset()
    group: int = 1
