"""Explain why a placed form does not match: run only if the reason is to be reported.

    pattern   cat(exp(x), exp(y), dim=1)        graph   cat(exp(x), exp(y), dim=0)
    2 of 3 operators match;  "`cat` has dim 0, the pattern wants 1"

The terms of both are made again, in a table of this place alone, so that terms know their nodes.
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
    """A form that matches except for ``differences``; ``matched`` of its ``total`` operators match."""

    matched: int
    total: int
    differences: tuple[Difference, ...]
    drawing: Drawing = field(repr=False)


def best_attempt(form: Form, attempts: Sequence[Attempt], index: GraphIndex) -> PartialMatch:
    """The best partial match among ``attempts`` at one placement."""
    if not attempts:
        return _nothing(form, "the graph has no value for a constant of the pattern")
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
    return PartialMatch(sum(term in same for term in operators), len(operators), tuple(reasons), drawing)


def _first_like(wanted: Term, found: Sequence[Term]) -> Term | None:
    """The first term that may be the result; an operator with several results is none."""
    alike = (term for term in found if isinstance(term.type, tuple) == isinstance(wanted.type, tuple))
    return min(alike, key=lambda term: term.serial, default=None)


def _nothing(form: Form, reason: str) -> PartialMatch:
    return PartialMatch(0, len(form.operators), (Difference(reason),), Drawing(form.results, {}, {}))


def _drawn(
    traced: Traced, known: Mapping[Node, Term], found: Sequence[Term], inputs: Mapping[InputKey, Bound]
) -> Drawing:
    """The pattern's nodes whose terms the graph has, too, with the graph's nodes."""
    have = set(below(*found))
    nodes = {node: term.origin for node, term in known.items() if term in have and isinstance(term.origin, Node)}
    return Drawing(traced.outputs, nodes, {key: given.node for key, given in inputs.items()})
