"""Detect calls that stop gradients, or whose gradients do not follow from the recorded operators.

    y = x.detach() * x          a dispatch mode sees detach and no_grad, and the readers of their results
    h.detach_()                 no mode sees this call; but afterwards h needs no gradient
    Rounded.apply(x)            a torch.autograd.Function of the user's

The gradients of such a call are taken as eager takes them, while the call is recorded.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fuse import ops
from fuse.graph.functional.aliases import Alias
from fuse.graph.functional.short_graphs import STAND_INS
from fuse.graph.state.saved_by_autograd import autograd_nodes

aten = torch.ops.aten


def cuts_off(op: OpOverload, args: tuple[Any, ...], detached: Container[int]) -> bool:
    """Whether an operator call stops the gradient of an operand.

    ``detached``: ids of results of ``detach``. Autograd itself detaches tensors that it saves; nothing else reads
    those.
    """
    if op is aten.detach_.default:
        return True
    if not torch.is_grad_enabled():
        return any_needs_gradient(args)
    return any(
        id(operand) in detached or (type(operand) in (list, tuple) and any(id(one) in detached for one in operand))
        for operand in args
    )


def has_own_gradients(leaves: Sequence[Any]) -> bool:
    """Whether a ``torch.autograd.Function`` of the user's is in the autograd graph of ``leaves``."""
    return any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in autograd_nodes(leaves))


def is_cut_unseen(graph: Graph, aliases: Iterable[Alias], detached: Container[int]) -> bool:
    """Whether a tensor needs no gradient although its operands do: ``detach_`` was called, which no mode sees."""
    needing: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            needs = node.meta["val"].requires_grad
        else:
            needs = _passes_gradients_on(node) and not needing.isdisjoint(node.all_input_nodes)
        if needs:
            needing.add(node)
    for alias in aliases:
        if alias.tensor.requires_grad or id(alias.tensor) in detached:
            continue
        if alias.node in needing and alias.version == alias.base.version:
            return True
    return False


def _passes_gradients_on(node: Node) -> bool:
    """Whether the result of ``node`` needs gradients if an operand does."""
    if node.target in STAND_INS:
        return True
    if node.op != "call_function" or not isinstance(held := node.meta.get("val"), (Tensor, tuple, list)):
        return False
    if isinstance(held, Tensor) and not (held.is_floating_point() or held.is_complex()):
        return False
    if node.target is operator.getitem:  # further results of an operator are meant for its gradient
        return bool(node.args[1] == 0)
    if not isinstance(node.target, OpOverload) or ops.is_random(node.target):
        return False
    name = node.target._schema.name.split("::")[1]
    return name != "detach" and not name.startswith("new_") and not name.endswith("_like")


def any_needs_gradient(arguments: Any) -> bool:
    """Whether a tensor among ``arguments`` requires gradients."""
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(arguments))
