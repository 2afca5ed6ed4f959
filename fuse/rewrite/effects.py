"""Effects that a rewrite must not change: random state, side effects, and which tensors share memory.

A captured graph is functional, so only a view and its base share memory. The caller can notice shared memory in values
that leave the graph, as results or as values written back into inputs.
"""

from __future__ import annotations

import operator
from functools import cache

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.graph.functional.short_graphs import STAND_INS
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
"""Operators that depend on the storage offset of their first operand. ``as_strided`` counts from the start of the
storage; the scatters give their result the storage, and so the offset, of the tensor that they copy."""


_DIVISIONS = frozenset({"div", "floor_divide", "remainder", "fmod"})


def view_base(node: Node) -> Node | None:
    """The node whose memory ``node`` is a view of; None if ``node`` has memory of its own.

    The base of one result of ``split`` or ``unbind`` is that operator; the operator's base is its operand.
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
    """Whether a user of ``node`` depends on its storage offset."""
    return any(user.target in PLACE_READERS and user.args[0] is node for user in node.users)


def root(node: Node) -> Node:
    """The node in whose memory ``node`` lies; itself unless it is a view."""
    while (base := view_base(node)) is not None:
        node = base
    return node


def readers(node: Node) -> list[Node]:
    """The nodes that read ``node``, its parts or views of these, each once; including the output."""
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
    """The nodes in the output, in order, including mutated values.

    Tensors saved for the backward graph are left out: the caller never sees them, and their memory may be shared
    (``graph.meta["saved_from"]`` is their first position in the output).
    """
    values = outputs_of(graph.graph)
    if (first := graph.meta.get("saved_from")) is not None:
        values = values[:first]
    return list(dict.fromkeys(value for value in values if isinstance(value, Node)))


def escaping(graph: GraphModule) -> set[Node]:
    """The nodes whose memory leaves the graph: results, and the bases of views among them."""
    found: set[Node] = set()
    for node in results(graph):
        current: Node | None = node
        while current is not None and current not in found:
            found.add(current)
            current = view_base(current)
    return found


def is_pure(node: Node) -> bool:
    """Whether removing, repeating or moving ``node`` changes nothing but its own value.

    Random operators advance the generator. Integer divisions raise for zero, and ``linalg`` raises if it checks for
    errors. Operators that the table does not know, that write to an argument or that return nothing may have any
    effect.
    """
    if node.op == "call_module":
        if kind(node) == "region":
            return True  # a region contains pure nodes only
        module = called_module(node)
        bodies = [child for child in module.modules() if isinstance(child, GraphModule)] if module else []
        return bool(bodies) and all(is_pure(inner) for body in bodies for inner in body.graph.nodes)
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op != "call_method"
    if node.target in STAND_INS:
        return True
    return isinstance(node.target, OpOverload) and _is_pure_operator(node.target) and not _may_raise(node)


def only_raises(node: Node) -> bool:
    """Whether ``node`` is pure, except that it raises for some values, even if nothing reads its result.

    Its position does not matter, as long as it runs once: if a program raises, eager runs the call again.
    """
    return isinstance(node.target, OpOverload) and _is_pure_operator(node.target) and _may_raise(node)


def _may_raise(node: Node) -> bool:
    return _may_divide_by_zero(node) or node.kwargs.get("check_errors") is True


def _may_divide_by_zero(node: Node) -> bool:
    """Whether ``node`` divides integers by a value that may be zero."""
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
