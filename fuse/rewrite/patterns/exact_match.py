"""Compare a form exactly with the place in the graph where the search put it: the pattern is run with the shapes there.

    placement    x -> relu_3 (f32[4, 16]), weight -> w (f32[8, 16])
    pattern      traced with those    ->    term over leaves relu_3 and w
    graph        cut at those nodes   ->    term over leaves relu_3 and w        one term: it matches

The same rules make the terms of both, in one table, so that equal terms are identical.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from fuse.rewrite import regions
from fuse.rewrite.patterns import views
from fuse.rewrite.patterns.calls import Table
from fuse.rewrite.patterns.forms import Form, InputKey
from fuse.rewrite.patterns.index import GraphIndex
from fuse.rewrite.patterns.language import ManySpec
from fuse.rewrite.patterns.search import Placement
from fuse.rewrite.patterns.terms import LEAF, TensorType, Term, Terms, type_of
from fuse.rewrite.patterns.tracing import LARGEST_CONSTANT, Traced, terms_of
from fuse.rewrite.surgery import constant_key

MAX_BINDINGS = 16
"""The most choices of inputs tried for a placement, beyond the likely ones: each is compared term by term."""
MAX_MORE_VIEWS = 4
"""Distances tried first: as many views before the match as in the pattern, one more, and so on."""
MAX_VIEWS = 16
"""The most views of a result that are tried in its place."""
_UNREAD = torch.empty(1, device="meta")


class Bound(NamedTuple):
    """The value of an input: a node, with its dimensions permuted if there are ``dims``."""

    node: Node
    dims: tuple[int, ...] | None = None

    def value(self) -> Tensor:
        value: Tensor = self.node.meta["val"]
        return value if self.dims is None else value.permute(self.dims)


@dataclass(frozen=True)
class FoundResult:
    """One result of the pattern. ``node`` holds it; ``reshaped``: in another shape. An input may be a result."""

    node: Node
    reshaped: bool
    is_input: bool


@dataclass(frozen=True)
class Drawing:
    """The pattern as it was run, and the graph's nodes for those of its operators that were found.

    ``roots``: the pattern's results. ``nodes``: pattern node -> graph node.
    """

    roots: tuple[Node, ...]
    nodes: Mapping[Node, Node]
    inputs: Mapping[InputKey, Node]


@dataclass(frozen=True)
class FoundMatch:
    """A match of a form: the values of its inputs, its results, and all nodes in between (``inside``)."""

    form: Form
    inputs: Mapping[InputKey, Bound]
    constants: Mapping[str, Any]
    outputs: tuple[FoundResult, ...]
    inside: tuple[Node, ...]
    placement: Placement = field(repr=False)
    setting: TermSetting = field(repr=False)

    @cached_property
    def members(self) -> tuple[Node, ...]:
        """The nodes in between that compute something, in program order."""
        return tuple(node for node in self.inside if _does_something(node))

    @property
    def drawing(self) -> Drawing:
        """The pattern with the graph's nodes."""
        nodes = {term.origin: step.node for term, step in self.placement.steps.items()}
        return Drawing(self.form.results, nodes, {key: given.node for key, given in self.inputs.items()})


def _does_something(node: Node) -> bool:
    is_part = node.target is operator.getitem
    return not is_part and regions.owner(node) is node and not regions.is_constructor(node)


@dataclass(frozen=True)
class Attempt:
    """A failed comparison: the ``setting`` for these ``inputs``, or the error of the pattern on them."""

    form: Form
    placement: Placement
    inputs: Mapping[InputKey, Bound]
    setting: TermSetting | str


def compare(form: Form, placement: Placement, index: GraphIndex) -> FoundMatch | tuple[Attempt, ...]:
    """The match of ``form`` at ``placement``, or the failed attempts, one for each choice of the inputs' nodes.

    There are no attempts if the graph's value for a constant of the pattern is not possible.
    """
    try:
        constants = {name: slot.read(placement.steps[slot.term].term) for name, slot in form.slots.items()}
    except (LookupError, TypeError, ZeroDivisionError):
        return ()
    reshaped: FoundMatch | None = None
    attempts = []
    for inputs in _bindings(form, placement):
        answer = _compare(form, placement, inputs, constants, index)
        if isinstance(answer, Attempt):
            attempts.append(answer)
        elif not any(output.reshaped for output in answer.outputs):
            return answer
        else:
            reshaped = reshaped or answer
    return reshaped or tuple(attempts)


