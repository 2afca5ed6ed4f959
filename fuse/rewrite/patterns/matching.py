"""Find all matches of all patterns in a graph, with a verdict on every candidate.

    candidates      the nodes of the pattern's rarest operator, by name and operands (operand_filters.py)
    each ends in    one verdict: matched, or structure, constraint, used outside, alias or mutation, not convex,
                    overlapped, refused by lowering

Matching does not change the graph. Patterns are matched by priority, then in the order of registration; the first
alternatives of a pattern come first. The first match that takes a node keeps it. A candidate inside another match of
its own pattern has no verdict of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar, get_args

from torch.fx import GraphModule, Node

from fuse.graph.garbage_collection import without_garbage_collection
from fuse.rewrite.patterns import forms
from fuse.rewrite.patterns.conditions import Misfit, Surroundings, VerdictKind, obstacle
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.differences import Difference
from fuse.rewrite.patterns.exact_match import Attempt, Drawing, FoundMatch, compare
from fuse.rewrite.patterns.forms import Form
from fuse.rewrite.patterns.index import GraphIndex, Step
from fuse.rewrite.patterns.mismatch import PartialMatch, best_attempt
from fuse.rewrite.patterns.operand_filters import OperandFilter
from fuse.rewrite.patterns.partial_match import partial_match_at
from fuse.rewrite.patterns.search import Search, anchor, nearest_anchor
from fuse.rewrite.patterns.terms import Term

_PROGRESS = {kind: position for position, kind in enumerate(get_args(VerdictKind))}

MAX_PLACEMENTS = 8
"""The most placements of a form compared at one operator."""
MAX_LISTS = 16
"""The most lengths of tensor lists that are tried."""

Known = TypeVar("Known")

Prepare = Callable[[FoundMatch, Surroundings], "Any | Misfit"]
"""``prepare(found, surroundings)``: the data for rewriting a match, or why it cannot be rewritten."""


@dataclass(frozen=True)
class Outcome:
    """The verdict on one ``candidate``.

    ``matched`` of ``total`` operators of the pattern were found. ``node``: the node of the reason. ``differences``: all
    differences in structure. ``prepared``: the result of ``prepare`` for a match.
    """

    pattern: Pattern
    candidate: Node
    kind: VerdictKind
    reason: str = ""
    node: Node | None = None
    change: str = ""
    matched: int = 0
    total: int = 0
    differences: tuple[Difference, ...] = ()
    found: FoundMatch | None = None
    near: PartialMatch | None = field(default=None, repr=False)
    prepared: Any = field(default=None, repr=False)

    @property
    def drawing(self) -> Drawing | None:
        """The pattern with the graph's nodes for the operators that were found."""
        seen = self.found or self.near
        return None if seen is None else seen.drawing

    @property
    def progress(self) -> tuple[int, float]:
        """How far the candidate came, to compare candidates."""
        return _PROGRESS[self.kind], self.matched / max(self.total, 1)


def match(graph: GraphModule, patterns: Sequence[Pattern], prepare: Prepare, *, near: bool = False) -> list[Outcome]:
    """Verdicts on every candidate of ``patterns`` in ``graph``, pattern by pattern, in program order.

    If the graph lacks an operator of a pattern, the pattern has no verdict. If it has all of them, but none with the
    right operands, one outcome says so. With ``near``, there are candidates in both cases: nodes of another operator of
    the pattern.

    Raises:
        FuseError: a pattern cannot be run; the message names it.
    """
    with without_garbage_collection():
        outcomes = _all_outcomes(graph, patterns, prepare, near)
    return _without_circles(outcomes)


def _all_outcomes(graph: GraphModule, patterns: Sequence[Pattern], prepare: Prepare, near: bool) -> list[Outcome]:
    """The outcomes, by priority. The graph's tables are freed on return."""
    claimed: dict[Node, Pattern] = {}
    outcomes: list[Outcome] = []
    index, around = GraphIndex(graph), Surroundings(graph)
    for pattern in sorted(patterns, key=lambda one: -one.priority):
        needs = () if near else forms.needs(pattern)
        possible = [needed for needed in needs if all(index.count(one.name) for one in needed)]
        lacking = [found for needed in possible if (found := _lacking(needed, index))]
        if len(lacking) < len(possible) or not needs:
            outcomes += _Matcher(pattern, index, around, prepare, claimed).outcomes(near)
        elif rare := next(((found, step) for found in lacking for step in islice(index.steps(found.name), 1)), None):
            found, step = rare
            outcomes.append(Outcome(pattern, step.node, "structure", str(found), step.node))
    return outcomes


