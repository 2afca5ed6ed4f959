"""Compute equal subexpressions once, except random ones.

    a = tanh(x)              a = tanh(x)
    b = tanh(x)      ->      c = a + a
    c = a + b

Two nodes are equal when operator, operands and constants are (1, 1.0 and True are different constants); the operands of
a commutative operator may be swapped. Random operators, and operators with unknown effects, are never merged. Declined
where both nodes are results: eager returns two tensors, and writing to one must not change the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from torch import Tensor
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.loops.first_steps import first_steps, some_alike
from fuse.rewrite import effects, surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite


@register_pass(stage="clean", after="plain_fills")
def common_subexpressions(graph: GraphModule) -> Iterator[Verdict]:
    """Compute equal subexpressions once, except random ones."""
    escaping = effects.escaping(graph)
    first: dict[Hashable, Node] = {}
    begun = first_steps(graph) if some_alike(graph) else set()
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not effects.is_pure(node):
            continue
        known = first.setdefault(expression(node), node)
        if known is node:
            continue
        if known in begun and node in begun:
            yield declined((known, node), "two states of a loop are equal at first, and differ from the second step on")
        elif node in escaping and known in escaping:
            yield declined((known, node), "both are results of the model and must stay distinct tensors")
        else:
            yield rewrite((known, node), merge, known, node, escaping)


def expression(node: Node) -> Hashable:
    """Key of a node's computation and layout (the operand order of a commutative operator may decide the layout)."""
    val = node.meta["val"]
    layout = val.stride() if isinstance(val, Tensor) else None
    if ops.is_commutative(node.target) and not node.kwargs:
        operands = frozenset(surgery.constant_key(argument) for argument in node.args[:2])
        return (node.target, operands, surgery.constant_key(node.args[2:]), layout)
    return (surgery.node_key(node), layout)


def merge(known: Node, node: Node, escaping: set[Node]) -> None:
    """Let ``known`` stand for ``node``, as a result of the model too."""
    if node in escaping:
        escaping.add(known)
    surgery.replace(node, known)
