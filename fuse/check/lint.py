"""What is wrong with a set of patterns though each of them is right: one takes another's place, or undoes it.

    shadowed           where B matches, A of higher priority matches too: B never fires
    order-dependent    the same at equal priority: which fires depends on which was registered first
    looping            the replacement is what the pattern matches, or two patterns turn into each other

Each pattern is looked for in what the others compute, and in what replaces them. ``overlaps`` of a pattern declares the
names of those that it may meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from fuse.check.pattern import CLEANING, bound, rewrite
from fuse.check.samples import samples
from fuse.graph.capture import capture
from fuse.graph.function import Function
from fuse.passes.match_patterns import prepare
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.matching import match
from fuse.rewrite.pipeline import run_passes


@dataclass(frozen=True)
class Finding:
    """One thing to mend; ``kind`` as in this module's list."""

    kind: str
    pattern: str
    other: str
    advice: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.pattern} and {self.other}; {self.advice}"


def lint(patterns: Sequence[Pattern]) -> list[Finding]:
    """What is wrong with ``patterns`` as a set, which are registered in this order.

    >>> import torch
    >>> from fuse.rewrite.patterns.definition import define
    >>> def whole(x): return torch.tanh(torch.exp(x) * 2)
    >>> def part(x): return torch.exp(x) * 2
    >>> for finding in lint([define(whole), define(part, priority=1)]): print(finding)
    shadowed: whole and part; where whole matches, part does and is preferred: give whole a higher priority
    """
    computed = {one: _computed(one) for one in patterns}
    found = [finding for pair in itertools.permutations(patterns, 2) for finding in _rivals(*pair, patterns, computed)]
    return found + list(_loops(patterns, computed))


Computed = Mapping[Pattern, Callable[[], GraphModule]]
"""Makes the graph of what a pattern computes, anew each time."""


def _computed(pattern: Pattern) -> Callable[[], GraphModule]:
    sample = next(iter(samples(pattern)))

    def graph() -> GraphModule:
        made = capture(Function(bound(pattern, sample)), sample.arguments())
        run_passes(made, CLEANING)
        return made

    return graph


def _rivals(one: Pattern, other: Pattern, patterns: Sequence[Pattern], computed: Computed) -> Iterator[Finding]:
    """Whether ``other``, which goes first, takes what ``one`` matches."""
    first = (-other.priority, patterns.index(other)) < (-one.priority, patterns.index(one))
    if not first or other.name in one.overlaps or one.name in other.overlaps:
        return
    if not _fires(computed[one](), [one], one) or _fires(computed[one](), [other, one], one):
        return
    where = f"where {one.name} matches, {other.name} does and is preferred"
    if one.priority == other.priority:
        yield Finding("order-dependent", one.name, other.name, f"{where}, as it was registered first: say priority=")
    else:
        yield Finding("shadowed", one.name, other.name, f"{where}: give {one.name} a higher priority")


def _fires(graph: GraphModule, patterns: Sequence[Pattern], wanted: Pattern) -> bool:
    return any(one.kind == "matched" and one.pattern is wanted for one in match(graph, patterns, prepare))


def _loops(patterns: Sequence[Pattern], computed: Computed) -> Iterator[Finding]:
    """Patterns that match what replaces them, by themselves or by turns."""
    results: dict[Pattern, GraphModule] = {}
    for pattern in patterns:
        graph = computed[pattern]()
        if pattern.replace is not None and any(one.kind == "matched" for one in rewrite(graph, [pattern])):
            run_passes(graph, CLEANING)
            results[pattern] = graph
    for pattern, graph in results.items():
        if _fires(graph, [pattern], pattern):
            yield Finding("looping", pattern.name, pattern.name, "its replacement is what it matches")
    for one, other in itertools.combinations(results, 2):
        if _fires(results[one], [other], other) and _fires(results[other], [one], one):
            yield Finding("looping", one.name, other.name, "each matches what replaces the other: leave one out")
