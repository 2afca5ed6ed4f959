"""Compute equal subexpressions once, except random ones.

    a = tanh(x)              a = tanh(x)
    b = tanh(x)      ->      c = a + a
    c = a + b

Two nodes are equal when operator, operands and constants are (1, 1.0 and True are different constants); the operands of
a commutative operator may be swapped. Random operators, and operators with unknown effects, are never merged. Declined
where both nodes are results: eager returns two tensors, and writing to one must not change the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fuse import ops
from fuse.passes.no_ops import leave_out
from fuse.rewrite import effects, surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite


@register_pass(stage="clean", after="roll_whole_loops")
def common_subexpressions(graph: GraphModule) -> Iterator[Verdict]:
    """Compute equal subexpressions once, except random ones."""
    yield from merged(graph, equal_nodes(graph))


def merged(graph: GraphModule, equal: Iterable[Sequence[Node]]) -> Iterator[Verdict]:
    """Let the first of several equal operators stand for the others, where their operands were merged, too."""
    escaping = effects.escaping(graph)
    for known, *others in equal:
        for node in others:
            if node in escaping and known in escaping:
                yield declined((known, node), "both are results of the model and must stay distinct tensors")
            elif expression(node, {}) == expression(known, {}):
                yield rewrite((known, node), leave_out, node, known, escaping)


def equal_nodes(graph: GraphModule) -> list[list[Node]]:
    """The operators that compute the same if their operands do, in program order."""
    found: dict[Hashable, list[Node]] = {}
    first: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and effects.is_pure(node):
            equal = found.setdefault(expression(node, first), [])
            equal.append(node)
            first[node] = equal[0]
    return list(found.values())


def expression(node: Node, known: Mapping[Node, Node]) -> Hashable:
    """Key of a node's computation and layout (the operand order of a commutative operator may decide the layout), with
    ``known`` nodes for its operands."""
    val = node.meta["val"]
    layout = val.stride() if isinstance(val, Tensor) else None
    args, kwargs = map_arg((node.args, node.kwargs), lambda operand: known.get(operand, operand))
    if ops.is_commutative(node.target) and not kwargs:
        operands = frozenset(surgery.constant_key(argument) for argument in args[:2])
        return (node.target, operands, surgery.constant_key(args[2:]), layout)
    return (node.target, surgery.constant_key(args), surgery.constant_key(kwargs), layout)