def _bindings(form: Form, placement: Placement) -> Iterator[dict[InputKey, Bound]]:
    """The choices of a node for each input, the likeliest first: as many views away as in the form, or some more."""
    plain = {key: [Bound(node) for node in nodes] for key, nodes in placement.inputs.items()}
    likely = {key: len(form.views_above(key)) for key in plain}
    first = {key: given[min(likely[key], len(given) - 1)] for key, given in plain.items()}
    yield first
    turned = {key: _turned(form, key, nodes) or plain[key] for key, nodes in placement.inputs.items()}
    seen = {tuple(first.values())}
    for more in range(MAX_MORE_VIEWS):
        for choices, start in ((plain, likely), (turned, dict.fromkeys(plain, 0))):
            chosen = {key: given[min(start[key] + more, len(given) - 1)] for key, given in choices.items()}
            if (marks := tuple(chosen.values())) not in seen:
                seen.add(marks)
                yield chosen
    positions = itertools.product(*(range(len(given)) for given in plain.values()))
    by_likelihood = sorted(
        itertools.islice(positions, MAX_BINDINGS**2),
        key=lambda chosen: sum(abs(i - want) for i, want in zip(chosen, likely.values(), strict=True)),
    )
    for chosen_positions in by_likelihood[:MAX_BINDINGS]:
        chosen = {key: given[i] for (key, given), i in zip(plain.items(), chosen_positions, strict=True)}
        if tuple(chosen.values()) not in seen:
            yield chosen


def _turned(form: Form, key: InputKey, nodes: Sequence[Node]) -> list[Bound]:
    """The nodes of an input with the form's first permutation undone, as the graph may have permuted before."""
    turn = next((term for term in form.views_above(key) if term.name == "permute"), None)
    if turn is None:
        return []
    dims: tuple[int, ...] = dict(turn.constants)["dims"]
    back = [dims.index(dim) for dim in range(len(dims))]
    found = []
    for node in nodes:
        lead = node.meta["val"].dim() - len(dims)
        if lead >= 0:
            found.append(Bound(node, (*range(lead), *(lead + dim for dim in back))))
    return found


@dataclass(frozen=True)
class TermSetting:
    """The pattern as it was run for inputs of certain layouts, as terms of a table; shared by all places like this.

    ``arguments``: tensors like the inputs; None for those that are not read. ``leaves``: the inputs' leaves by key;
    inputs with the same node share one.
    """

    form: Form
    arguments: Sequence[Any]
    constants: Mapping[str, Any]
    table: Table
    traced: Traced
    leaves: Mapping[InputKey, Term]
    outputs: tuple[Term, ...]

    @cached_property
    def replaced(self) -> Traced | str:
        """The pattern's replacement, run for such inputs, or its error."""
        return self.form.replaced(self.arguments, self.constants)


def _compare(
    form: Form, placement: Placement, inputs: Mapping[InputKey, Bound], constants: Mapping[str, Any], index: GraphIndex
) -> FoundMatch | Attempt:
    wanted = _wanted(form, inputs, constants, index)
    if isinstance(wanted, str):
        return Attempt(form, placement, inputs, wanted)
    cut = CutTerms(wanted.table, index, placement, {given.node: wanted.leaves[key] for key, given in inputs.items()})
    outputs = [
        output_of(cut, want, holders(root, placement, inputs, index))
        for want, root in zip(wanted.outputs, form.roots, strict=True)
    ]
    results = tuple(output for output in outputs if output is not None)
    if len(results) < len(outputs):
        return Attempt(form, placement, inputs, wanted)
    inside = cut.inside(output.node for output in results)
    return FoundMatch(form, inputs, constants, results, inside, placement, wanted)


def _wanted(
    form: Form, inputs: Mapping[InputKey, Bound], constants: Mapping[str, Any], index: GraphIndex
) -> TermSetting | str:
    """The pattern run on these inputs, or its error; run once for inputs of the same layouts."""
    numbers: dict[Node, int] = {}
    layouts = [
        (key, given.dims, numbers.setdefault(given.node, len(numbers)), index.calls.layout(given.node))
        for key, given in inputs.items()
    ]

    def run(table: Table) -> TermSetting | str:
        traced = form.traced(_arguments(form, inputs, _UNREAD), constants)
        if isinstance(traced, str):
            return traced
        leaves = {}
        for key, _, number, _ in layouts:
            tensor_type = index.calls.type_of(inputs[key].node)
            leaves[key] = table.terms.leaf((number, tensor_type), tensor_type)
        known = wanted_terms(traced, form.keys, inputs, leaves, table.terms)
        return TermSetting(
            form,
            _arguments(form, inputs, None),
            constants,
            table,
            traced,
            leaves,
            tuple(known[node] for node in traced.outputs),
        )

    return index.table((form, constant_key(dict(constants)), tuple(layouts)), run)


