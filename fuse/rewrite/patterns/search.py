"""Find where a form could lie in a graph: operators first, everything else is compared exactly afterwards.

    form    relu <- add <- convolution            anchor: the operator of the form that the graph has fewest of
                        <- skip
    graph   conv_3 -> view -> add_7 -> relu_2     from the anchor to its operands, then to what reads them

Views and casts are looked through, and the operands of commutative operators are tried in both orders. The work for one
candidate is bounded by the form, whatever the size of the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch.fx import Node

from fuse.rewrite.patterns.forms import Form, InputKey
from fuse.rewrite.patterns.index import GraphIndex, Pairs, Source, Step
from fuse.rewrite.patterns.terms import LEAF, NUMBER, Term

MAX_TRIES = 5000
"""Placements tried for one candidate before giving up."""


class Placement(NamedTuple):
    """Where a form's steps lie in the graph, and which nodes each of its inputs may be (views of one another)."""

    steps: Mapping[Term, Step] = MappingProxyType({})
    inputs: Mapping[InputKey, tuple[Node, ...]] = MappingProxyType({})


def anchor(form: Form, index: GraphIndex, *, present: bool = False) -> Term:
    """The step of ``form`` whose operator the graph has fewest of; of several, the one nearest to the results.

    ``present`` leaves out operators that the graph has none of, unless it has none of any.
    """
    count = {term: index.count(term.name) for term in form.steps}
    return min(form.steps, key=lambda term: (present and not count[term], count[term]))


class Search:
    """Places one form in one graph."""

    def __init__(self, form: Form, index: GraphIndex) -> None:
        self.form = form
        self.index = index
        self.tries = 0

    def placements(self, term: Term, step: Step) -> Iterator[Placement]:
        """Every way to place the whole form such that ``term`` lies at ``step``."""
        self.tries = 0
        for placement in self._place(term, step, Placement()) if alike(term, step.term) else ():
            yield from self._complete(placement)

    def _place(self, term: Term, step: Step, placement: Placement) -> Iterator[Placement]:
        """Place ``term`` at ``step``, which is alike, and its operands above it."""
        self.tries += 1
        if term in placement.steps:
            if placement.steps[term] == step:
                yield placement
            return
        if self.tries > MAX_TRIES:
            return
        placed = Placement({**placement.steps, term: step}, placement.inputs)
        for pairs in self.index.pairings(term, step.term):
            yield from self._place_operands(pairs, step.node, placed)

    def _place_operands(self, pairs: Pairs, owner: Node, placement: Placement) -> Iterator[Placement]:
        for place, (wanted, found) in enumerate(pairs):
            source = self.index.source(found, owner)
            if wanted.name == NUMBER or source.number:
                if wanted.name != NUMBER or not source.number:
                    return
            elif wanted.name == LEAF:
                if not (nodes := bound(placement.inputs, wanted.value, source)):
                    return
                placement = Placement(placement.steps, {**placement.inputs, wanted.value: nodes})
            elif source.step is None or not alike(wanted, source.step.term):
                return
            else:
                for placed in self._place(wanted, source.step, placement):
                    yield from self._place_operands(pairs[place + 1 :], owner, placed)
                return
        yield placement

    def _complete(self, placement: Placement) -> Iterator[Placement]:
        """Place what does not lie above the anchor: the steps that read what is placed."""
        found = next_step(self.form, placement)
        if found is None:
            yield placement
            return
        term, read = found
        for step in readers(self.index, placement, read):
            for placed in self._place(term, step, placement) if alike(term, step.term) else ():
                yield from self._complete(placed)


def next_step(form: Form, placement: Placement, without: Collection[Term] = ()) -> tuple[Term, Term] | None:
    """A step that is not placed and reads something that is, and what it reads; steps are preferred to inputs."""
    if len(placement.steps) == len(form.steps):
        return None
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