def _lacking(needed: Collection[OperandFilter], index: GraphIndex) -> OperandFilter | None:
    """A filter of a form that no step passes; None if there is none, or finding it would take long."""
    rarest = index.rarest(needed)
    return rarest if rarest is not None and not index.steps_like(rarest) else None


FEW = 32
"""The most candidates without a match that are explained one by one; of more, one of each kind is."""


@dataclass(frozen=True)
class _Lost:
    """A candidate without a match, with the result for each placement. The reason is found only when it is needed."""

    form: Form
    term: Term
    step: Step
    answers: Sequence[Outcome | tuple[Attempt, ...]]


@dataclass
class _Matcher:
    """Matches one pattern; ``claimed``: the nodes of matches of this and other patterns."""

    pattern: Pattern
    index: GraphIndex
    around: Surroundings
    prepare: Prepare
    claimed: dict[Node, Pattern]

    def outcomes(self, near: bool) -> list[Outcome]:
        best: dict[Node, Outcome] = {}
        lost: list[_Lost] = []
        own: set[Node] = set()
        for form, term, step in self._candidates(near):
            if step.node in own:
                continue
            outcome = self._taken(step) if step.node in self.claimed and not near else self._outcome(form, term, step)
            if isinstance(outcome, _Lost):
                lost.append(outcome)
            else:
                taken = outcome.found.members if outcome.found is not None else ()
                self.claimed.update(dict.fromkeys(taken, self.pattern))
                own.update(taken)
                best[step.node] = outcome
        known: dict[object, Outcome] = {}
        for one in lost:
            if one.step.node not in own:
                outcome = self._explained(one) if near or len(lost) <= FEW else self._explained_once(one, known)
                before = best.get(one.step.node)
                if before is None or outcome.progress > before.progress:
                    best[one.step.node] = outcome
        return sorted(best.values(), key=lambda one: self.around.position[one.candidate])

    def _candidates(self, near: bool) -> Iterator[tuple[Form, Term, Step]]:
        for form in all_forms(self.pattern, self.index):
            term, steps = (nearest_anchor if near else anchor)(form, self.index)
            for step in steps:
                yield form, term, step

    def _outcome(self, form: Form, term: Term, step: Step) -> Outcome | _Lost:
        """The match with ``term`` placed at ``step``, or the failed attempts."""
        answers: list[Outcome | tuple[Attempt, ...]] = []
        for placement in islice(Search(form, self.index).placements(term, step), MAX_PLACEMENTS):
            answer = compare(form, placement, self.index)
            answers.append(self._judged(step, answer) if isinstance(answer, FoundMatch) else answer)
            if isinstance(outcome := answers[-1], Outcome) and outcome.kind == "matched":
                return outcome
        return _Lost(form, term, step, answers)

    def _explained_once(self, lost: _Lost, known: dict[object, Outcome]) -> Outcome:
        """The best failed attempt, found once for candidates with equal calls; the others get the same reason."""
        key = lost.form, lost.term, lost.step.term, self.index.read_by(lost.step), not lost.answers
        if (outcome := known.get(key)) is None:
            outcome = known[key] = self._explained(lost)
            return outcome
        return replace(outcome, candidate=lost.step.node, node=lost.step.node)

    def _explained(self, lost: _Lost) -> Outcome:
        """The best failed attempt."""
        form, step = lost.form, lost.step
        if not lost.answers:
            return self._unlike(step, partial_match_at(form, self.index, lost.term, step))
        outcomes = [
            one if isinstance(one, Outcome) else self._unlike(step, best_attempt(form, one, self.index))
            for one in lost.answers
        ]
        return max(outcomes, key=lambda one: one.progress)

    def _unlike(self, step: Step, near: PartialMatch) -> Outcome:
        first = near.differences[0]
        return Outcome(
            self.pattern,
            step.node,
            "alias or mutation" if first.written else "structure",
            first.reason,
            first.node or step.node,
            first.change,
            near.matched,
            near.total,
            near.differences,
            near=near,
        )

    def _judged(self, step: Step, found: FoundMatch) -> Outcome:
        total = len(found.form.operators)
        problem = obstacle(found, self.around) or self._overlap(found)
        prepared = self.prepare(found, self.around) if problem is None else problem
        if not isinstance(prepared, Misfit):
            return Outcome(
                self.pattern, step.node, "matched", matched=total, total=total, found=found, prepared=prepared
            )
        node = prepared.node or step.node
        return Outcome(
            self.pattern, step.node, prepared.kind, prepared.reason, node, prepared.change, total, total, found=found
        )

    def _taken(self, step: Step) -> Outcome:
        """The verdict on a candidate in another match: any match there would overlap."""
        reason, change = self._overlapped_by(self.claimed[step.node])
        return Outcome(self.pattern, step.node, "overlapped", reason, step.node, change)

    def _overlap(self, found: FoundMatch) -> Misfit | None:
        """The misfit if another match has taken a node of ``found``."""
        other = next((self.claimed[node] for node in found.members if node in self.claimed), None)
        if other is None:
            return None
        reason, change = self._overlapped_by(other)
        return Misfit("overlapped", reason, None, change)

    def _overlapped_by(self, other: Pattern) -> tuple[str, str]:
        """Reason and change if a match of ``other`` was first."""
        change = "a higher priority: @fuse.pattern(priority=1)" if other is not self.pattern else ""
        return f"a match of {other.name} has taken some of its nodes", change


