"""Move comparisons to the forward graph, so that booleans are saved instead of numbers.

    forward    y = hardtanh(x, 0, 6)                                           saved: x
    backward   d = where(x <= 0 | x >= 6, 0, g)

    forward    y = hardtanh(x, 0, 6);  m = x <= 0 | x >= 6        ->           saved: m
    backward   d = where(m, 0, g)

A boolean takes one byte instead of the four of a float32, and one kernel writes both y and m. Declined if the booleans
take more than half the bytes of their operands, if anything else reads an operand or is recomputed from it
(:mod:`fuse.graph.backward.recomputing`), and if the operand costs nothing to save: inputs, results, recomputed values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

import torch
from torch import Tensor
from torch.fx import Node

from fuse import ops
from fuse.graph.backward.recomputing import is_cheap


def compared_ahead(
    needed: Mapping[Node, None],
    reads: Mapping[Node, Sequence[Node]],
    there: Set[Node],
    again: Mapping[Node, None],
    gradients: Set[Node],
) -> list[Node]:
    """The comparisons of the backward graph to move to the forward graph, in program order.

    Args:
        needed: the nodes of the backward graph, in program order.
        reads: the saved tensors, as roots of memory -> the nodes of the backward graph that read them.
        there: the saved tensors that cost nothing to save, or must be saved anyway.
        again: the operators of the forward graph that the backward graph recomputes.
        gradients: the results of the backward graph.
    """
    comparisons: dict[Node, None] = {}
    for node in needed:
        if _is_comparison(node) and all(n in comparisons or n not in needed for n in node.all_input_nodes):
            comparisons[node] = None
    compared = {root for root in reads if root not in there and all(map(comparisons.__contains__, reads[root]))}
    found: set[Node] = set()
    for root in compared.difference(again):
        if any(node in again for view in _behind([root], _is_view) for node in view.users):
            continue  # the values recomputed from it would be saved instead
        made = _closed(reads[root], comparisons)
        truths = [node for node in made if node in gradients or any(u in needed and u not in made for u in node.users)]
        if 2 * sum(map(_bytes, truths)) <= _bytes(root):
            found |= made
    return [node for node in comparisons if node in found]


def _behind(nodes: Sequence[Node], among: Callable[[Node], bool]) -> set[Node]:
    """``nodes``, and all nodes that follow from them through operators accepted by ``among``."""
    made: set[Node] = set()
    worklist = list(nodes)
    while worklist:
        node = worklist.pop()
        if node not in made:
            made.add(node)
            worklist += [user for user in node.users if among(user)]
    return made


def _closed(nodes: Sequence[Node], comparisons: Mapping[Node, None]) -> set[Node]:
    """``nodes``, the comparisons computed from them, and the comparisons that those read."""
    made = _behind(nodes, comparisons.__contains__)
    worklist = list(made)
    while worklist:
        more = {n for n in worklist.pop().all_input_nodes if n in comparisons}.difference(made)
        made |= more
        worklist += more
    return made


def _is_view(node: Node) -> bool:
    return node.op == "call_function" and ops.is_view(node.target)


def _is_comparison(node: Node) -> bool:
    """Whether ``node`` is a cheap elementwise operator with a boolean result."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype is torch.bool and is_cheap(node)


def _bytes(node: Node) -> int:
    value: Tensor = node.meta["val"]
    return value.numel() * value.element_size()
