"""The loops of a model: launches of a step before and after, and the result for each loop.

    before:  zeros  (addmm sigmoid tanh mul) x 64  stack
    after:   addmm  (addmm region) x 64            ->   64 steps, 4 launches each before and 2 after
             addmm  loop                           ->   64 steps, 4 launches each before and 0 after, one addmm hoisted

Eager unrolls a Python loop, and so does capture. A repeat in eager's record is a loop of the user's, known by its
lines. Launches of these lines that remain after the passes, as many as there are steps, are left in a step. A loop
rolled into one kernel leaves none, for any number of steps; other launches of its lines were hoisted, or belong to a
peeled step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule, Node

from fuse import ops
from fuse.graph.describing import describe
from fuse.graph.loop import Loop as LoopModule
from fuse.graph.loop_with_ends import LoopWithEnds, graph_in
from fuse.graph.signature import Dispatch
from fuse.loops.rolling import LEAST_STEPS
from fuse.passes.roll_loops import roll_loops
from fuse.passes.roll_whole_loops import roll_whole_loops
from fuse.report.repeats import Folding, Repeat, fold, runs
from fuse.rewrite.launches import node_launches
from fuse.rewrite.ledger import Ledger
from fuse.rewrite.nested import called_module, kind

Found = tuple[Repeat, frozenset[str]]
"""A repetition in eager's record, and the lines of its steps."""
MINIMUM_TRIP_COUNT = 3  # two equal parts are a function called twice
ROLLING = (roll_whole_loops.__name__, roll_loops.__name__)
"""The passes whose reasons tell why a loop stays unrolled, or which operators stay in its steps."""


@dataclass(frozen=True)
class RolledLoop:
    """A loop that was rolled: one persistent kernel, or a program of ``launches`` that runs step by step.

    ``states`` are carried from step to step, ``reads`` are the parts of inputs that one step reads, ``keeps`` are the
    outputs collected of each step; all by dtype and shape, as in ``f32[4, 128]``.
    """

    trip_count: int
    states: tuple[str, ...]
    reads: tuple[str, ...]
    keeps: tuple[str, ...]
    launches: int = 0


@dataclass(frozen=True)
class Repetition:
    """Steps that repeat, with the launches of one of them; ``source`` is the user line on which a step begins.

    ``rolled`` has the kernels or programs that run them: none for a loop that was not rolled, several if the steps hold
    loops.
    ``outside`` lists other launches of a rolled loop's lines: hoisted operators, and ``peeled`` steps that differ.
    ``reasons`` has the verdicts of the rolling passes on those lines.
    """

    trip_count: int
    launches_per_step_before: int
    launches_per_step_after: int
    source: str
    rolled: tuple[RolledLoop, ...] = ()
    outside: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def peeled(self) -> int:
        """Steps that run before or after the kernel because they differ from the others."""
        return max(0, self.trip_count - self.rolled[0].trip_count) if len(self.rolled) == 1 else 0

    def to_dict(self) -> dict[str, Any]:
        """The loop as plain values, ready for JSON."""
        return {
            "trip_count": self.trip_count,
            "launches_per_step_before": self.launches_per_step_before,
            "launches_per_step_after": self.launches_per_step_after,
            "source": self.source,
            "rolled": [
                {
                    "trip_count": r.trip_count,
                    "states": [*r.states],
                    "reads": [*r.reads],
                    "keeps": [*r.keeps],
                    "launches_per_step": r.launches,
                }
                for r in self.rolled
            ],
            "peeled": self.peeled,
            "outside": [*self.outside],
            "reasons": [*self.reasons],
        }


@dataclass(frozen=True)
class _Launch:
    """A launch: the operator or kind of fused group, its kind, its own user line, and all its user lines."""

    what: Hashable
    kind: str
    source: str
    lines: frozenset[str]


