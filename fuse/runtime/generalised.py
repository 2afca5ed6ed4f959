"""Generalised graphs: one rewritten graph for all sizes between captured ones.

    x [50, 3, 64]   captured                        graph A of (50, 3)
    x [20, 5, 64]   captured                        graph A of (20, 5)
    x [61, 9, 64]   captured                        graph A of (61, 9)
    x [33, 2, 64]   captured                        graph A of (33, 2)
    x [37, 4, 64]   between them: not captured      graph A of (37, 4): its loop takes 37 steps, its view is [148, 64]

A call at new sizes gets the graph of others if all of these conditions hold:

- Graphs of at least ``FEWEST`` calls of this kind have the same text, and all their numbers are formulas in the sizes
  of the arguments.
- ``forward`` was run with symbolic sizes (:mod:`fuse.runtime.size_reads`) at three sizes
  (:mod:`fuse.runtime.probing_sizes`), and each recorded comparison has the same outcome for the new sizes.
- Each new size differs from captured ones by a multiple of the greatest common divisor of their differences: if all
  were even, nothing is known of odd ones. The captured sizes vary independently: if all batches have 48 tokens, a
  division by 48 could also be a division by the number of tokens.
- Each number of the new graph is between the least and the largest value that it had in captured graphs, and the order
  of any two numbers occurred in one of these graphs. So a comparison without a record (in a pass, in the decomposition
  of an operator) has an outcome that it had before, with the same text.

Kernels are looked up or made as for a capture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fuse.kernel.extents import Conditions, plain, terms_of
from fuse.kernel.region_text import Numbers
from fuse.kernel.sized import Relation, are_alike, lifted, relation_of
from fuse.runtime.guards import CallGuard, call_guard, sources_of
from fuse.runtime.probing_sizes import arguments_at, probe_sizes
from fuse.runtime.program import Program
from fuse.runtime.resized import arguments_in, resized, spelled_graphs
from fuse.runtime.size_reads import UNKNOWN, size_conditions
from fuse.runtime.state_guard import StateGuard
from fuse.runtime.training import Training
from fuse.runtime.variants import Compiled

FEWEST = 4
"""Fewest calls with one text: with fewer, several formulas may fit."""
FEWEST_VALUES = 3
"""Fewest values of each size: any two points are on a line."""
MOST_CAPTURED = 48
"""Most captured calls of a kind that are compared; beyond, the oldest is dropped."""
MOST_COLUMNS = 256
"""Most distinct numbers of a graph, whose order is compared pair by pair; larger graphs are captured at each size."""
MOST_KINDS = 8
"""Most kinds of calls that are kept for one state of the model."""
MOST_REACHED = 12
"""Most captures of a kind at larger or smaller sizes than called; a useless one counts as ``MOST_REACHED // 3``."""
MOST_FOLLOWED = 3
"""Most failed attempts to generalise a kind of calls."""


@dataclass(frozen=True)
class CapturedCall:
    """The rewritten graphs of a captured call, or of such a call at other sizes.

    ``training`` is that of the captured call, if it needs gradients. ``made_up``: the user did not make this call, and
    it has no program.
    """

    graphs: tuple[GraphModule, ...]
    training: Training | None = None
    made_up: bool = False

    @staticmethod
    def of(compiled: Compiled) -> CapturedCall | None:
        """The call that a variant was made for; None if the variant depends on more than sizes."""
        training, graph = compiled.training, compiled.graph
        apart = (compiled.carried and compiled.carried.slots) or compiled.learning or compiled.resized
        if graph is None or apart or not isinstance(compiled.program, Program):
            return None
        if training is not None and training.joint.own_gradients:  # Python code, whose uses of sizes are not recorded
            return None
        graphs = training.graphs() if training else (graph,)
        return None if any(graph.meta.get("failed") for graph in graphs) else CapturedCall(graphs, training)

    def as_text(self) -> CapturedGraphs | None:
        """The text and numbers of its graphs; None if a graph has no text."""
        try:
            text, numbers = spelled_graphs(self.graphs)
            arguments = arguments_in(self.graphs[0])
        except Exception:  # a fault in fuse must not reach the user: every size is captured
            return None
        return CapturedGraphs(self, text + (self.training.extra() if self.training else ""), numbers, arguments)


