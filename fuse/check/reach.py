"""Whether a pattern can fire at all: it is looked for in what it computes itself, as a model's graph would hold that.

pattern --capture--> graph --each pass that runs before patterns are looked for--> graph     is it still there?

never there             nothing is what it wants: a check that never passes, a constraint that its operators exclude
there, and then not     an earlier pass writes in another way what it matches
taken, way by way       patterns that go first have each way through it, though none of them has all
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
"""A way through a pattern, with arguments for it."""

FACTORS = (64, 4)
"""How much longer than usual tensors are tried, for passes that ask what a rewrite costs."""


@dataclass(frozen=True)
class Finding:
    """One thing to mend in a set of patterns; ``kind`` as in the list of :mod:`fuse.check.lint`.

    ``other`` is the pattern, or the pass, that is in the way of ``pattern``; empty where nothing else is.
    """

    kind: str
    pattern: str
    other: str
    advice: str

    def __str__(self) -> str:
        return f"{self.kind}: {' and '.join(filter(None, (self.pattern, self.other)))}; {self.advice}"


def unreachable(pattern: Pattern, takers: Sequence[str] = ()) -> Iterator[Finding]:
    """Why ``pattern`` can never fire; ``takers`` are the patterns that have each way through it, where some do.

    >>> import torch
    >>> from fuse.rewrite.patterns.definition import define
    >>> def less_nothing(x): return torch.tanh(torch.exp(x) - 0.0)
    >>> print(*unreachable(define(less_nothing)))
    unreachable: less_nothing and no_ops; the pass rewrites what it matches before patterns are looked for
    """
    tried = (one for way in ways(pattern) for one in (way, *_longer(way, pattern)))
    lost = _always_lost(pattern, tried)
    if lost is not None:
        yield lost
    elif takers:
        advice = "they go first and have each way through it: give it a higher priority, or leave it out"
        yield Finding("unreachable", pattern.name, ", ".join(takers), advice)


def ways(pattern: Pattern) -> list[Way]:
    """Arguments for each way through ``pattern``, with each of its examples; the first ways of many."""
    return list(usual_samples(pattern))


def captured(pattern: Pattern, way: Way) -> GraphModule:
    """The graph of what ``pattern`` computes by ``way``."""
    return capture(*as_model(bound(pattern, way), way.arguments(), constants(pattern)))


def fires(graph: GraphModule, patterns: Sequence[Pattern], wanted: Pattern) -> bool:
    """Whether ``wanted`` is matched in ``graph``, or in the body of a loop there, where ``patterns`` are looked for."""
    outcomes = (one for body, _ in nested.walk(graph) for one in match(body, patterns, prepare_untried))
    return any(one.kind == "matched" and one.pattern is wanted for one in outcomes)


def _always_lost(pattern: Pattern, tried: Iterator[Way]) -> Finding | None:
    """What the first of ``tried`` is lost by, where all are."""
    first: Finding | None = None
    for way in tried:
        finding = _lost(pattern, way)
        if finding is None:
            return None
        first = first or finding
    return first


def _lost(pattern: Pattern, way: Way) -> Finding | None:
    """Why ``pattern`` does not fire in what it computes by ``way`` once earlier passes have run; None where it does."""
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
            "unreachable", pattern.name, culprit, "the pass rewrites what it matches before patterns are looked for"
        )
    best = max(match(graph, [pattern], prepare_untried, near=True), key=lambda one: one.progress, default=None)
    reason = "no operator of it is left" if best is None else f"{best.kind}: {best.reason}"
    return Finding("unreachable", pattern.name, "", f"it does not match its own computation: {reason}")


def _longer(way: Way, pattern: Pattern) -> Iterator[Way]:
    """The same with longer tensors, for passes that ask what a rewrite costs; nothing where the pattern takes none."""
    for factor in FACTORS:
        kinds = [pytree.tree_map_only(Kind, partial(_times, factor), kind) for kind in way.kinds]
        longer = replace(way, kinds=tuple(kinds))
        small = all(math.prod(kind.shape) <= LARGEST for kind in pytree.tree_leaves(kinds))
        if small and longer.runs(pattern):
            yield longer
            return


def _times(factor: int, kind: Kind) -> Kind:
    return replace(kind, shape=tuple(size * factor if size > 1 else size for size in kind.shape))