def all_forms(pattern: Pattern, index: GraphIndex) -> Iterator[Form]:
    """The forms of ``pattern``, for each length of tensor lists in the graph."""
    least = forms.takes_lists(pattern)
    if not least:
        yield from forms.forms(pattern, 1)
        return
    lengths = index.list_lengths()
    for length in sorted(length for length in lengths if length >= least)[:MAX_LISTS]:
        yield from forms.forms(pattern, length)


def _without_circles(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Drop matches that need each other's results; only matches with several results can."""
    found = list(outcomes)
    while True:
        matches = {position: one.found for position, one in enumerate(found) if one.kind == "matched" and one.found}
        several = {position: one for position, one in matches.items() if len(one.outputs) > 1}
        circles = _circles(several)
        if not circles:
            return found
        for circle in circles:
            dropped = found[max(circle)]
            reason = "it and another match would wait for each other's results"
            found[max(circle)] = replace(dropped, kind="not convex", reason=reason, node=dropped.candidate)


def _circles(matches: Mapping[int, FoundMatch]) -> list[list[int]]:
    """The cycles of matches, as lists of their positions, in the graph with each match as one node."""
    between = dict.fromkeys(_where_interleaved([one.members for one in matches.values()]))
    if not between:
        return []
    group = {node: position for position, one in matches.items() for node in one.members if node in between}
    users: dict[Node | int, set[Node | int]] = {}
    for node in between:
        target = group.get(node, node)
        reading = users.setdefault(target, set())
        reading.update(group.get(user, user) for user in node.users if user in between)
        reading.discard(target)
    left = _in_circles_or_behind(users)
    if not left:
        return []
    import networkx  # slow to import, and hardly ever needed

    quotient = networkx.DiGraph((one, user) for one in left for user in users[one] if user in left)
    parts = [part for part in networkx.strongly_connected_components(quotient) if len(part) > 1]
    return [[one for one in part if isinstance(one, int)] for part in parts]


def _where_interleaved(matches: Iterable[Sequence[Node]]) -> Iterator[Node]:
    """The nodes of all stretches in which one match begins before another ends; only these can contain a cycle.

    Each match has its nodes in program order.
    """
    stretches: list[tuple[Node, Node, int]] = []
    for one in sorted(matches, key=lambda nodes: nodes[0]):
        if stretches and one[0] < stretches[-1][1]:
            first, last, count = stretches.pop()
            stretches.append((first, max(last, one[-1]), count + 1))
        else:
            stretches.append((one[0], one[-1], 1))
    for node, last, count in stretches:
        while count > 1:
            yield node
            if node is last:
                break
            node = node.next


def _in_circles_or_behind(users: Mapping[Known, Iterable[Known]]) -> set[Known]:
    """The nodes in cycles, and all nodes that depend on them: no order puts them behind their operands."""
    waiting = dict.fromkeys(users, 0)
    for one in users:
        for user in users[one]:
            waiting[user] += 1
    ready = [one for one, count in waiting.items() if not count]
    for one in ready:
        for user in users[one]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    return waiting.keys() - set(ready)
