"""Walks over values: what stands below a value, and in which order reductions must come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fuse.kernel.values import Concat, Map, Product, Reduce, Reindex, Value

WORTH_KEEPING = 8
"""Cost from which an element is kept in memory rather than computed again."""


def reductions_below(values: Iterable[Value]) -> list[Reduce]:
    """Every reduction below ``values``, each after those that it needs."""
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
        case Product():
            return (value.left, value.right)
        case _:
            parts = [getattr(value, name, None) for name in ("source", "table", "positions")]
            return tuple(p for p in parts if isinstance(p, Value))


def within_stage(roots: Iterable[Value], through_reductions: bool = False) -> list[Value]:
    """Values below ``roots``, down to reductions or through them, children first."""
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
    """The cost of computing one element of ``value``, reductions below it given."""
    return sum(v.cost for v in within_stage([value]) if isinstance(v, Map))


def stages(reductions: Sequence[Reduce]) -> list[list[Reduce]]:
    """Reductions by how many others must come before: those of one stage share a loop."""
    level: dict[int, int] = {}
    memo: dict[int, int] = {}

    def before(value: Value) -> int:
        """The number of stages that must be complete before ``value`` can be computed."""
        stack = [value]
        while stack:
            current = stack[-1]
            if id(current) in memo:
                stack.pop()
                continue
            waiting = [c for c in children(current) if id(c) not in memo]
            if waiting:
                stack.extend(waiting)
                continue
            memo[id(current)] = max((memo[id(c)] for c in children(current)), default=0) + isinstance(current, Reduce)
            stack.pop()
        return memo[id(value)]

    for reduction in reductions:
        level[id(reduction)] = before(reduction.source)
    count = max(level.values(), default=-1) + 1
    return [[r for r in reductions if level[id(r)] == n] for n in range(count)]
