"""Conflicts in a set of patterns that are right one by one: one takes another's matches, or undoes it.

    shadowed           where B matches, A of higher priority matches too: B never fires
    order-dependent    the same at equal priority: which fires depends on which was registered first
    looping            the replacement is what the pattern matches, or two patterns turn into each other
    unreachable        no match is left for it: :mod:`fuse.check.reach`

Each pattern is matched against the graphs of all others, one graph for each way through a pattern (a choice of its
alternatives), and against their replacements. A pattern's ``overlaps`` names the patterns that it may meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from torch.fx import GraphModule

from fuse.check.pattern import rewrite
from fuse.check.reach import Finding, Way, captured, fires, unreachable, ways
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.pipeline import run_passes
from fuse.rewrite.registry import of_stages


def lint(patterns: Sequence[Pattern]) -> list[Finding]:
    """Conflicts between ``patterns``, which are registered in this order.

    >>> import torch
    >>> from fuse.rewrite.patterns.definition import define
    >>> def whole(x): return torch.tanh(torch.exp(x) * 2)
    >>> def part(x): return torch.exp(x) * 2
    >>> for finding in lint([define(whole), define(part, priority=1)]): print(finding)
    shadowed: whole and part; where whole matches, part does and is preferred: give whole a higher priority
    """
    computed = {one: tuple(partial(_cleaned, one, way) for way in ways(one)) for one in patterns}
    found: list[Finding] = []
    for one in patterns:
        taken = {other: _taken(one, other, patterns, computed) for other in patterns if other is not one}
        rivals = [_rivalry(one, other) for other, places in taken.items() if places]
        found += rivals
        by_one = any(len(places) == len(computed[one]) for places in taken.values())
        together = () if by_one else tuple(other.name for other, places in taken.items() if places)
        left = set(range(len(computed[one]))).difference(*taken.values())
        found += unreachable(one, () if left else together)
    return found + list(_loops(patterns, computed))


Computed = Mapping[Pattern, Sequence[Callable[[], GraphModule]]]
"""Functions that make the graphs of each pattern, one for each way through it, anew in each call."""


def _cleaned(pattern: Pattern, way: Way) -> GraphModule:
    graph = captured(pattern, way)
    run_passes(graph, of_stages("clean"))
    return graph


def _taken(one: Pattern, other: Pattern, patterns: Sequence[Pattern], computed: Computed) -> set[int]:
    """The ways through ``one`` that ``other`` takes from it by going first."""
    first = (-other.priority, patterns.index(other)) < (-one.priority, patterns.index(one))
    if not first or other.name in one.overlaps or one.name in other.overlaps:
        return set()
    return {
        place
        for place, graph in enumerate(computed[one])
        if fires(graph(), [one], one) and not fires(graph(), [other, one], one)
    }


def _rivalry(one: Pattern, other: Pattern) -> Finding:
    where = f"where {one.name} matches, {other.name} does and is preferred"
    if one.priority == other.priority:
        return Finding("order-dependent", one.name, other.name, f"{where}, as it was registered first: say priority=")
    return Finding("shadowed", one.name, other.name, f"{where}: give {one.name} a higher priority")


def _loops(patterns: Sequence[Pattern], computed: Computed) -> Iterator[Finding]:
    """Patterns that match their own replacement, or two that match each other's."""
    results: dict[Pattern, GraphModule] = {}
    for pattern in patterns:
        graph = computed[pattern][0]()
        if pattern.replace is not None and any(one.kind == "matched" for one in rewrite(graph, [pattern])):
            run_passes(graph, of_stages("clean"))
            results[pattern] = graph
    for pattern, graph in results.items():
        if fires(graph, [pattern], pattern):
            yield Finding("looping", pattern.name, pattern.name, "it matches its own replacement")
    for one, other in itertools.combinations(results, 2):
        if fires(results[one], [other], other) and fires(results[other], [one], one):
            yield Finding("looping", one.name, other.name, "each matches the replacement of the other: leave one out")
