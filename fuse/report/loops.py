"""Repeated steps: how many launches each takes before and after.

    before:  zeros  (addmm sigmoid tanh mul) x 64  stack
    after:   zeros  (addmm region) x 64  stack        ->   64 steps, 4 launches each before and 2 after

Eager unrolls a Python loop, and so does capture. What repeats in the record of eager's launches is a loop of the
user's, known by its lines; its share of the launches afterwards is whatever still repeats on those lines.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fuse import ops
from fuse.graph.signature import Dispatch
from fuse.report.repeats import Run, fold, runs
from fuse.rewrite.launches import node_launches
from fuse.rewrite.nested import called_module, kind, trip_count


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

    Launches that left the loop (one product for all steps) belong to no step. Where a step differs from the others, the
    figure after the passes is the average, rounded.
    """
    before = list(_dispatched(dispatches))
    after = list(_launched(graph))
    found = [(run, _lines(before, run)) for run in runs(fold([launch.token for launch in before]))]
    left = [(_launches(after, run), _lines(after, run)) for run in runs(fold([launch.token for launch in after]))]
    result = []
    for run, lines in found:
        remaining = sum(launches for launches, others in left if lines & others)
        # Two loops on the same lines (a function called twice) share what remains of both.
        trips = sum(other.count for other, others in found if lines & others)
        first = next(iter(before[run.start].lines))
        result.append(Loop(run.count, _launches(before, run) // run.count, round(remaining / trips), first))
    return tuple(result)


def _dispatched(dispatches: Sequence[Dispatch]) -> Iterator[_Launch]:
    for dispatch in dispatches:
        known = ops.info(dispatch.op)
        if dispatch.source and (known is None or known.launches):
            yield _Launch((dispatch.op, dispatch.source), frozenset([dispatch.source]))


def _launched(graph: GraphModule) -> Iterator[_Launch]:
    for node in graph.graph.nodes:
        count = node_launches(node)
        if not count:
            continue
        lines = frozenset(_sources(node))
        if kind(node) == "loop" and (loop := called_module(node)) is not None:
            # A rolled loop stands for all its steps: as many equal launches as it has steps.
            steps = trip_count(loop)
            yield from [_Launch((node.name, lines), lines, count // steps)] * steps
        elif lines:
            yield _Launch((_token(node), lines), lines, count)


def _token(node: Node) -> Hashable:
    inside = _inside(node)
    return node.target if inside is None else tuple(inner.target for inner in _operators(inside))


def _sources(node: Node) -> Iterator[str]:
    """The user lines of a node and of everything inside it."""
    if source := node.meta.get("source", ""):
        yield source
    inside = _inside(node)
    if inside is not None:
        for inner in _operators(inside):
            yield from _sources(inner)


def _inside(node: Node) -> GraphModule | None:
    """The graph of a fused group or of one step of a loop."""
    module = called_module(node)
    if module is not None and kind(node) == "loop":
        module = module.get_submodule("body")
    return module if isinstance(module, GraphModule) else None


def _operators(graph: GraphModule) -> Iterator[Node]:
    return (node for node in graph.graph.nodes if node.op in ("call_function", "call_module"))


def _lines(launches: Sequence[_Launch], run: Run) -> frozenset[str]:
    return frozenset().union(*(launch.lines for launch in launches[run.start : run.start + run.period]))


def _launches(launches: Sequence[_Launch], run: Run) -> int:
    return sum(launch.count for launch in launches[run.start : run.stop])