@dataclass(frozen=True)
class CapturedGraphs:
    """The text and numbers of a captured call's graphs; the first ``arguments`` numbers are layouts of arguments."""

    call: CapturedCall
    text: str
    numbers: Numbers
    arguments: int


def layouts_of(leaves: Sequence[Any]) -> Numbers:
    """Sizes and strides of the tensors of a call, in the order of the first numbers of its graph.

    >>> layouts_of([torch.ones(2, 3), 4, torch.ones(5)])
    (2, 3, 3, 1, 5, 1)
    """
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    return tuple(number for tensor in tensors.values() for number in (*tensor.shape, *tensor.stride()))


@dataclass(eq=False)
class Generalised:
    """Graphs of one text with formulas for their numbers; made by :func:`generalised`.

    Attributes:
        members: the captured graphs with this text.
        others: graphs of calls of this kind with another text.
        relation: each number as a constant or a formula in the sizes.
        evaluate: computes all numbers from sizes.
        sources: for each size, ``(position, factor, shift)``: number ``position`` of the arguments is
            ``factor * size + shift``.
        steps: for each size, one of its values, and the greatest common divisor of differences between its values.
        columns: distinct numbers: ``(position, least value, largest value)``.
        orders: for pairs of these numbers that overlap, the signs that their difference had.
        met: whether all comparisons in ``forward`` have the same outcomes at other sizes; None before it was run.
    """

    members: tuple[CapturedGraphs, ...]
    others: tuple[CapturedGraphs, ...]
    relation: Relation
    evaluate: Callable[..., Numbers]
    sources: tuple[tuple[int, int, int], ...]
    steps: tuple[tuple[int, int], ...]
    columns: tuple[tuple[int, int, int], ...]
    orders: tuple[tuple[int, int, frozenset[int]], ...]
    met: Callable[..., bool] | None = None

    def sizes(self, given: Numbers) -> tuple[int, ...] | None:
        """The sizes of a call whose arguments have these layouts; None if the layouts do not fit the formulas."""
        found = []
        for position, factor, shift in self.sources:
            size, rest = divmod(given[position] - shift, factor)
            if rest or size < 1:
                return None
            found.append(size)
        return tuple(found) if self.evaluate(*found)[: len(given)] == given else None

    def covers(self, sizes: Sequence[int]) -> bool:
        """Whether the numbers for these sizes are between those of the members, in an order that some member has."""
        if any((size - had) % step for size, (had, step) in zip(sizes, self.steps, strict=True)):
            return False
        numbers = self.evaluate(*sizes)
        if any(not low <= numbers[position] <= high for position, low, high in self.columns):
            return False
        return all(_sign(numbers[a] - numbers[b]) in seen for a, b, seen in self.orders)

    def had(self) -> list[tuple[int, ...]]:
        """The sizes of the members."""
        return [own for one in self.members if (own := self.sizes(one.numbers[: one.arguments]))]

    def follow(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Numbers) -> bool:
        """Run ``forward`` with symbolic sizes at ``sizes`` and at two others, and set ``met`` from its comparisons.

        Returns whether that succeeded: all members have the same outcomes, and no graph of another text does.
        """
        had = zip(*self.had(), strict=True)
        bounds = [(min(of), max(of), step) for of, (_, step) in zip(had, self.steps, strict=True)]
        further = probe_sizes(bounds, lambda one: one != sizes and self.covers(one), self.evaluate)
        noted: dict[str, bool] = {}
        for one in (sizes, *further):
            try:
                found = self._noted(model, *arguments_at(args, kwargs, self.evaluate(*one)), one)
            except Exception:  # of the user's code, or a fault in fuse, which must not reach the user
                return False
            if any(noted.setdefault(text, outcome) is not outcome for text, outcome in found.items()):
                return False
        names = tuple(f"n{i}" for i in range(len(sizes)))
        return bool(further) and self.decide(Conditions(names, sizes, noted=noted).met())

    def _noted(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Numbers
    ) -> dict[str, bool]:
        """The comparisons of sizes in one run of ``forward``, with their outcomes."""
        conditions, numbers = lifted(self.relation, sizes, sizes, of_text=False)
        formulas: dict[int, int] = {}
        several: set[int] = set()
        for position, _, _ in self.columns:
            number = numbers[position]
            if terms_of(formulas.setdefault(plain(number), number)) != terms_of(number):
                several.add(plain(number))
        for number in several:  # several formulas have this value
            del formulas[number]
        size_conditions(model, args, kwargs, formulas, conditions, self.members[-1].call.training is not None)
        return {text: outcome for text, outcome in conditions.noted.items() if UNKNOWN not in text}

    def decide(self, met: Callable[..., bool]) -> bool:
        """Set ``met`` if it is true for all members, and false for each graph of another text between them."""

        def tells(one: CapturedGraphs) -> bool:
            sizes = self.sizes(one.numbers[: one.arguments])
            return sizes is not None and met(*sizes) and self.covers(sizes)

        agree = all(map(tells, self.members)) and not any(map(tells, self.others))
        self.met = met if agree else None
        return agree


