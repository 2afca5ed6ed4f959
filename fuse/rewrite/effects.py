"""Effects that a rewrite must not change: random state, side effects, and which tensors share memory.

A captured graph is functional, so the only memory that two values share is a view's with its base. Values that leave
the graph (as results, or written back into inputs) are where the caller could notice a tensor that is not its own any
more.
"""

from __future__ import annotations

import operator
from functools import cache

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.graph.outputs import outputs_of
from fuse.rewrite.nested import called_module, kind

aten = torch.ops.aten

PLACE_READERS = frozenset(
    [
        aten.as_strided.default,
        aten.as_strided_scatter.default,
        aten.diagonal_scatter.default,
        aten.select_scatter.default,
        aten.slice_scatter.default,
    ]
)
"""Operators for which it matters where in its storage the first operand begins: as_strided counts from the start of the
storage, and the scatters give their result the whole storage, and so the offset, of what they copy."""


_DIVISIONS = frozenset({"div", "floor_divide", "remainder", "fmod"})


def view_base(node: Node) -> Node | None:
    """The node whose memory ``node`` is a view of, or None when ``node`` has memory of its own.

    A part of a view with several results (``split``, ``unbind``) has that operator as its base, which in turn has its
    operand.
    """
    target = node.target
    if node.op != "call_function" or (target is not operator.getitem and not ops.is_view(target)):
        return None
    args = node.args
    if not args or not isinstance(args[0], Node):
        return None
    return args[0] if target is not operator.getitem or view_base(args[0]) else None


def is_view(node: Node) -> bool:
    """Whether ``node`` shares the memory of another node."""
    return view_base(node) is not None


def reads_place(node: Node) -> bool:
    """Whether a user of ``node`` would notice that it begins at another offset in its storage."""
    return any(user.target in PLACE_READERS and user.args[0] is node for user in node.users)


def root(node: Node) -> Node:
    """The node whose memory ``node`` lives in: itself, unless it is a view."""
    while (base := view_base(node)) is not None:
        node = base
    return node


def readers(node: Node) -> list[Node]:
    """The nodes that read ``node``, a part of it or a view of these, each once; the output included."""
    found: dict[Node, None] = {}
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user.target is operator.getitem or view_base(user) is not None:
                stack.append(user)
            else:
                found[user] = None
    return list(found)


def results(graph: GraphModule) -> list[Node]:
    """The nodes that the output node lists, in order, mutated values included.

    What a forward graph saves for its backward graph is not among them: the caller never sees it, and its memory may be
    shared (``graph.meta["saved_from"]`` is the position from which the output lists what is saved).
    """
    values = outputs_of(graph.graph)
    if (first := graph.meta.get("saved_from")) is not None:
        values = values[:first]
    return list(dict.fromkeys(value for value in values if isinstance(value, Node)))


def escaping(graph: GraphModule) -> set[Node]:
    """The nodes whose memory leaves the graph: its results, and everything that they are views of."""
    found: set[Node] = set()
    for node in results(graph):
        current: Node | None = node
        while current is not None and current not in found:
            found.add(current)
            current = view_base(current)
    return found


def is_pure(node: Node) -> bool:
    """Whether removing, repeating or moving ``node`` changes nothing but its own value.

    Random operators advance the generator; an integer division by zero raises, as does ``linalg`` where it is to check
    for errors; operators that the table does not know, that write to an argument or return nothing may do anything.
    """
    if node.op == "call_module":
        if kind(node) == "region":
            return True  # made of pure nodes only
        module = called_module(node)
        bodies = [child for child in module.modules() if isinstance(child, GraphModule)] if module else []
        return bool(bodies) and all(is_pure(inner) for body in bodies for inner in body.graph.nodes)
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op != "call_method"
    return isinstance(node.target, OpOverload) and _is_pure_operator(node.target) and not _may_raise(node)


def only_raises(node: Node) -> bool:
    """Whether ``node`` is pure but that it raises for some values of its operands, whether its result is read or not.

    It may run in any place, as long as it runs once: a call in which a program raises is run again by eager.
    """
    return isinstance(node.target, OpOverload) and _is_pure_operator(node.target) and _may_raise(node)


def _may_raise(node: Node) -> bool:
    return _may_divide_by_zero(node) or node.kwargs.get("check_errors") is True


def _may_divide_by_zero(node: Node) -> bool:
    """Whether ``node`` divides integers by what may be zero, which raises even where nobody reads the result."""
    if not isinstance(node.target, OpOverload) or node.target._opname not in _DIVISIONS or len(node.args) < 2:
        return False
    value, divisor = node.meta.get("val"), node.args[1]
    is_integer = isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()
    return is_integer and (isinstance(divisor, Node) or bool(divisor == 0))


@cache
def _is_pure_operator(target: OpOverload) -> bool:
    return (
        ops.info(target) is not None
        and not ops.is_random(target)
        and not ops.mutates(target)
        and len(target._schema.returns) > 0
    )
