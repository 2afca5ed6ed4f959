"""Compare in the forward pass where the backward pass only compares: booleans are saved instead of numbers.

    forward    y = hardtanh(x, 0, 6)                                           saved: x
    backward   d = where(x <= 0 | x >= 6, 0, g)

    forward    y = hardtanh(x, 0, 6);  m = x <= 0 | x >= 6        ->           saved: m
    backward   d = where(m, 0, g)

A truth is one byte where a number of float32 is four, and one kernel writes both y and m. Declined where the
truths take more than half of what they are made of, where something else reads that or is computed from it again
(:mod:`fuse.graph.recomputing`), and where it is there anyway: inputs, results, and what is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from fuse import ops


def compared_ahead(
    needed: Mapping[Node, None],
    reads: Mapping[Node, Sequence[Node]],
    there: Set[Node],
    again: Mapping[Node, None],
    gradients: Set[Node],
) -> list[Node]:
    """The comparisons of the backward half that the forward half had better make, in program order.

    Args:
        needed: the nodes of the backward half, in program order.
        reads: what that reads of the forward half, as roots of memory, with the nodes that do.
        there: of these, what is not saved for the backward half, or must be.
        again: the operators of the forward half that the backward half runs again.
        gradients: what the backward half returns.
    """
    comparisons: dict[Node, None] = {}
    for node in needed:
        if _is_comparison(node) and all(n in comparisons or n not in needed for n in node.all_input_nodes):
            comparisons[node] = None
    compared = {root for root in reads if root not in there and all(map(comparisons.__contains__, reads[root]))}
    found: set[Node] = set()
    for root in compared.difference(again):
        if any(node in again for view in _behind([root], _is_view) for node in view.users):
            continue  # what is computed again from it would be saved instead
        made = _closed(reads[root], comparisons)
        truths = [node for node in made if node in gradients or any(u in needed and u not in made for u in node.users)]
        if 2 * sum(map(_bytes, truths)) <= _bytes(root):
            found |= made
    return [node for node in comparisons if node in found]


def _behind(nodes: Sequence[Node], among: Callable[[Node], bool]) -> set[Node]:
    """``nodes``, and what is computed from them by operators ``among`` those that count."""
    made: set[Node] = set()
    worklist = list(nodes)
    while worklist:
        node = worklist.pop()
        if node not in made:
            made.add(node)
            worklist += [user for user in node.users if among(user)]
    return made


def _closed(nodes: Sequence[Node], comparisons: Mapping[Node, None]) -> set[Node]:
    """``nodes``, the comparisons that are made of them, and those that these need besides."""
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
    """Whether ``node`` is cheap, elementwise arithmetic that gives truths."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    value, facts = node.meta["val"], ops.info(node.target)
    truths = isinstance(value, Tensor) and value.dtype is torch.bool
    return truths and facts is not None and facts.cheap and facts.elementwise and not facts.random


def _bytes(node: Node) -> int:
    value: Tensor = node.meta["val"]
    return value.numel() * value.element_size()
