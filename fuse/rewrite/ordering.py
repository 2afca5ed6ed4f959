"""Program order: every node behind its operands, otherwise in the given order; nodes with effects keep their order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

N = TypeVar("N", bound=Hashable)


def program_order(nodes: Iterable[N], needs: Callable[[N], Iterable[N]], has_effects: Callable[[N], bool]) -> list[N]:
    """The nodes and everything that they need, in program order. Linear time.

    >>> program_order("cab", lambda node: "a" if node == "c" else "", lambda node: node in "cb")
    ['a', 'c', 'b']
    """
    nodes = list(nodes)
    with_effects = [node for node in nodes if has_effects(node)]
    before = dict(zip(with_effects[1:], with_effects, strict=False))
    done: dict[N, None] = {}
    for start in nodes:
        stack = [start]
        while stack:
            node = stack[-1]
            needed = [*needs(node), before[node]] if node in before else needs(node)
            if node in done or not (waiting := [one for one in needed if one not in done]):
                done[stack.pop()] = None
            else:
                stack.extend(reversed(waiting))
    return list(done)