def loops(dispatches: Sequence[Dispatch], graph: GraphModule, ledger: Ledger) -> tuple[Repetition, ...]:
    """The loops of a model, from eager's record, its graph after the passes, and the verdicts of the passes.

    After the passes, the count of equal launches (an operator or fused group of the same lines) is divided by the steps
    and rounded: a launch for all steps at once is none of a step, and a first step that differs changes nothing. Rolled
    loops without a repeat in eager's record come last, because their steps are on different lines.
    """
    before = list(_dispatched(dispatches))
    found = [(run, _lines(before, run)) for run in _repetitions(fold(before))]
    after = list(_shared_out(_launched(graph), found))
    kernels, unseen = _kernels(graph, found)
    result = []
    for number, (run, lines) in enumerate(found):
        remaining = [(launch, count, each) for launch, count, owners, each in after if number in owners]
        rolled = tuple(_rolled(node) for node in kernels.get(number, ()))
        once = [(launch, count) for launch, count, each in remaining if not each and launch.kind != "loop"]
        outside = [_described(launch, count) for launch, count in once if rolled and launch.source in lines]
        result.append(
            Repetition(
                trip_count=run.count,
                launches_per_step_before=run.period,
                launches_per_step_after=sum(each for _, _, each in remaining),
                source=before[run.start].source,
                rolled=rolled,
                outside=tuple(outside),
                reasons=_reasons(ledger, lines, run.count, bool(rolled)),
            )
        )
    return (*result, *(_unseen(node) for node in unseen))


def formula(launches: int, loops: Sequence[tuple[int, int]]) -> str:
    """All launches of a model in terms of its loops, each given as launches a step and steps.

    Loops of equal trip count share one term, named by ``trip_names``.

    >>> formula(771, [(12, 64)]), formula(2, [(0, 64)]), formula(1160, [(12, 64), (1, 64), (3, 99)])
    ('3 + 12*T', '2', '31 + 13*T1 + 3*T2')
    """
    names = trip_names([steps for _, steps in loops])
    each: Counter[int] = Counter()
    for count, steps in loops:
        each[steps] += count
    rest = launches - sum(count * steps for steps, count in each.items())
    return " + ".join([f"{rest:,}", *(f"{count:,}*{names[steps]}" for steps, count in each.items() if count)])


def trip_names(trip_counts: Sequence[int]) -> dict[int, str]:
    """The name of each trip count in a formula.

    >>> trip_names([64, 64]), trip_names([64, 99])
    ({64: 'T'}, {64: 'T1', 99: 'T2'})
    """
    different = list(dict.fromkeys(trip_counts))
    return {steps: f"T{number}" if len(different) > 1 else "T" for number, steps in enumerate(different, start=1)}


def _repetitions(parts: Folding) -> Iterator[Repeat]:
    """The repetitions of a folding that users see as loops; of nested ones, the longer one with most of the entries.

    An encoder of two directions, or a stack of layers, repeats a whole loop over time.
    """
    for run in runs(parts):
        inner = [part for part in runs(run.body) if part.count > run.count]
        if run.count >= MINIMUM_TRIP_COUNT and 2 * sum(part.period * part.count for part in inner) <= run.period:
            yield run
            continue
        for repeat in range(run.count):
            for part in _repetitions(run.body):
                yield replace(part, start=part.start + repeat * run.period)


def _dispatched(dispatches: Sequence[Dispatch]) -> Iterator[_Launch]:
    for dispatch in dispatches:
        known = ops.info(dispatch.op)
        if dispatch.source and (known is None or known.launches):
            yield _Launch(dispatch.op, ops.kind(dispatch.op), dispatch.source, frozenset([dispatch.source]))


def _launched(graph: GraphModule) -> Counter[_Launch]:
    """The number of each launch of a graph: an operator, or fused groups of the same lines."""
    launched: Counter[_Launch] = Counter()
    for node in graph.graph.nodes:
        if count := node_launches(node):
            group, source = kind(node), node.meta.get("source", "")
            what, sort = (group, group) if group else (node.target, ops.kind(node.target))
            launched[_Launch(what, sort, source, frozenset(_sources(node)))] += count
    return launched


def _shared_out(
    launched: Counter[_Launch], found: Sequence[Found]
) -> Iterator[tuple[_Launch, int, Sequence[int], int]]:
    """Each launch, its count, the loops (by number) it belongs to, and its count in one of their steps.

    Loops on the same lines (a function called twice) share the launches of these lines. A function that several loops
    call has its lines in all of them: its launches belong to the loops whose steps divide their count best.
    """
    for launch, count in launched.items():
        owners = _owners(launch.lines, [lines for _, lines in found])
        if not owners:
            continue
        alike: dict[frozenset[str], list[int]] = {}
        for owner in owners:
            alike.setdefault(found[owner][1], []).append(owner)
        candidates = [owners, *alike.values()]
        each = [count / sum(found[owner][0].count for owner in some) for some in candidates]
        misfit = [abs(ratio - round(ratio)) if ratio > 0.5 else 1.0 for ratio in each]
        best = misfit.index(min(misfit))
        yield launch, count, candidates[best], round(each[best])


