"""Operands of an unrolled loop's steps: chains of views, and numbers that may change from step to step.

    mul(h1, 0.5)     leaves: h1, 0.5             token: mul of [3, 20] and a number
    add(x[2], h1)    leaves: select(x, 0, 2), h1     read: (select, 0, 2) of x

Two nodes with equal tokens may be the same node in two steps of a loop: they differ in their operands only.
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
"""The longest chain of operators outside of a loop that its steps may recompute. It is shorter than the shortest loop,
because an operator on a state follows one of its kind in each earlier step."""

Leaf = Node | int | float
"""One operand of a node: a node, or a number that could as well be a tensor of one element."""


@dataclass(frozen=True)
class Read:
    """One operand: ``links`` (views) applied to ``root``, outermost last; ``node`` is the operand itself."""

    root: Node
    links: tuple[Link, ...]
    node: Node


def anchors(graph: Graph) -> list[Node]:
    """The nodes that compute something, in program order: the search for repeats compares their tokens."""
    return [
        node for node in graph.nodes if node.op == "call_function" and owner(node) is node and not is_constructor(node)
    ]


def may_be_ambient(node: Node) -> bool:
    """Whether each step of a loop could recompute ``node``."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload) or not effects.is_pure(node):
        return False
    return isinstance(node.meta["val"], torch.Tensor) and (ops.is_pointwise(target) or target in COLLECTORS)


def token(node: Node) -> object:
    """Key that corresponding nodes share: operator, layouts, and constants that cannot be tensors."""
    args: tuple[Any, ...] = node.args
    numbers = number_positions(node)
    shown = [("number", type(arg)) if at in numbers else _shown(arg) for at, arg in enumerate(args)]
    options = [(name, _shown(value)) for name, value in sorted(node.kwargs.items())] if node.kwargs else ()
    return (node.target, tuple(shown), tuple(options), layout(node))


def _shown(value: Any) -> object:
    """An argument in a token: a node becomes its layout, a constant stays."""
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
    """Dtype and shape of the results of ``node``."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return ((value.dtype, value.shape),)
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return tuple((p.dtype, p.shape) if isinstance(p, torch.Tensor) else p for p in parts)


def leaves(node: Node) -> list[Leaf]:
    """The operands of ``node``, in the order of its arguments; a node that is read twice occurs twice."""
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
    """The arguments of ``node`` with ``function(leaf)`` in place of each leaf, in the order of :func:`leaves`."""
    numbers = number_positions(node)

    def replaced(value: Any) -> Any:
        return function(value) if isinstance(value, Node) else value

    args = tuple(
        function(argument) if position in numbers else map_aggregate(argument, replaced)  # type: ignore[arg-type]
        for position, argument in enumerate(node.args)
    )
    return args, {name: map_aggregate(argument, replaced) for name, argument in node.kwargs.items()}


def number_positions(node: Node) -> tuple[int, ...]:
    """The positions of arguments of ``node`` that are numbers but may be tensors of one element."""
    positions = _places_of_tensors(node.target)
    if not positions or not isinstance(node.meta["val"], torch.Tensor):
        return ()
    args = node.args
    return tuple([i for i in positions if i < len(args) and type(args[i]) in (int, float)])


def _places_of_tensors(target: object) -> tuple[int, ...]:
    """The positions at which an operator takes a number or a tensor of one element."""
    known = _positions.get(id(target))
    if known is None:
        form = ops.tensor_form(target) if isinstance(target, OpOverload) else None
        arguments = form._schema.arguments if form is not None else ()
        positions = tuple(i for i, described in enumerate(arguments) if str(described.type) == "Tensor")
        known = _positions[id(target)] = target, positions
    return known[1]


_positions: dict[int, tuple[object, tuple[int, ...]]] = {}
"""Results of :func:`_places_of_tensors` by operator id, as in :func:`fuse.ops.info`."""


def read_of(node: Node) -> Read:
    """``node`` as a chain of views of the node that computes its memory."""
    links: list[Link] = []
    current = node
    while (link := link_of(current)) is not None:
        links.append(link)
        current = current.args[0]  # type: ignore[assignment]
    return Read(current, tuple(reversed(links)), node)


def is_link(node: Node) -> bool:
    """Whether ``node`` is a view of its first argument, or one of its results."""
    return node.target is operator.getitem or effects.view_base(node) is not None


def link_of(node: Node) -> Link | None:
    """The view (or ``getitem``) by which ``node`` reads its first argument; None if it computes something."""
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
    """The tensors that ``node`` computes: itself, or those of its several results that are read."""
    if isinstance(node.meta["val"], torch.Tensor):
        yield None, node
        return
    for user in node.users:
        if user.target is operator.getitem:
            yield user.args[1], user  # type: ignore[misc]


@dataclass(frozen=True)
class Obstacle:
    """Why steps are no loop. ``odd``: the differing steps; ``group``: steps that may together be one of a loop."""

    reason: str
    odd: frozenset[int] = frozenset()
    group: int = 1
