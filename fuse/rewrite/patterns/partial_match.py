"""The best partial match of a form: the operators that match, and the first differences.

    form    relu <- add <- convolution      graph    relu <- sub <- convolution
    relu matches;  "`sub` where the pattern has `add`";  operators above the difference are not compared

Reports use it for candidates that match only in part. Where there are several ways to go on, the best one is followed,
and the others are not tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Node

from fuse.rewrite.patterns.differences import Difference, called, other_factors, other_names, other_operator
from fuse.rewrite.patterns.exact_match import Drawing
from fuse.rewrite.patterns.forms import Form, InputKey
from fuse.rewrite.patterns.index import GraphIndex, Pairs, Source, Step
from fuse.rewrite.patterns.mismatch import PartialMatch
from fuse.rewrite.patterns.search import Placement, alike, bound, next_step, readers
from fuse.rewrite.patterns.terms import KNOWN, LEAF, NUMBER, Term

DEPTH = 3
"""The number of operators ahead that decide between two ways."""

FITS = 4
"""The score of a matching operator; an input, which may be anything, scores less."""

TWO_VALUES = "another parameter for the second"
TOO_MANY_WAYS = "it may match here in more ways than are tried"


def partial_match_at(form: Form, index: GraphIndex, term: Term, step: Step) -> PartialMatch:
    """The partial match of ``form`` with its ``term`` placed at ``step``."""
    walk = _Placing(form, index)
    walk.place(term, step)
    walk.go_on()
    right = {operator for operator, steps in form.operators.items() if walk.is_right(steps)}
    nodes = {term.origin: step.node for term, step in walk.steps.items() if term.origin in right}
    drawing = Drawing(form.results, nodes, {key: nodes[0] for key, nodes in walk.inputs.items()})
    found = tuple(walk.differences) or (Difference(TOO_MANY_WAYS, node=step.node),)
    return PartialMatch(len(right), len(form.operators), found, drawing)


class _Placing:
    """Places matching operators, and notes differences."""

    def __init__(self, form: Form, index: GraphIndex) -> None:
        self.form = form
        self.index = index
        self.steps: dict[Term, Step] = {}
        self.inputs: dict[InputKey, tuple[Node, ...]] = {}
        self.wrong: set[Term] = set()
        self.differences: list[Difference] = []

    def is_right(self, steps: Sequence[Term]) -> bool:
        return all(term in self.steps and term not in self.wrong for term in steps)

    def place(self, term: Term, step: Step) -> None:
        known = self.steps.get(term)
        if term in self.wrong or (known is not None and self.index.duplicates(known, step) is not None):
            return
        if known is not None:
            self._differ(term, step, f"`{term.name}` is one value in the pattern, and two here", TWO_VALUES)
        elif not alike(term, step.term):
            self.differences.append(other_operator(term, replace(step.term, origin=step.node)))
            self.wrong.add(term)
        else:
            self.steps[term] = step
            ways = self.index.pairings(term, step.term)
            pairs = ways[0] if len(ways) == 1 else max(ways, key=lambda pairs: self._score_of(pairs, step, DEPTH))
            for wanted, found in pairs:
                self._place_operand(wanted, self.index.source(found, step.node), term, step)

    def _place_operand(self, wanted: Term, source: Source, reader: Term, at: Step) -> None:
        if wanted.name in KNOWN or (source.number and not source.nodes):
            if wanted.name not in KNOWN:
                reason = f"`{called(at.node)}` takes a number, where the pattern has a tensor"
                self._differ(reader, at, reason, "fuse.const(...) for the number")
            elif not source.number and (wanted.name == NUMBER or source.step is not None):
                reason = f"`{called(at.node)}` takes a tensor, where the pattern has a number"
                self._differ(reader, at, reason, "a parameter for the tensor")
        elif wanted.name == LEAF:
            self._bind(wanted.value, source, reader, at)
        elif source.step is None:
            reason = f"a given value where the pattern has `{called(wanted.origin)}`"
            self._differ(wanted, at, reason, "a parameter for the value, or fuse.optional(...)")
        else:
            self.place(wanted, source.step)

    def _bind(self, key: InputKey, source: Source, reader: Term, at: Step) -> None:
        """Bind the pattern's input ``key``, read by ``reader``, to the operand of ``at``."""
        if nodes := bound(self.inputs, key, source):
            self.inputs[key] = nodes
        elif not source.nodes:
            factors = other_factors(at.node, source.step.term) if source.step else None
            self._differ(reader, at, *(factors or other_names(called(reader.origin), called(at.node))))
        elif any(map(self.index.is_write, (*source.nodes, *self.inputs[key]))):
            self._differ(reader, at, f"`{key[0]}` is written between its uses here", written=True)
        else:
            self._differ(reader, at, f"`{key[0]}` is one value in the pattern, and two here", TWO_VALUES)

    def go_on(self) -> None:
        """Place the readers of placed steps."""
        while found := next_step(self.form, Placement(self.steps, self.inputs), self.wrong):
            term, read = found
            candidates = list(readers(self.index, Placement(self.steps, self.inputs), read))
            if candidates:
                alone = len(candidates) == 1
                self.place(
                    term, candidates[0] if alone else max(candidates, key=lambda step: self._score(term, step, DEPTH))
                )
            else:
                name = called(term.origin)
                reason = f"no `{name}` follows here, as it does in the pattern"
                self._differ(term, self.steps.get(read), reason, f"fuse.optional(...) for `{name}`")

    def _score(self, term: Term, step: Step, depth: int) -> int:
        """How well ``term`` matches at ``step``, including ``depth`` operators above."""
        if not alike(term, step.term) or term in self.steps or term in self.wrong:
            return FITS if self.steps.get(term) == step else 1
        if not depth:
            return FITS
        return FITS + max(self._score_of(pairs, step, depth - 1) for pairs in self.index.pairings(term, step.term))

    def _score_of(self, pairs: Pairs, step: Step, depth: int) -> int:
        score = 0
        for wanted, found in pairs:
            source = self.index.source(found, step.node)
            if wanted.name == LEAF:
                score += (2 + (source.step is None)) * bool(bound(self.inputs, wanted.value, source))
            elif wanted.name in KNOWN or source.number:
                score += FITS * (wanted.name in KNOWN and source.number)
            elif source.step is not None:
                score += self._score(wanted, source.step, depth)
        return score

    def _differ(self, term: Term, at: Step | None, reason: str, change: str = "", written: bool = False) -> None:
        self.differences.append(Difference(reason, change, term.origin, at.node if at else None, written))
        self.wrong.add(term)
