"""Surgery on a captured graph that keeps every node's metadata and source line.

Passes create, replace and erase nodes only through these functions. So every node always has ``meta["val"]`` (a fake
tensor with eager's shape, strides and dtype) and ``meta["source"]`` (the user's line). Each function takes time
proportional to the nodes that it changes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace as dataclass_replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fuse.graph.fakes.fake_mode import FakeMode
from fuse.graph.outputs import add_placeholder, cone
from fuse.graph.signature import InputSpec, Signature
from fuse.rewrite import effects


def fake_mode(graph: Graph) -> FakeTensorMode:
    """The fake mode of all values of ``graph``; a new one for a graph without tensors."""
    for node in graph.nodes:
        val = node.meta.get("val")
        first = val[0] if isinstance(val, (tuple, list)) and val else val
        if isinstance(first, FakeTensor):
            return first.fake_mode
    return FakeMode()


def insert(before: Node, target: Callable[..., Any], /, *args: Any, like: Node | None = None, **kwargs: Any) -> Node:
    """Insert a call of ``target`` before ``before``; its metadata is the result of running it on fake values.

    The source line is that of ``like`` (default: ``before``). Errors of ``target`` are raised, with the graph
    unchanged.
    """
    val = fake_value(before.graph, target, args, kwargs)
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)
    node.meta["val"] = val
    node.meta["source"] = (like or before).meta.get("source", "")
    return node


def fake_value(graph: Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The fake result of ``target(*args, **kwargs)``, with their values in place of nodes."""
    fake_args, fake_kwargs = map_arg((args, kwargs), lambda node: node.meta["val"])
    with fake_mode(graph), torch.no_grad():
        return target(*fake_args, **fake_kwargs)


def replace(node: Node, new: Node) -> None:
    """Make every user of ``node``, including the output, use ``new``; then erase ``node`` and everything that only it
    needs.

    Views of ``node`` become views of ``new``, with new metadata.
    """
    if not new.meta.get("source"):
        new.meta["source"] = node.meta.get("source", "")
    views = views_of(node)  # taken from ``node``: ``new`` may have thousands of users
    node.replace_all_uses_with(new)
    erase(node)
    refresh_views(views)


def erase(*nodes: Node) -> None:
    """Erase those ``nodes`` that have no users, and their operands that nothing else needs.

    Placeholders and nodes with effects stay.
    """
    worklist = list(nodes)
    while worklist:
        node = worklist.pop()
        if node.users or node._erased or node.op in ("placeholder", "output") or not effects.is_pure(node):
            continue
        worklist.extend(node.all_input_nodes)
        node.graph.erase_node(node)


def views_of(node: Node) -> list[Node]:
    """The users of ``node`` that are views of its memory."""
    return [user for user in node.users if effects.view_base(user) is node]


def refresh_views(views: Iterable[Node]) -> None:
    """Compute the metadata of ``views``, and of views of them, again: the layout of their base has changed."""
    worklist = list(views)
    while worklist:
        view = worklist.pop()
        view.meta["val"] = fake_value(view.graph, view.target, view.args, view.kwargs)
        worklist.extend(views_of(view))


def ancestors_after(nodes: Iterable[Node], before: Node) -> list[Node]:
    """``nodes`` and everything that they need, as far as it is behind ``before``, in program order."""
    return sorted(cone(nodes, lambda node: before < node))


def hoist(nodes: Iterable[Node], before: Node) -> None:
    """Move ``nodes``, and everything that they need, in front of ``before`` if they are behind it.

    The caller ensures that none of them needs ``before``, and that all are pure.
    """
    for node in ancestors_after(nodes, before):
        before.prepend(node)


def add_constant(graph: GraphModule, tensor: torch.Tensor, like: Node, origin: GraphModule | None = None) -> Node:
    """Add a placeholder for the constant ``tensor``, and describe it in the graph's signature."""
    signature: Signature = graph.meta["signature"]
    name = f"_constant_{sum(spec.kind == 'constant' for spec in signature.inputs)}"
    last = graph.graph.find_nodes(op="placeholder")[-1:] or [graph.graph._root]
    with graph.graph.inserting_after(last[0]):
        node = add_placeholder(graph.graph, name)
    node.meta["val"] = fake_mode(graph.graph).from_tensor(tensor)
    node.meta["source"] = like.meta.get("source", "")
    spec = InputSpec("constant", name, value=tensor, origin=origin)
    graph.meta["signature"] = dataclass_replace(signature, inputs=(*signature.inputs, spec))
    return node


def constant_key(value: Any) -> Hashable:
    """A key that is equal for equal arguments of calls; lists and tuples of equal items are equal.

    Constants are equal if type and value are: 1, 1.0 and True differ, 0.0 and -0.0 differ, two NaNs are equal.

    >>> constant_key([1, 2]) == constant_key((1, 2))
    True
    >>> constant_key(0.0) == constant_key(-0.0) or constant_key(1) == constant_key(True)
    False
    """
    kind = type(value)
    if kind in _COMPARABLE:
        return (kind, value)
    if isinstance(value, (list, tuple)):
        return ("sequence", *[constant_key(item) for item in value])
    if isinstance(value, dict):
        return ("mapping", *((name, constant_key(item)) for name, item in sorted(value.items())))
    if isinstance(value, float):
        return ("float", "nan" if value != value else struct.pack("d", value))
    if isinstance(value, complex):
        return ("complex", constant_key(value.real), constant_key(value.imag))
    if isinstance(value, slice):
        return ("slice", constant_key(value.start), constant_key(value.stop), constant_key(value.step))
    return (kind, value)


_COMPARABLE = frozenset([Node, int, bool, str, type(None), torch.dtype, torch.device])
"""Types of most arguments: values of these types are the same constant if type and value are equal."""