def generalised(graphs: Sequence[CapturedGraphs]) -> Generalised | None:
    """Formulas for the numbers of all graphs with the text of the last one; None if there are too few graphs."""
    last = graphs[-1]
    alike = (one for one in graphs if one.text == last.text and all(map(are_alike, one.numbers, last.numbers)))
    same = [one for one in alike if all(map(_same_constants, one.call.graphs, last.call.graphs))]
    if len(same) < FEWEST or last.call.made_up:
        return None
    found = relation_of(last.numbers, [one.numbers for one in same[:-1]])
    if found is None:
        return None
    relation = found[1]
    names = [f"n{i}" for i in range(len(found[0]))]
    if any(len({one.numbers[position] for one in same}) < FEWEST_VALUES for position in found[0]):
        return None
    if not _are_independent_sizes(relation, [one.numbers for one in same]):
        return None
    sources = [_source_of(name, relation[: last.arguments]) for name in names]
    if not all(sources):
        return None
    conditions = Conditions(tuple(names))
    expected = ", ".join(conditions.python(n) if isinstance(n, tuple) else repr(n) for n in relation)
    columns: dict[Numbers, int] = {}
    for position, column in enumerate(zip(*(one.numbers for one in same), strict=True)):
        columns.setdefault(column, position)
    if len(columns) > MOST_COLUMNS:
        return None
    return Generalised(
        tuple(same),
        tuple(one for one in graphs if one.text != last.text and one.arguments == last.arguments),
        relation,
        conditions.function(f"({expected},)"),
        tuple(source for source in sources if source),
        tuple(_steps([one.numbers[position] for one in same]) for position in found[0]),
        tuple((position, min(column), max(column)) for column, position in columns.items()),
        tuple(_orders(columns)),
    )


def _same_constants(one: GraphModule, other: GraphModule) -> bool:
    """Whether two graphs of one text have equal constant tensors, except those that are computed from sizes."""
    pairs = zip(one.meta["signature"].inputs, other.meta["signature"].inputs, strict=True)
    made = ((a.value, b.value) for a, b in pairs if a.value is not None and a.origin is None)
    return all(a is b or (b is not None and a.dtype == b.dtype and torch.equal(a, b)) for a, b in made)


def _are_independent_sizes(relation: Relation, calls: Sequence[Numbers]) -> bool:
    """Whether the sizes of these calls vary independently, so that formulas in them are unique.

    They do not if a size is a linear combination of others and a constant, of another and their product, or a product
    of powers of others: if 2 * n0 + n1 is always 20, or n0 * n1 is always 48, the numbers 20 and 48 are unknown at
    other sizes. These numbers need not be in a graph: the gradient of a mean is divided by 48, which may give a float.

    >>> relation = ((("n0",), 1),), ((("n1",), 1),)
    >>> _are_independent_sizes(relation, [(8, 6), (12, 4), (16, 3), (24, 2)])  # the product is always 48
    False
    >>> _are_independent_sizes(relation, [(8, 6), (12, 4), (16, 5), (24, 2)])
    True
    """
    columns: dict[str, dict[Numbers, None]] = {}  # by size: its values, and the values of size plus a constant
    for terms, column in zip(relation, zip(*calls, strict=True), strict=True):
        if isinstance(terms, tuple):
            ((factors, times), *_) = (term for term in terms if term[0])
            if abs(times) == 1 and len(factors) == 1 and sum(1 for term in terms if term[0]) == 1:
                columns.setdefault(factors[0], {})[column] = None
    sizes = [next(iter(of)) for of in columns.values()]
    changes = [[float(n - of[0]) for n in of[1:]] for of in sizes]
    for pair in combinations(changes, 2):
        if not _independent([*pair, [a * b for a, b in zip(*pair, strict=True)]]):
            return False
    powers = ([[math.log(n / of[0]) for n in of[1:]] for of in chosen] for chosen in product(*columns.values()))
    return _independent(changes) and all(map(_independent, powers))


