"""Which nodes of a graph look alike, as far as a few operators around them: in an unrolled loop, those of each step.

    mul_3   add(., .) above, tanh below     kind 7
    mul_9   add(., .) above, tanh below     kind 7

Why a pattern does not lie at a node is found out once for all nodes of one kind. The work is linear in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from torch.fx import Node

RADIUS = 6
"""Operators away from a node that its kind tells apart; few patterns are larger."""


def kinds(nodes: Sequence[Node], call: Callable[[Node], Hashable]) -> Mapping[Node, int]:
    """A number for each node, equal where what surrounds them looks alike; ``call`` is what a node is by itself."""
    place = {node: number for number, node in enumerate(nodes)}
    above = [[place[operand] for operand in node.all_input_nodes] for node in nodes]
    below = [[place[user] for user in node.users] for node in nodes]
    numbers: dict[Hashable, int] = {}
    kind = [numbers.setdefault(call(node), len(numbers)) for node in nodes]
    for _ in range(RADIUS):
        numbers = {}
        kind = [
            numbers.setdefault(
                (own, tuple([kind[one] for one in operands]), tuple(sorted([kind[one] for one in users]))),
                len(numbers),
            )
            for own, operands, users in zip(kind, above, below, strict=True)
        ]
    return dict(zip(nodes, kind, strict=True))
