"""Why a form that was placed in a graph is not what the graph has there: asked only where that is to be told.

    pattern   cat(exp(x), exp(y), dim=1)        graph   cat(exp(x), exp(y), dim=0)
    2 of 3 operators are there as they are;  "`cat` has dim 0, the pattern wants 1"

The terms of both are made once more, in a table of this place alone: those know the nodes that they were made for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from fuse.rewrite.patterns.calls import Table
from fuse.rewrite.patterns.differences import Difference, common, differences
from fuse.rewrite.patterns.exact_match import Attempt, Bound, CutTerms, Drawing, holders, output_of, wanted_terms
from fuse.rewrite.patterns.forms import Form, InputKey
from fuse.rewrite.patterns.index import GraphIndex
from fuse.rewrite.patterns.terms import Term, below
from fuse.rewrite.patterns.tracing import Traced


@dataclass(frozen=True)
class PartialMatch:
    """A form that lies in the graph but for ``differences``: ``matched`` of its ``total`` operators are as it wants."""

    form: Form
    matched: int
    total: int
    differences: tuple[Difference, ...]
    drawing: Drawing = field(repr=False)


def best_attempt(form: Form, attempts: Sequence[Attempt], index: GraphIndex) -> PartialMatch:
    """What came of the best of ``attempts`` to find ``form`` at one placement."""
    if not attempts:
        return _nothing(form, "a constant of the pattern is none in the graph")
    return max((_near(attempt, index) for attempt in attempts), key=lambda near: near.matched)


def _near(attempt: Attempt, index: GraphIndex) -> PartialMatch:
    form, inputs, setting = attempt.form, attempt.inputs, attempt.setting
    if isinstance(setting, str):
        return _nothing(form, f"the pattern does not run on these tensors: {setting}")
    traced = setting.traced
    held = [[*holders(root, attempt.placement, inputs, index)] for root in form.roots]
    table = Table(index.calls)
    leaves = {given.node: table.terms.leaf(given.node, index.calls.type_of(given.node)) for given in inputs.values()}
    cut = CutTerms(table, index, attempt.placement, leaves)
    found = [[cut.term(node) for node in nodes] for nodes in held]
    known = wanted_terms(
        traced, form.keys, inputs, {key: leaves[given.node] for key, given in inputs.items()}, table.terms
    )
    wanted = [known[node] for node in traced.outputs]
    outputs = [output_of(cut, want, nodes) for want, nodes in zip(wanted, held, strict=True)]
    have = [_first_like(want, values) for want, values in zip(wanted, found, strict=True)]
    pairs = [(want, term) for want, term, done in zip(wanted, have, outputs, strict=True) if term and done is None]
    reasons = [one for want, term in pairs for one in differences(want, term)]
    same = common(wanted, [term for values in found for term in values])
    operators = [term for node, term in known.items() if node.op == "call_function" and term.computes]
    if not reasons:
        return _nothing(form, "a result of the pattern is inside of another operator")
    drawing = _drawn(traced, known, [term for values in found for term in values], inputs)
    return PartialMatch(form, sum(term in same for term in operators), len(operators), tuple(reasons), drawing)


def _first_like(wanted: Term, found: Sequence[Term]) -> Term | None:
    """The first of the terms that may hold a result: an operator with several results is not one of them."""
    alike = (term for term in found if isinstance(term.type, tuple) == isinstance(wanted.type, tuple))
    return min(alike, key=lambda term: term.serial, default=None)


def _nothing(form: Form, reason: str) -> PartialMatch:
    return PartialMatch(form, 0, len(form.operators), (Difference(reason),), Drawing(form.results, {}, {}))


def _drawn(
    traced: Traced, known: Mapping[Node, Term], found: Sequence[Term], inputs: Mapping[InputKey, Bound]
) -> Drawing:
    """The pattern's nodes of which the graph has the very terms, each with the node that has it."""
    have = set(below(*found))
    places = {node: term.origin for node, term in known.items() if term in have and isinstance(term.origin, Node)}
    return Drawing(traced.outputs, places, {key: given.node for key, given in inputs.items()})