def _independent(columns: Sequence[Sequence[float]]) -> bool:
    """Whether the columns are linearly independent.

    >>> _independent([[1.0, 2.0, 3.0], [1.0, 0.0, 1.0]]), _independent([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]])
    (True, False)
    """
    rest = [[number / (max(map(abs, column)) or 1.0) for number in column] for column in columns]
    while rest:
        column = rest.pop()
        position = max(range(len(column)), key=lambda i: abs(column[i]))
        if abs(column[position]) < 1e-9:
            return False
        for other in rest:
            times = other[position] / column[position]
            other[:] = [b - times * a for a, b in zip(column, other, strict=True)]
            other[position] = 0.0
    return True


def _steps(had: Sequence[int]) -> tuple[int, int]:
    """The first of several numbers, and the greatest common divisor of their differences.

    >>> _steps([24, 8, 40])
    (24, 16)
    """
    return had[0], math.gcd(*(one - had[0] for one in had))


def _source_of(name: str, relation: Relation) -> tuple[int, int, int] | None:
    """A number that is ``factor * size + shift``: its position, the factor and the shift; None if there is none."""
    for position, terms in enumerate(relation):
        if isinstance(terms, tuple):
            factors = dict(terms)
            shift = factors.pop((), 0)
            if list(factors) == [(name,)]:
                return position, factors[name,], shift
    return None


def _orders(columns: Mapping[Numbers, int]) -> list[tuple[int, int, frozenset[int]]]:
    """For pairs of columns whose ranges overlap: both positions, and the signs of their differences."""
    found = []
    for (one, position), (other, another) in combinations(columns.items(), 2):
        if max(one) >= min(other) and max(other) >= min(one):
            found.append((position, another, frozenset(_sign(a - b) for a, b in zip(one, other, strict=True))))
    return found


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


@dataclass(eq=False)
class KindOfCalls:
    """Captured calls that differ in sizes only, and their generalised graphs.

    Attributes:
        guard: the guard of the first call.
        facts: dtype, rank, device and similar facts of the tensors of a call.
        sources: origins of the placeholders' tensors.
        reaches: captures at made-up sizes that may still be made.
        _held: tensors that do not come with a call, with their facts and sizes, which ``module.double()`` changes.
    """

    guard: CallGuard
    facts: tuple[Any, ...]
    sources: tuple[int | Tensor, ...]
    reaches: int = MOST_REACHED
    _held: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)
    _waiting: list[CapturedCall] = field(default_factory=list)
    _captured: list[CapturedGraphs] = field(default_factory=list)
    _common: list[Generalised] = field(default_factory=list)
    _in_vain: int = 0

    def add(self, captured: CapturedCall, held: Sequence[Tensor]) -> None:
        """Add a captured call; ``held`` are tensors that do not come with the call.

        Its text and numbers are computed when a call of another size comes.
        """
        self._waiting.append(captured)
        self._held |= {id(tensor): (tensor, _facts_of_held(tensor)) for tensor in held}

    def holds(self) -> bool:
        """Whether the tensors that do not come with a call still have their dtypes, sizes and devices."""
        return all(_facts_of_held(tensor) == facts for tensor, facts in self._held.values())

    def between(self, given: Numbers) -> Between | None:
        """The generalised graph for a call with these layouts; ``within`` is False if the sizes are out of range."""
        if self._waiting and self._in_vain < MOST_FOLLOWED:
            added = [one for call in self._waiting if (one := call.as_text()) is not None]
            self._captured = [*self._captured, *added][-MOST_CAPTURED:]
            texts = dict.fromkeys(one.text for one in reversed(self._captured))
            ordered = (sorted(self._captured, key=lambda o: (o.text == text, not o.call.made_up)) for text in texts)
            made = [common for graphs in ordered if (common := generalised(graphs)) is not None]
            self._common = [common for common in made if self._as_before(common)]
        self._waiting.clear()
        found = []
        for common in self._common:
            sizes = common.sizes(given)
            if sizes is not None and (common.met is None or common.met(*sizes)):
                found.append(Between(self, common, sizes, common.covers(sizes)))
        return max(found, key=lambda one: one.within, default=None)

    def reached(self, made_up: CapturedCall, given: Numbers) -> Between | None:
        """The generalised graph for a call with these layouts, with the made-up call as a further member.

        If none serves the call, the made-up call is dropped and None is returned.
        """
        before = self._captured, self._common
        self._waiting.append(made_up)
        found = self.between(given)
        if found is not None and found.within:
            return found
        self._captured, self._common = before
        return None

    def _as_before(self, common: Generalised) -> bool:
        """Whether the comparisons of ``forward`` that are known hold for one more member; True if none are known."""
        for before in self._common:
            same = before.members[-1].text == common.members[-1].text and before.relation == common.relation
            if same and before.met is not None:
                return common.decide(before.met)
        return True

    def give_up(self, common: Generalised) -> None:
        """Drop a generalised graph that cannot be used."""
        self._common = [one for one in self._common if one is not common]
        self._in_vain += 1