def wanted_terms(
    traced: Traced,
    keys: Sequence[InputKey],
    inputs: Mapping[InputKey, Bound],
    leaves: Mapping[InputKey, Term],
    terms: Terms,
) -> dict[Node, Term]:
    """The terms of the pattern as it was run, over the inputs' leaves, permuted like the inputs."""
    given = []
    for key in keys:
        dims = inputs[key].dims if key in inputs else None
        leaf = leaves[key] if key in inputs else terms.leaf(key, type_of(_UNREAD))
        given.append(leaf if dims is None else views.permute(terms, leaf, dims))
    return terms_of(traced, terms, given)


def _arguments(form: Form, inputs: Mapping[InputKey, Bound], unread: Tensor | None) -> list[Any]:
    """The arguments to run the pattern with; ``unread`` replaces inputs that it does not read."""
    values = {key: inputs[key].value() if key in inputs else unread for key in form.keys}
    return [
        [value for key, value in values.items() if key[0] == one.name]
        if isinstance(one.spec, ManySpec)
        else values[one.name, 0]
        for one in form.pattern.parameters
    ]


def holders(root: Term, placement: Placement, inputs: Mapping[InputKey, Bound], index: GraphIndex) -> Iterator[Node]:
    """The nodes that may hold a result: that of its last step, then the views of it."""
    step = views.stripped(root)
    if step.name == LEAF:
        start = inputs[step.value].node
    else:
        place = placement.steps[step]
        if place not in index.last_steps(place.node):
            return
        start = place.node
    nodes = [start]
    for node in nodes:
        yield node
        if len(nodes) < MAX_VIEWS:
            views_of = (user for user in node.users if index.own(user) is not None and not index.last_steps(user))
            nodes += itertools.islice(views_of, MAX_VIEWS)


def output_of(cut: CutTerms, wanted: Term, nodes: Iterable[Node]) -> FoundResult | None:
    """The node that holds ``wanted``, if necessary in another shape; None if there is none."""
    held = []
    for node in nodes:
        term = cut.term(node)
        if term is wanted:
            return FoundResult(node, False, node in cut.leaves)
        held.append((node, term))
    like = [(node, term) for node, term in held if _same_count(wanted, term)]
    for node, term in sorted(
        like, key=lambda one: not one[0].meta["val"].is_contiguous()
    ):  # contiguous first: every copy can have its strides
        if views.reshape(cut.table.terms, wanted, term.shape) is term:
            return FoundResult(node, True, node in cut.leaves)
    return None


def _same_count(one: Term, other: Term) -> bool:
    single = isinstance(one.type, TensorType) and isinstance(other.type, TensorType)
    return single and torch.Size(one.shape).numel() == torch.Size(other.shape).numel()


class CutTerms:
    """The terms of nodes over ``leaves``, the terms of the nodes at which the graph is cut."""

    def __init__(self, table: Table, index: GraphIndex, placement: Placement, leaves: Mapping[Node, Term]) -> None:
        self.table = table
        self.index = index
        self.placed = placement.again.union(step.node for step in placement.steps.values())
        self.leaves = leaves
        self.known: dict[Node, Term] = dict(leaves)
        self.strangers = 0

    def term(self, node: Node) -> Term:
        known = self.known.get(node)
        if known is None:
            made = self.table.term(node, self.term) if self._is_inside(node) else self._stranger(node)
            known = self.known[node] = made
        return known

    def _stranger(self, node: Node) -> Term:
        """The term of a value that does not depend on inputs alone: a constant, or a new leaf."""
        value = self.index.constants.get(node)
        if value is not None and value.nbytes <= LARGEST_CONSTANT:
            return self.table.terms.constant(value, self.index.calls.type_of(node))
        self.strangers += 1
        tensor_type = self.index.calls.type_of(node)
        return self.table.terms.leaf(("stranger", self.strangers, tensor_type), tensor_type)

    def _is_inside(self, node: Node) -> bool:
        if node in self.leaves or self.index.own(node) is None:
            return False
        if node in self.placed or not self.index.last_steps(node):
            return True
        return self.index.negation(node) is not None  # two negations cancel, and are no step

    def inside(self, outputs: Iterator[Node]) -> tuple[Node, ...]:
        """The nodes between the leaves and ``outputs``, in program order."""
        found: set[Node] = set()
        stack = list(outputs)
        while stack:
            node = stack.pop()
            if node not in found and self._is_inside(node):
                found.add(node)
                own = self.index.own(node)
                assert own is not None  # because it is inside
                stack.extend(own.operands)
        return tuple(sorted(found))
