"""Find where a form could lie in a graph: operators first, everything else is compared exactly afterwards.

    form    relu <- add <- convolution            anchor: the step of the form that may lie at the fewest places
                        <- skip
    graph   conv_3 -> view -> add_7 -> relu_2     from the anchor to its operands, then to what reads them

Views and casts are looked through, and the operands of commutative operators are tried in both orders. The work for one
candidate is bounded by the form, whatever the size of the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch.fx import Node

from fuse.rewrite.patterns.forms import Form, InputKey
from fuse.rewrite.patterns.index import GraphIndex, Pairs, Source, Step
from fuse.rewrite.patterns.terms import KNOWN, LEAF, NUMBER, Term

MAX_TRIES = 5000
"""Placements tried for one candidate before giving up."""


class Placement(NamedTuple):
    """Where a form's steps lie in the graph, and which nodes each of its inputs may be (views of one another).

    ``again`` are nodes that compute a value of a step once more.
    """

    steps: Mapping[Term, Step]
    inputs: Mapping[InputKey, tuple[Node, ...]]
    again: frozenset[Node] = frozenset()


def anchor(form: Form, index: GraphIndex) -> tuple[Term, Sequence[Step]]:
    """The step of ``form`` that may lie at the fewest places, and those; of several, the one nearest to the results."""
    rarest = index.rarest(form.operand_filters.values())
    assert rarest is not None  # a form has a step
    return next(
        term for term, operand_filter in form.operand_filters.items() if operand_filter == rarest
    ), index.steps_like(rarest)


def nearest_anchor(form: Form, index: GraphIndex) -> tuple[Term, Sequence[Step]]:
    """The same of a form that need not lie there: by names alone, of operators that the graph has if it has any."""
    count = {term: index.count(term.name) for term in form.steps}
    term = min(form.steps, key=lambda term: (not count[term], count[term]))
    return term, [*index.steps(term.name)]


class Search:
    """Places one form in one graph; ``steps`` and ``inputs`` are what is placed so far, taken back on the way back."""

    def __init__(self, form: Form, index: GraphIndex) -> None:
        self.form = form
        self.index = index
        self.tries = 0
        self.steps: dict[Term, Step] = {}
        self.inputs: dict[InputKey, tuple[Node, ...]] = {}
        self.again: list[frozenset[Node]] = []

    def placements(self, term: Term, step: Step) -> Iterator[Placement]:
        """Every way to place the whole form such that ``term`` lies at ``step``."""
        for _ in self._place(term, step) if alike(term, step.term) else ():
            yield from self._complete()

    def _place(self, term: Term, step: Step) -> Iterator[None]:
        """Place ``term`` at ``step``, which is alike, and its operands above it."""
        self.tries += 1
        if term in self.steps:
            nodes = self.index.duplicates(self.steps[term], step)
            if nodes is not None:
                self.again.append(nodes)
                yield
                self.again.pop()
            return
        if self.tries > MAX_TRIES:
            return
        self.steps[term] = step
        for pairs in self.index.pairings(term, step.term):
            yield from self._place_operands(pairs, 0, step.node)
        del self.steps[term]

    def _place_operands(self, pairs: Pairs, first: int, owner: Node) -> Iterator[None]:
        """Place what operands of a step of ``owner`` read, from the pair ``first`` on."""
        before = []
        for place in range(first, len(pairs)):
            wanted, found = pairs[place]
            source = self.index.source(found, owner)
            if wanted.name in KNOWN:
                if not source.number and (wanted.name == NUMBER or source.steps):
                    break
            elif wanted.name == LEAF:
                key = wanted.value
                if not (nodes := bound(self.inputs, key, source)):
                    break
                before.append((key, self.inputs.get(key)))
                self.inputs[key] = nodes
            else:
                for step in source.steps:
                    for _ in self._place(wanted, step) if alike(wanted, step.term) else ():
                        yield from self._place_operands(pairs, place + 1, owner)
                break
        else:
            yield
        for key, nodes_before in reversed(before):
            if nodes_before is None:
                del self.inputs[key]
            else:
                self.inputs[key] = nodes_before

    def _complete(self) -> Iterator[Placement]:
        """Place what does not lie above the anchor: the steps that read what is placed."""
        placed = Placement(self.steps, self.inputs)
        found = next_step(self.form, placed)
        if found is None:
            yield Placement(dict(self.steps), dict(self.inputs), frozenset().union(*self.again))
            return
        term, read = found
        for step in readers(self.index, placed, read):
            for _ in self._place(term, step) if alike(term, step.term) else ():
                yield from self._complete()


def next_step(form: Form, placement: Placement, without: Collection[Term] = ()) -> tuple[Term, Term] | None:
    """A step that is not placed and reads something that is, and what it reads; steps are preferred to inputs."""
    for placed in (placement.steps, placement.inputs):
        for term, key, steps in form.read:
            if key in placed:
                for step in steps:
                    if step not in placement.steps and step not in without:
                        return step, term
    return None


def readers(index: GraphIndex, placement: Placement, term: Term) -> Iterator[Step]:
    """The steps of the graph that read what ``term`` is placed at."""
    if term.name != LEAF:
        return index.readers(placement.steps[term])
    return (step for node in placement.inputs[term.value] for step in index.readers_of(node))


def bound(inputs: Mapping[InputKey, tuple[Node, ...]], key: InputKey, source: Source) -> tuple[Node, ...]:
    """The nodes that the input ``key`` may be, given that it is read from ``source`` here; none where it cannot be."""
    known = inputs.get(key)
    return source.nodes if known is None else tuple(node for node in known if node in source.nodes)


def alike(term: Term, other: Term) -> bool:
    """Whether two steps are of one operator with equally many operands."""
    return term.name == other.name and len(term.operands) == len(other.operands)
