"""What the backward pass had better compute again than keep: cheap arithmetic of what it is given anyway.

    forward    m = x > 0;  y = where(m, x, 0)                                      saved: x, no longer m
    backward   d = where(m, g, 0) * x            ->    backward   m = x > 0;  d = where(m, g, 0) * x

A value leaves the saved ones where a few cheap elementwise operators give it from others that stay, and only operators
that kernels take in read it: computing it again costs no launch and no memory traffic, and keeping it costs both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

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
        cone = _cone(candidate, there, root_of)
        if cone is None:
            there.add(candidate)
        else:
            found.update(dict.fromkeys(cone))
    return dict.fromkeys(sorted(found))


def _cone(node: Node, there: set[Node], root_of: Callable[[Node], Node]) -> set[Node] | None:
    """The operators that make ``node`` from what is ``there``, or None where something else is needed."""
    found: set[Node] = set()
    worklist = [node]
    while worklist:
        current = worklist.pop()
        if current in there or current in found:
            continue
        if not _is_cheap(current) or len(found) == MOST_OPERATORS:
            return None
        found.add(current)
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
