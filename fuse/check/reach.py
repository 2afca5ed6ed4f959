"""Find patterns that can never fire: each is matched against the graph of its own function.

pattern --capture--> graph --each pass that runs before patterns are matched--> graph     does it still match?

never                   a check never passes, or its operators exclude one of its constraints
at first only           an earlier pass rewrites its operators
taken, way by way       patterns that go first take each way through it, though no single one takes all
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fuse.check.pattern import as_model, bound, constants
from fuse.check.samples import LARGEST, Kind, Sample, usual_samples
from fuse.graph.capture import capture
from fuse.passes.match_patterns import match_patterns, prepare_untried
from fuse.rewrite import nested, registry
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.matching import match
from fuse.rewrite.pipeline import run_passes

Way = Sample
"""A choice of a pattern's alternatives, with arguments for it."""

FACTORS = (64, 4)
"""Factors by which larger tensors are tried, for passes that ask what a rewrite costs."""


@dataclass(frozen=True)
class Finding:
    """One conflict in a set of patterns; :mod:`fuse.check.lint` lists the kinds.

    ``other`` is the pattern or pass that keeps ``pattern`` from firing; empty if there is none.
    """

    kind: str
    pattern: str
    other: str
    advice: str

    def __str__(self) -> str:
        return f"{self.kind}: {' and '.join(filter(None, (self.pattern, self.other)))}; {self.advice}"


def unreachable(pattern: Pattern, takers: Sequence[str] = ()) -> Iterator[Finding]:
    """Why ``pattern`` can never fire; ``takers`` are the patterns that together take each way through it, if any.

    >>> import torch
    >>> from fuse.rewrite.patterns.definition import define
    >>> def less_nothing(x): return torch.tanh(torch.exp(x) - 0.0)
    >>> print(*unreachable(define(less_nothing)))
    unreachable: less_nothing and no_ops; the pass rewrites its operators before patterns are matched
    """
    tried = (one for way in ways(pattern) for one in (way, *_longer(way, pattern)))
    lost = _always_lost(pattern, tried)
    if lost is not None:
        yield lost
    elif takers:
        advice = "together they match all of its alternatives first: give it a higher priority, or leave it out"
        yield Finding("unreachable", pattern.name, ", ".join(takers), advice)


def ways(pattern: Pattern) -> list[Way]:
    """Arguments for each way through ``pattern``, with each of its examples; at most ``MAX_WAYS``."""
    return list(usual_samples(pattern))


def captured(pattern: Pattern, way: Way) -> GraphModule:
    """The graph of ``pattern`` with the alternatives of ``way``."""
    return capture(*as_model(bound(pattern, way), way.arguments(), constants(pattern)))


def fires(graph: GraphModule, patterns: Sequence[Pattern], wanted: Pattern) -> bool:
    """Whether ``wanted`` is matched in ``graph``, or in the body of a loop there, among all ``patterns``."""
    outcomes = (one for body, _ in nested.walk(graph) for one in match(body, patterns, prepare_untried))
    return any(one.kind == "matched" and one.pattern is wanted for one in outcomes)


def _always_lost(pattern: Pattern, tried: Iterator[Way]) -> Finding | None:
    """Why the pattern does not fire for the first way of ``tried``; None if it fires for one of them."""
    first: Finding | None = None
    for way in tried:
        finding = _lost(pattern, way)
        if finding is None:
            return None
        first = first or finding
    return first


def _lost(pattern: Pattern, way: Way) -> Finding | None:
    """Why ``pattern`` does not fire in its graph by ``way`` once earlier passes have run; None if it does."""
    graph = captured(pattern, way)
    there, culprit = fires(graph, [pattern], pattern), ""
    for name in registry.earlier_than(match_patterns.__name__):
        run_passes(graph, [name])
        before, there = there, fires(graph, [pattern], pattern)
        culprit = name if before and not there else culprit
    if there:
        return None
    if culprit:
        return Finding(
            "unreachable", pattern.name, culprit, "the pass rewrites its operators before patterns are matched"
        )
    best = max(match(graph, [pattern], prepare_untried, near=True), key=lambda one: one.progress, default=None)
    reason = "no operator of it is left" if best is None else f"{best.kind}: {best.reason}"
    return Finding("unreachable", pattern.name, "", f"it does not match its own computation: {reason}")


def _longer(way: Way, pattern: Pattern) -> Iterator[Way]:
    """``way`` with larger tensors, for passes that ask what a rewrite costs; empty if the pattern takes none."""
    for factor in FACTORS:
        kinds = [pytree.tree_map_only(Kind, partial(_times, factor), kind) for kind in way.kinds]
        longer = replace(way, kinds=tuple(kinds))
        small = all(math.prod(kind.shape) <= LARGEST for kind in pytree.tree_leaves(kinds))
        if small and longer.runs(pattern):
            yield longer
            return


def _times(factor: int, kind: Kind) -> Kind:
    return replace(kind, shape=tuple(size * factor if size > 1 else size for size in kind.shape))