def _owners(lines: frozenset[str], loops: Sequence[frozenset[str]]) -> list[int]:
    """The numbers of the loops that contain all ``lines``, else some of them (a group may reach out of a loop)."""
    inside = [number for number, others in enumerate(loops) if lines and lines <= others]
    return inside or [number for number, others in enumerate(loops) if lines & others]


def _kernels(graph: GraphModule, found: Sequence[Found]) -> tuple[dict[int, list[Node]], list[Node]]:
    """For each repetition, by number, the rolled loops of its lines; and the rolled loops of no repetition.

    A function called twice makes two repetitions on the same lines: each gets the next loop that is not longer. Loops
    beyond that are inside the steps of a repetition.
    """
    kernels: dict[int, list[Node]] = {}
    unseen = []
    for node in map(_loop_call, graph.graph.nodes):
        if not isinstance(module := called_module(node), LoopModule):
            continue
        owners = _owners(frozenset(_sources(node)), [lines for _, lines in found])
        free = [number for number in owners if number not in kernels and found[number][0].count >= module.trip_count]
        if owners:
            kernels.setdefault((free or owners)[0], []).append(node)
        else:
            unseen.append(node)
    return kernels, unseen


def _loop_call(node: Node) -> Node:
    """The inner call of the loop, if ``node`` calls one with prologue and epilogue; else ``node``."""
    module = called_module(node)
    return module.call if isinstance(module, LoopWithEnds) else node


def _rolled(node: Node) -> RolledLoop:
    module = called_module(node)
    assert isinstance(module, LoopModule)
    carries, reads = module.spec.carries, len(module.spec.step_inputs)
    operands = [place.meta["val"] for place in module.body.graph.find_nodes(op="placeholder")]
    results = module.body.graph.output_node().meta["val"]
    return RolledLoop(
        module.trip_count,
        tuple(map(describe, operands[:carries])),
        tuple(map(describe, operands[carries : carries + reads])),
        tuple(map(describe, results[carries:])),
        0 if module.persistent else sum(node_launches(inner) for inner in module.body.graph.nodes),
    )


def _unseen(node: Node) -> Repetition:
    rolled, module = _rolled(node), called_module(node)
    assert isinstance(module, LoopModule)
    each = 0 if module.spec.one_call else sum(node_launches(inner) for inner in module.body.graph.nodes)
    return Repetition(rolled.trip_count, each, rolled.launches, node.meta.get("source", ""), (rolled,))


def _described(launch: _Launch, count: int) -> str:
    times = f"{count:,} x " if count > 1 else ""
    return f"{times}{launch.kind} ({launch.source})"


def _reasons(ledger: Ledger, lines: frozenset[str], trip_count: int, rolled: bool) -> tuple[str, ...]:
    """Verdicts of the rolling passes on these lines, or the reason for none."""
    said = [one for one in ledger.rejected if one.pass_name in ROLLING and lines.intersection(one.sources)]
    if said or rolled:
        return tuple(f"{one.pass_name}: {one.reason}" for one in said)
    if not set(ROLLING).intersection(ledger.passes):
        return ("the passes that roll loops were left out",)
    if trip_count < LEAST_STEPS:
        return (f"a loop of fewer than {LEAST_STEPS} steps is not rolled",)
    return ()


def _sources(node: Node) -> Iterator[str]:
    """The user lines of a node and of everything inside it."""
    if source := node.meta.get("source", ""):
        yield source
    inside = graph_in(called_module(node))
    if inside is not None:
        for inner in inside.graph.nodes:
            if inner.op in ("call_function", "call_module"):
                yield from _sources(inner)


def _lines(launches: Sequence[_Launch], run: Repeat) -> frozenset[str]:
    return frozenset().union(*(launch.lines for launch in launches[run.start : run.start + run.period]))
