"""Recompute in the backward pass instead of saving: cheap arithmetic of values that are saved anyway.

    forward    m = x > 0;  y = where(m, x, 0)                                      saved: x, no longer m
    backward   d = where(m, g, 0) * x            ->    backward   m = x > 0;  d = where(m, g, 0) * x

A value leaves the saved ones where a few cheap elementwise operators give it from others that stay, and only operators
that kernels take in read it: computing it again costs no launch and no memory traffic, and keeping it costs both.

A step of a loop keeps what it saves once for each step, its states too, and all that reads it is in one kernel. There a
value leaves where the states that have to be kept instead are at most half as large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

from torch._ops import OpOverload
from torch.fx import Node

from fuse import ops

MOST_OPERATORS = 6
"""Operators that are run again for one value."""


def computed_again(
    reads: Mapping[Node, Iterable[Node]], kept: Set[Node], root_of: Callable[[Node], Node]
) -> dict[Node, None]:
    """The nodes to run again, in program order.

    Args:
        reads: what the backward half reads of the forward half, as roots of memory, and the operators that do.
        kept: roots that are there without being saved, or must be: inputs, results, gradients.
        root_of: the node whose memory a node lies in.
    """
    candidates = sorted(
        root for root, readers in reads.items() if root not in kept and _is_cheap(root) and all(map(_fuses, readers))
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


def computed_again_in_step(
    reads: Iterable[Node], price: Callable[[Node], int], stacked: Set[Node], root_of: Callable[[Node], Node]
) -> dict[Node, None]:
    """As :func:`computed_again`, for a step of a loop.

    Args:
        reads: what the backward half of the step reads of the forward half, as roots of memory.
        price: the bytes of a root that are kept for each step if it is read; 0 for what is there anyway, if it is read:
            what the caller owns may be written before the backward half runs, so that nothing more of it is read.
        stacked: roots that are needed for all steps side by side.
        root_of: the node whose memory a node lies in.
    """
    candidates = sorted(root for root in reads if price(root) and root not in stacked and _is_cheap(root))
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
    """The ``operators`` that make a value from what is there and from inputs (``leaves``) that nothing has read yet."""

    operators: set[Node]
    leaves: set[Node]


def _cone(node: Node, there: set[Node], root_of: Callable[[Node], Node]) -> _Cone | None:
    """The operators that make ``node`` from what is ``there`` and from inputs, or None where more is needed."""
    found = _Cone(set(), set())
    worklist = [node]
    while worklist:
        current = worklist.pop()
        if current in there or current in found.operators:
            continue
        if current.op == "placeholder":
            found.leaves.add(current)
            continue
        if not _is_cheap(current) or len(found.operators) == MOST_OPERATORS:
            return None
        found.operators.add(current)
        worklist += map(root_of, current.all_input_nodes)
    return found


def _is_cheap(node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or ops.is_view(node.target):
        return False
    facts = ops.info(node.target)
    return facts is not None and facts.cheap and facts.elementwise and not facts.random


def _fuses(reader: Node) -> bool:
    """Whether kernels take in what ``reader`` does, and with it what it reads."""
    if reader.op != "call_function" or not isinstance(reader.target, OpOverload):
        return False
    if ops.is_view(reader.target):
        return all(map(_fuses, reader.users))
    return ops.is_pointwise(reader.target) or ops.kind(reader.target) == "reduction"
