"""Recompute cheap arithmetic in the backward graph, instead of saving its results.

    forward    m = x > 0;  y = where(m, x, 0)                                      saved: x, no longer m
    backward   d = where(m, g, 0) * x            ->    backward   m = x > 0;  d = where(m, g, 0) * x

A value is recomputed if a few cheap elementwise operators compute it from saved tensors that stay, and if only
operators that fuse read it. Recomputing it then costs no launch and no memory traffic, and saving it costs both.

In a loop, saved tensors are stored for each step, states too, and one kernel contains all of their readers. There a
value is recomputed if the states to be stored instead have at most half its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

from torch._ops import OpOverload
from torch.fx import Node

from fuse import ops

MOST_OPERATORS = 6
"""The most operators that are recomputed for one value."""


def recomputed(
    reads: Mapping[Node, Iterable[Node]], kept: Set[Node], root_of: Callable[[Node], Node]
) -> dict[Node, None]:
    """The forward operators to recompute, in program order.

    Args:
        reads: the forward values that the backward graph reads, as roots of memory -> their readers.
        kept: roots that cost nothing to save, or must be saved: inputs, results, gradients.
        root_of: the node whose memory a node lies in.
    """
    candidates = sorted(
        root for root, readers in reads.items() if root not in kept and is_cheap(root) and all(map(_fuses, readers))
    )
    there = reads.keys() - set(candidates)
    found: dict[Node, None] = {}
    for candidate in candidates:
        made = _cone(candidate, there, root_of)
        if made is None or made.leaves:
            there.add(candidate)
        else:
            found.update(dict.fromkeys(made.operators))
    return dict.fromkeys(sorted(found))


def recomputed_in_step(
    reads: Iterable[Node], price: Callable[[Node], int], stacked: Set[Node], root_of: Callable[[Node], Node]
) -> dict[Node, None]:
    """The forward operators of a loop's step to recompute, in program order.

    Args:
        reads: the forward values that the backward step reads, as roots of memory.
        price: the bytes stored in each step for a root that is read. 0 for a root that costs nothing; only the roots in
            ``reads`` among these may be used, because the caller may write to others before the backward graph runs.
        stacked: roots that are needed for all steps, stacked.
        root_of: the node whose memory a node lies in.
    """
    candidates = sorted(root for root in reads if price(root) and root not in stacked and is_cheap(root))
    there = set(reads) - set(candidates)
    found: dict[Node, None] = {}
    for candidate in candidates:
        made = _cone(candidate, there, root_of)
        prices = [price(leaf) for leaf in made.leaves] if made is not None else []
        if made is None or not all(prices) or 2 * sum(prices) > price(candidate):
            there.add(candidate)
        else:
            there |= made.leaves
            found.update(dict.fromkeys(made.operators))
    return dict.fromkeys(sorted(found))


@dataclass(frozen=True)
class _Cone:
    """The ``operators`` that compute a value from available values and from inputs (``leaves``) that were not read so
    far."""

    operators: set[Node]
    leaves: set[Node]


def _cone(node: Node, there: set[Node], root_of: Callable[[Node], Node]) -> _Cone | None:
    """The operators that compute ``node`` from the values ``there`` and from inputs; None if they are costly or too
    many."""
    found = _Cone(set(), set())
    worklist = [node]
    while worklist:
        current = worklist.pop()
        if current in there or current in found.operators:
            continue
        if current.op == "placeholder":
            found.leaves.add(current)
            continue
        if not is_cheap(current) or len(found.operators) == MOST_OPERATORS:
            return None
        found.operators.add(current)
        worklist += map(root_of, current.all_input_nodes)
    return found


def is_cheap(node: Node) -> bool:
    """Whether ``node`` is a cheap elementwise operator, no view and no random one."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or ops.is_view(node.target):
        return False
    facts = ops.info(node.target)
    return facts is not None and facts.cheap and facts.elementwise and not facts.random


def _fuses(reader: Node) -> bool:
    """Whether a kernel can contain ``reader`` together with the operators that compute its operands."""
    if reader.op != "call_function" or not isinstance(reader.target, OpOverload):
        return False
    if ops.is_view(reader.target):
        return all(map(_fuses, reader.users))
    return ops.is_pointwise(reader.target) or ops.kind(reader.target) == "reduction"
