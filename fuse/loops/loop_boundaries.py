"""Find where one unrolled loop ends and the next begins, and how many steps repeat together.

    for t: h = tanh(x[t] + h @ w1)                  step       0   1   2   3   4   5   6   7
    for t: h = tanh(x[-1 - t] + h @ w2)      ->     reads x    0   1   2   3   3   2   1   0
                                                    weight     w1  w1  w1  w1  w2  w2  w2  w2
                                                    follows    .   a   a   a   b   c   c   c     loops: 0 to 3, 4 to 7

Consecutive loops may have equal operators. Within a loop, each step's operands follow from those of the previous step
by one rule. Where the rule changes, another loop begins.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch.fx import Node

from fuse.loops.reads import Read, leaves, read_of

StepPosition = tuple[int, int]
"""A node's step, and its position in the step."""


def transitions(reads: Sequence[Read], at: Sequence[StepPosition | None]) -> list[Hashable]:
    """For each step after the first: a key of how its operands follow from those of the step before."""
    return [_transition(k, reads[k - 1], reads[k], at[k]) for k in range(1, len(reads))]


def _transition(k: int, before: Read, read: Read, at: StepPosition | None) -> Hashable:
    if at:
        return k - at[0], at[1], read.links
    if read.root is not before.root:
        return before.root, read.root
    old, new = _numbers(before.links), _numbers(read.links)
    if _without_numbers(before.links) != _without_numbers(read.links):
        return "another view", before.links, read.links
    return read.root, tuple(b - a for a, b in zip(old, new, strict=True))


def _numbers(links: Any) -> list[int]:
    """The integers among the arguments of views."""
    if isinstance(links, tuple):
        return [number for part in links for number in _numbers(part)]
    return [links] if type(links) is int else []


def _without_numbers(links: Any) -> Hashable:
    """The same arguments with ``int`` in place of each integer (None is an argument: ``x[:, None:4]``)."""
    if isinstance(links, tuple):
        return tuple(_without_numbers(part) for part in links)
    return int if type(links) is int else links


def segments(steps: Sequence[list[Node]], least: int) -> list[list[list[Node]]]:
    """The stretches of at least ``least`` steps that follow from each other in one way, in order.

    Steps between two stretches belong to the later one. Empty if there are fewer than two stretches.
    """
    at: dict[Node, StepPosition] = {node: (k, j) for k, step in enumerate(steps) for j, node in enumerate(step)}
    follows: list[list[Hashable]] = [[] for _ in steps[1:]]
    for j in range(len(steps[0])):
        operands = [[leaf for leaf in leaves(step[j]) if isinstance(leaf, Node)] for step in steps]
        for position in range(len(operands[0])):
            reads = [read_of(nodes[position]) for nodes in operands]
            keys = transitions(reads, [at.get(read.root) for read in reads])
            for list_of_step, key in zip(follows, keys, strict=True):
                list_of_step.append(key)
    ways = [tuple(parts) for parts in follows]
    ends: list[int] = []  # of stretches, each the step after its last
    first = 1
    for k in range(2, len(steps) + 1):
        if k == len(steps) or ways[k - 1] != ways[first - 1]:
            if k - first + 1 >= least:
                ends.append(k)
            first = k
    if len(ends) < 2:
        return []
    return [list(steps[begin:end]) for begin, end in zip([0, *ends[:-1]], [*ends[:-1], len(steps)], strict=True)]