@dataclass(frozen=True)
class Between:
    """A generalised graph for a call with these sizes; not ``within`` if they are beyond those of captured calls."""

    kind: KindOfCalls
    common: Generalised
    sizes: tuple[int, ...]
    within: bool = True

    def follow(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether all comparisons of sizes in ``forward`` are known; runs ``forward`` at this call's sizes if not."""
        if self.common.met is None and not self.common.follow(model, args, kwargs, self.sizes):
            self.kind.give_up(self.common)
            return False
        return True

    def captured(self) -> CapturedCall | None:
        """The graphs of this call, without a capture; None if a view has another layout than the formulas give."""
        like = self.common.members[-1].call
        try:
            return CapturedCall(resized(like.graphs, self.common.evaluate(*self.sizes)), like.training)
        except Exception:  # NotResized, or a fault in fuse, which must not reach the user
            self.kind.give_up(self.common)
            return None


class KindsOfCalls:
    """The kinds of captured calls of a model, by the state of the model."""

    def __init__(self) -> None:
        self._by_state: WeakKeyDictionary[StateGuard, list[KindOfCalls]] = WeakKeyDictionary()

    def add(self, state: StateGuard, compiled: Compiled, leaves: Sequence[Any], model: nn.Module) -> None:
        """Add a captured call with these leaves, if the variant depends on sizes only."""
        captured = CapturedCall.of(compiled)
        if captured is None:
            return
        kinds = self._by_state.setdefault(state, [])
        facts = facts_of(leaves)
        alike = (one for one in kinds if one.facts == facts and one.guard.differs_in_sizes(compiled.guard))
        found = next((one for one in alike if one.holds()), None)
        if found is None:
            sources = sources_of(captured.graphs[0].meta["signature"].inputs, model, len(leaves))
            found = KindOfCalls(compiled.guard, facts, tuple(sources))
            kinds.insert(0, found)
            del kinds[MOST_KINDS:]
        found.add(captured, compiled.guard.state)

    def find(
        self, states: Iterable[StateGuard], leaves: Sequence[Any], spec: Any, held: Sequence[Tensor]
    ) -> KindOfCalls | None:
        """The kind of a call with these leaves and this structure, or None; ``held`` are the model's tensors."""
        facts = facts_of(leaves)
        for state in states:
            for kind in self._by_state.get(state, ()):
                if kind.facts == facts and kind.guard.in_context() and kind.holds():
                    guard = call_guard(leaves, spec, kind.sources, held, kind.guard.context)
                    if kind.guard.differs_in_sizes(guard):
                        return kind
        return None


def facts_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The facts about the tensors of a call that operators depend on, sizes left out; None for other leaves."""
    return tuple(
        (type(leaf), leaf.dtype, leaf.dim(), leaf.device, leaf.requires_grad, torch._C._dispatch_keys(leaf))
        if isinstance(leaf, Tensor)
        else None
        for leaf in leaves
    )


def _facts_of_held(tensor: Tensor) -> tuple[Any, ...]:
    return facts_of([tensor]), tuple(tensor.shape), tensor.stride()
