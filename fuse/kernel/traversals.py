"""Traversals of values: their operands, costs, and the order of their reductions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fuse.kernel.values import Concat, Correlation, Map, Product, Reduce, Reindex, Solved, Value

WORTH_KEEPING = 8
"""Least cost of an element (``Map.cost``) that is stored rather than computed again; a ``tanh`` costs 10."""


def reductions_below(values: Iterable[Value]) -> list[Reduce]:
    """All reductions below ``values``, each after the reductions that it needs."""
    found: list[Reduce] = []
    seen: set[int] = set()

    def visit(value: Value) -> None:
        stack: list[tuple[Value, bool]] = [(value, False)]
        while stack:
            current, done = stack.pop()
            if done:
                if isinstance(current, Reduce):
                    found.append(current)
                continue
            if id(current) in seen:
                continue
            seen.add(id(current))
            stack.append((current, True))
            stack.extend((child, False) for child in reversed(children(current)))

    for value in values:
        visit(value)
    return found


def children(value: Value) -> tuple[Value, ...]:
    """The values that ``value`` is computed from."""
    match value:
        case Map():
            return value.args
        case Reindex() | Reduce():
            return (value.source,)
        case Concat():
            return value.pieces
        case Solved():
            return value.sources
        case Product() | Correlation():
            return (value.left, value.right)
        case _:
            parts = [getattr(value, name, None) for name in ("source", "table", "positions")]
            return tuple(p for p in parts if isinstance(p, Value))


def within_stage(roots: Iterable[Value], through_reductions: bool = False) -> list[Value]:
    """Values below ``roots``, children first. Without ``through_reductions``, reductions and their operands are left
    out."""
    found: dict[int, Value] = {}
    stack = [(root, False) for root in roots]
    while stack:
        value, done = stack.pop()
        if done:
            found.setdefault(id(value), value)
        elif id(value) not in found and (through_reductions or not isinstance(value, Reduce)):
            stack.append((value, True))
            stack.extend((child, False) for child in children(value))
    return list(found.values())


def cost_within_stage(value: Value) -> int:
    """The cost of computing one element of ``value``, without the cost of reductions."""
    return sum(v.cost for v in within_stage([value]) if isinstance(v, Map))


def stages(reductions: Sequence[Reduce]) -> list[list[Reduce]]:
    """Reductions by stage: stage ``n`` has those that depend on a chain of ``n`` others, which may share a loop."""
    before: dict[int, int] = {}
    for value in within_stage(reductions, through_reductions=True):
        known = (before[id(child)] + isinstance(child, Reduce) for child in children(value))
        before[id(value)] = max(known, default=0)
    count = max((before[id(r)] for r in reductions), default=-1) + 1
    return [[r for r in reductions if before[id(r)] == n] for n in range(count)]
