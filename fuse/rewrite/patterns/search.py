"""Find the places where a form may match: operators first; everything else is compared exactly afterwards.

    form    relu <- add <- convolution            anchor: the step of the form with the fewest candidates
                        <- skip
    graph   conv_3 -> view -> add_7 -> relu_2     from the anchor to its operands, then to the readers

Views and casts are skipped. Operands of commutative operators are tried in both orders. The work for one candidate is
bounded by the form, whatever the size of the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch.fx import Node

from fuse.rewrite.patterns.forms import Form, InputKey
from fuse.rewrite.patterns.index import GraphIndex, Pairs, Source, Step
from fuse.rewrite.patterns.terms import KNOWN, LEAF, NUMBER, Term

MAX_TRIES = 5000
"""The most placements tried for one candidate."""


class Placement(NamedTuple):
    """The graph's steps for a form's steps, and the nodes that each input may be (views of one another).

    ``again``: nodes that compute a step's value a second time.
    """

    steps: Mapping[Term, Step]
    inputs: Mapping[InputKey, tuple[Node, ...]]
    again: frozenset[Node] = frozenset()


def anchor(form: Form, index: GraphIndex) -> tuple[Term, Sequence[Step]]:
    """The step of ``form`` with the fewest candidates, and these; of several, the one nearest to the results."""
    rarest = index.rarest(form.operand_filters.values())
    assert rarest is not None  # a form has a step
    term = next(term for term, one in form.operand_filters.items() if one == rarest)
    return term, index.steps_like(rarest)


def nearest_anchor(form: Form, index: GraphIndex) -> tuple[Term, Sequence[Step]]:
    """:func:`anchor` for a form that need not match completely: by operator names alone, among those in the graph."""
    count = {term: index.count(term.name) for term in form.steps}
    term = min(form.steps, key=lambda term: (not count[term], count[term]))
    return term, [*index.steps(term.name)]


class Search:
    """Places one form in one graph, by backtracking; ``steps`` and ``inputs`` are placed so far."""

    def __init__(self, form: Form, index: GraphIndex) -> None:
        self.form = form
        self.index = index
        self.tries = 0
        self.steps: dict[Term, Step] = {}
        self.inputs: dict[InputKey, tuple[Node, ...]] = {}
        self.again: list[frozenset[Node]] = []

    def placements(self, term: Term, step: Step) -> Iterator[Placement]:
        """All placements of the form with ``term`` at ``step``."""
        for _ in self._place(term, step) if alike(term, step.term) else ():
            yield from self._complete()

    def _place(self, term: Term, step: Step) -> Iterator[None]:
        """Place ``term`` at ``step``, and the operands above it."""
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
        """Place the operands of a step of ``owner``, from the pair number ``first`` on."""
        before = []
        for number in range(first, len(pairs)):
            wanted, found = pairs[number]
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
                        yield from self._place_operands(pairs, number + 1, owner)
                break
        else:
            yield
        for key, nodes_before in reversed(before):
            if nodes_before is None:
                del self.inputs[key]
            else:
                self.inputs[key] = nodes_before

    def _complete(self) -> Iterator[Placement]:
        """Place the steps that are not above the anchor: readers of placed steps."""
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
    """A step that is not placed and reads something placed, and what it reads; readers of steps come first."""
    for placed in (placement.steps, placement.inputs):
        for term, key, steps in form.read:
            if key in placed:
                for step in steps:
                    if step not in placement.steps and step not in without:
                        return step, term
    return None


def readers(index: GraphIndex, placement: Placement, term: Term) -> Iterator[Step]:
    """The graph's steps that read the place of ``term``."""
    if term.name != LEAF:
        return index.readers(placement.steps[term])
    return (step for node in placement.inputs[term.value] for step in index.readers_of(node))


def bound(inputs: Mapping[InputKey, tuple[Node, ...]], key: InputKey, source: Source) -> tuple[Node, ...]:
    """The nodes that the input ``key`` may be if it is read from ``source``, too; none if it cannot be."""
    known = inputs.get(key)
    return source.nodes if known is None else tuple(node for node in known if node in source.nodes)


def alike(term: Term, other: Term) -> bool:
    """Whether two steps have the same operator and equally many operands."""
    return term.name == other.name and len(term.operands) == len(other.operands)
