"""Tensor objects that get another shape or other memory: the object is another node of the graph from there on.

    x.unsqueeze_(0)            x' = unsqueeze(x, 0), one more view in x's chain
    p.data = 0.9 * p           p' = mul(p, 0.9), and what was p before stays the value of all that reads it

An input that changes so gets its new shape or memory after the call. ``former`` has a tensor that stands for it as it
was before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from fuse import ops
from fuse.errors import CaptureError
from fuse.graph.functional.aliases import Alias, Base, View
from fuse.graph.functional.tensor_values import Functionalizer

aten = torch.ops.aten

_RESHAPING = frozenset(
    {
        aten.unsqueeze_.default,
        aten.squeeze_.default,
        aten.squeeze_.dim,
        aten.squeeze_.dims,
        aten.t_.default,
        aten.transpose_.default,
    }
)
"""In-place operators whose effect on an input the runtime repeats."""


def rebind(functional: Functionalizer, tensor: Tensor, other: Tensor, assign: Callable[[Tensor, Tensor], None]) -> None:
    """Let ``tensor`` be ``other`` from now on; ``assign(tensor, other)`` gives it the memory of ``other``."""
    functional.whole()
    node = functional.value(other)
    before, held = functional.aliases[id(tensor)], hold(functional, tensor)
    if id(tensor) not in functional.former:
        functional.former[id(tensor)] = held
        functional.aliases[id(held)] = replace(before, tensor=held)
    assign(tensor, other)
    source = functional.aliases[id(other)]
    functional.aliases[id(tensor)] = Alias(tensor, source.base, source.chain, node, source.base.version, node)


def read_later(functional: Functionalizer, tensor: Tensor, node: Node) -> None:
    """Let ``node`` be the value of ``tensor``, and of all that shares its memory, from now on."""
    functional.settle()
    alias = functional.aliases[id(tensor)]
    if id(tensor) in functional.former:  # only this object, whose memory may be another by then
        alias = functional.aliases[id(tensor)] = Alias(tensor, Base(tensor, node), (), node, 0, node)
    alias.base.node, alias.base.version = node, alias.base.version + 1
    alias.node, alias.version = node, alias.base.version


def detached(functional: Functionalizer, tensor: Tensor) -> Tensor:
    """Another tensor object in the memory of ``tensor``, without its gradients."""
    node, alias = functional.value(tensor), functional.aliases[id(tensor)]
    made: Tensor = aten.detach.default(tensor)
    functional.aliases[id(made)] = Alias(made, alias.base, alias.chain, node, alias.version, node)
    return made


def reshape_in_place(
    functional: Functionalizer, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], Any]
) -> Any:
    """Record ``unsqueeze_`` and similar operators, which change the shape of a tensor object: one more view in its
    chain."""
    functional.whole()
    form = ops.functional_form(op)
    if form is None or not ops.is_view(form):
        raise CaptureError(
            f"{op} at {functional.source} changes the size or storage of a tensor in place; it runs in eager mode"
        )
    tensor = args[0]
    node = functional.value(tensor)
    alias = functional.aliases[id(tensor)]
    of_input = alias.tensor is alias.base.root and alias.base.input_index is not None
    if is_input := id(tensor) in functional.former or of_input:
        reshaped = any(one is tensor for one, _, _ in functional.reshaped)
        if op not in _RESHAPING or kwargs or reshaped is not (id(tensor) in functional.former):
            raise CaptureError(
                f"{op} at {functional.source} changes the shape of an argument in place; it runs in eager mode"
            )
        functional.reshaped.append((tensor, op, args[1:]))
    view = View(form, functional.nodes(args[1:]), functional.nodes(kwargs))
    held = hold(functional, tensor)
    if is_input and id(tensor) not in functional.former:
        functional.former[id(tensor)] = held
        functional.aliases[id(held)] = replace(alias, tensor=held)
    result = run()
    emitted = functional.emit(form, (node, *view.args), view.kwargs)
    functional.add_view(alias, (view,), tensor, emitted)
    return result


def hold(functional: Functionalizer, tensor: Tensor) -> Tensor:
    """Let the nodes so far keep the metadata of ``tensor``, which is about to change; the tensor that has it."""
    alias = functional.aliases[id(tensor)]
    held: Tensor = aten.alias.default(tensor)
    for holder in (functional.value(tensor), alias.made, alias.node, alias.base.node):
        _exchange(holder, tensor, held)
        if holder.target is operator.getitem:
            _exchange(holder.all_input_nodes[0], tensor, held)
    if alias.base.root is tensor:
        alias.base.root = held
    functional.fakes.forget(tensor)
    return held


def _exchange(node: Node, tensor: Tensor, held: Tensor) -> None:
    """Replace ``tensor`` by ``held`` in the metadata of ``node``."""
    value = node.meta["val"]
    if value is tensor:
        node.meta["val"] = held
    elif isinstance(value, tuple):
        node.meta["val"] = tuple(held if part is tensor else part for part in value)
