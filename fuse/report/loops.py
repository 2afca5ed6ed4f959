"""Repeated steps: how many launches each takes before and after.

    before:  zeros  (addmm sigmoid tanh mul) x 64  stack
    after:   addmm  (addmm region) x 64            ->   64 steps, 4 launches each before and 2 after
             addmm  loop                           ->   64 steps, 4 launches each before and 0 after

Eager unrolls a Python loop, and so does capture. What repeats in the record of eager's launches is a loop of the
user's, known by its lines; what those lines still launch after the passes, and as often as there are steps, is left of
a step. A loop rolled into one kernel leaves none, however few its steps are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fuse import ops
from fuse.graph.signature import Dispatch
from fuse.report.repeats import Run, fold, runs
from fuse.rewrite.launches import node_launches
from fuse.rewrite.nested import called_module, kind

MINIMUM_TRIP_COUNT = 3  # less is a function called twice


@dataclass(frozen=True)
class Loop:
    """Steps that repeat, with the launches of one of them; ``source`` is the user line on which a step begins."""

    trip_count: int
    launches_per_step_before: int
    launches_per_step_after: int
    source: str


@dataclass(frozen=True)
class _Launch:
    """Launches of one dispatch or node: what they are, and the user lines they come from."""

    token: Hashable
    lines: frozenset[str]
    count: int = 1


def loops(dispatches: Sequence[Dispatch], graph: GraphModule) -> tuple[Loop, ...]:
    """The loops of a model, from eager's record and from its graph after the passes.

    After the passes, equal launches (one operator or fused group of the same lines) are counted together and divided by
    the steps, rounded: what serves all steps at once is no launch of a step, and a first step that differs changes
    nothing.
    """
    before = list(_dispatched(dispatches))
    after = list(_launched(graph))
    repeats = [run for run in runs(fold([launch.token for launch in before])) if run.count >= MINIMUM_TRIP_COUNT]
    found = [(run, _lines(before, run)) for run in repeats]
    result = []
    for run, lines in found:
        remaining: Counter[Hashable] = Counter()
        for launch in after:
            if lines & launch.lines:
                remaining[launch.token] += launch.count
        # Two loops on the same lines (a function called twice) share what remains of both.
        trips = sum(other.count for other, others in found if lines & others)
        each = sum(round(count / trips) for count in remaining.values())
        first = next(iter(before[run.start].lines))
        result.append(Loop(run.count, _launches(before, run) // run.count, each, first))
    return tuple(result)


def formula(launches: int, loops: Sequence[tuple[int, int]]) -> str:
    """All launches of a model in terms of its loops, each given as launches a step and steps.

    >>> formula(771, [(12, 64)]), formula(3, [(0, 64)])
    ('12 x 64 + 3', '0 x 64 + 3')
    """
    rest = launches - sum(each * steps for each, steps in loops)
    terms = " + ".join(f"{each:,} x {steps:,}" for each, steps in loops)
    return f"{terms} {'-' if rest < 0 else '+'} {abs(rest):,}"


def _dispatched(dispatches: Sequence[Dispatch]) -> Iterator[_Launch]:
    for dispatch in dispatches:
        known = ops.info(dispatch.op)
        if dispatch.source and (known is None or known.launches):
            yield _Launch((dispatch.op, dispatch.source), frozenset([dispatch.source]))


def _launched(graph: GraphModule) -> Iterator[_Launch]:
    for node in graph.graph.nodes:
        if count := node_launches(node):
            lines = frozenset(_sources(node))
            yield _Launch((kind(node) or node.target, lines), lines, count)


def _sources(node: Node) -> Iterator[str]:
    """The user lines of a node and of everything inside it."""
    if source := node.meta.get("source", ""):
        yield source
    inside = _inside(node)
    if inside is not None:
        for inner in inside.graph.nodes:
            if inner.op in ("call_function", "call_module"):
                yield from _sources(inner)


def _inside(node: Node) -> GraphModule | None:
    """The graph of a fused group or of one step of a loop."""
    module = called_module(node)
    if module is not None and kind(node) == "loop":
        module = module.get_submodule("body")
    return module if isinstance(module, GraphModule) else None


def _lines(launches: Sequence[_Launch], run: Run) -> frozenset[str]:
    return frozenset().union(*(launch.lines for launch in launches[run.start : run.start + run.period]))


def _launches(launches: Sequence[_Launch], run: Run) -> int:
    return sum(launch.count for launch in launches[run.start : run.stop])
