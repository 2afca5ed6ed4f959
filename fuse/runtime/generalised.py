"""One rewritten graph for all sizes between those that were captured.

    x [50, 3, 64]   captured                        graph A of (50, 3)
    x [20, 5, 64]   captured                        graph A of (20, 5)
    x [61, 9, 64]   captured                        graph A of (61, 9)
    x [33, 2, 64]   captured                        graph A of (33, 2)
    x [37, 4, 64]   lies between: not captured      graph A of (37, 4): its loop takes 37 steps, its view is [148, 64]

A new size gets the graph of others if all of this holds:

- Graphs of at least ``FEWEST`` calls of this kind have one text, and all their numbers follow from the sizes of inputs.
- ``forward`` run at three sizes (:mod:`fuse.runtime.telling`) that note how they are used
  (:mod:`fuse.runtime.size_reads`) compared or divided them only in ways that come out the same for the new ones.
- Each of its sizes differs from theirs by a multiple of what theirs differ by: where all were even, nothing is known of
  odd ones. None of theirs follows from others: of batches that all have 48 tokens, a mean is always a 48th of a sum.
- Each number of the new graph is neither smaller nor larger than it was in all of these graphs, and of each two numbers
  the larger is the one that was in one of these graphs: whatever else compared numbers on the way (a pass, an operator
  that takes itself apart) had either answer before, and the text is the same.

Kernels are found or made for the new numbers as for those of a capture.
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
from fuse.kernel.sized import Relation, are_alike, lifted, relation_of
from fuse.kernel.spelled import Numbers
from fuse.runtime.guards import CallGuard, call_guard, sources_of
from fuse.runtime.program import Program
from fuse.runtime.resized import arguments_in, resized, spelled_graphs
from fuse.runtime.size_reads import UNKNOWN, size_conditions
from fuse.runtime.state_guard import StateGuard
from fuse.runtime.telling import arguments_at, telling
from fuse.runtime.training import Training
from fuse.runtime.variants import Compiled

FEWEST = 4
"""Calls that have to agree: with fewer, a formula that fits all may be another one."""
FEWEST_VALUES = 3
"""Values that each size has to have had: two points lie on any line."""
MOST_CAPTURED = 48
"""Captured calls of a kind that are compared; beyond, the oldest is forgotten."""
MOST_COLUMNS = 256
"""Distinct numbers of a graph whose order is compared pair by pair; graphs with more are captured at each size."""
MOST_KINDS = 8
MOST_REACHED = 12
"""Captures of a kind at sizes further out; one that is in vain counts as ``MOST_REACHED // 3``."""
MOST_FOLLOWED = 3
"""How often ``forward`` is run to follow its sizes, where that was in vain."""


@dataclass(frozen=True)
class CapturedCall:
    """One captured call: its rewritten graphs, with those of its ``training`` where it needs gradients; or one of other
    sizes, with the training of a captured call. ``made_up``: nobody made the call, so that it has no program."""

    graphs: tuple[GraphModule, ...]
    training: Training | None = None
    made_up: bool = False

    @staticmethod
    def of(compiled: Compiled) -> CapturedCall | None:
        """The call that a variant was made for; None where more than sizes tells such calls apart."""
        training, graph = compiled.training, compiled.graph
        apart = compiled.carried or compiled.learning or compiled.resized
        if graph is None or apart or not isinstance(compiled.program, Program):
            return None
        if training is not None and training.joint.own_gradients:  # they are Python that nobody follows
            return None
        graphs = training.graphs() if training else (graph,)
        return None if any(graph.meta.get("failed") for graph in graphs) else CapturedCall(graphs, training)

    def spelled(self) -> CapturedGraphs | None:
        """Its graphs, to be compared with others; None where that cannot be done."""
        try:
            text, numbers = spelled_graphs(self.graphs)
            arguments = arguments_in(self.graphs[0])
        except Exception:  # a fault of ours must not become the user's: every size is captured
            return None
        return CapturedGraphs(self, text + (self.training.beside() if self.training else ""), numbers, arguments)


@dataclass(frozen=True)
class CapturedGraphs:
    """The rewritten graphs of one captured call, their text, their numbers, and how many of them the arguments have."""

    call: CapturedCall
    text: str
    numbers: Numbers
    arguments: int


def layouts_of(leaves: Sequence[Any]) -> Numbers:
    """Sizes and strides of the tensors of a call, as a graph of it begins with.

    >>> layouts_of([torch.ones(2, 3), 4, torch.ones(5)])
    (2, 3, 3, 1, 5, 1)
    """
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    return tuple(number for tensor in tensors.values() for number in (*tensor.shape, *tensor.stride()))


@dataclass(eq=False)
class Generalised:
    """What graphs of one text have in common; see :func:`generalised`.

    ``others``: graphs of calls of this kind that have another text.
    ``relation`` and ``evaluate``: each number as a formula in sizes, and all of them for given ones. ``places``: for
    each size a number of the arguments that is ``factor`` times the size and ``shift`` more. ``steps``: for each size
    one that it had, and the greatest number of which all that it had differ by a multiple. ``columns``: distinct
    numbers, by the place of one, with the least and the largest value. ``orders``: of pairs of columns, the signs that
    their difference had. ``met``: whether ``forward`` takes the same way with other sizes; None before it was followed.
    """

    members: tuple[CapturedGraphs, ...]
    others: tuple[CapturedGraphs, ...]
    relation: Relation
    evaluate: Callable[..., Numbers]
    places: tuple[tuple[int, int, int], ...]
    steps: tuple[tuple[int, int], ...]
    columns: tuple[tuple[int, int, int], ...]
    orders: tuple[tuple[int, int, frozenset[int]], ...]
    met: Callable[..., bool] | None = None

    def sizes(self, given: Numbers) -> tuple[int, ...] | None:
        """The sizes of a call whose inputs have these layouts; None where they do not follow from sizes."""
        found = []
        for place, factor, shift in self.places:
            size, rest = divmod(given[place] - shift, factor)
            if rest or size < 1:
                return None
            found.append(size)
        return tuple(found) if self.evaluate(*found)[: len(given)] == given else None

    def covers(self, sizes: Sequence[int]) -> bool:
        """Whether the numbers of a graph for these sizes lie between those of the members, and in an order that some
        member has."""
        if any((size - had) % step for size, (had, step) in zip(sizes, self.steps, strict=True)):
            return False
        numbers = self.evaluate(*sizes)
        if any(not low <= numbers[place] <= high for place, low, high in self.columns):
            return False
        return all(_sign(numbers[a] - numbers[b]) in seen for a, b, seen in self.orders)

    def had(self) -> list[tuple[int, ...]]:
        """The sizes of the members."""
        return [own for one in self.members if (own := self.sizes(one.numbers[: one.arguments]))]

    def follow(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Numbers) -> bool:
        """Find out what ``forward`` compares sizes with, in a call that has these and at others; whether all members
        agree."""
        had = zip(*self.had(), strict=True)
        bounds = [(min(of), max(of), step) for of, (_, step) in zip(had, self.steps, strict=True)]
        further = telling(bounds, lambda one: one != sizes and self.covers(one), self.evaluate)
        noted: dict[str, bool] = {}
        for one in (sizes, *further):
            try:
                found = self._noted(model, *arguments_at(args, kwargs, self.evaluate(*one)), one)
            except Exception:  # of the user's code, or a fault of ours, which must not become the user's
                return False
            if any(noted.setdefault(text, outcome) is not outcome for text, outcome in found.items()):
                return False
        names = tuple(f"n{i}" for i in range(len(sizes)))
        return bool(further) and self.decide(Conditions(names, sizes, noted=noted).met())

    def _noted(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Numbers
    ) -> dict[str, bool]:
        """What ``forward`` compares sizes with in one call, and the outcomes."""
        conditions, numbers = lifted(self.relation, sizes, sizes, of_text=False)
        formulas: dict[int, int] = {}
        several: set[int] = set()
        for place, _, _ in self.columns:
            number = numbers[place]
            if terms_of(formulas.setdefault(plain(number), number)) != terms_of(number):
                several.add(plain(number))
        for number in several:  # which formula it is cannot be said
            del formulas[number]
        size_conditions(model, args, kwargs, formulas, conditions, self.members[-1].call.training is not None)
        return {text: outcome for text, outcome in conditions.noted.items() if UNKNOWN not in text}

    def decide(self, met: Callable[..., bool]) -> bool:
        """Take ``met`` for what tells the way of ``forward``; whether it says so of all members, and of no other graph
        between them."""

        def tells(one: CapturedGraphs) -> bool:
            sizes = self.sizes(one.numbers[: one.arguments])
            return sizes is not None and met(*sizes) and self.covers(sizes)

        agree = all(map(tells, self.members)) and not any(map(tells, self.others))
        self.met = met if agree else None
        return agree


def generalised(graphs: Sequence[CapturedGraphs]) -> Generalised | None:
    """What graphs of calls of one kind have in common with the last of them; None where too few do."""
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
    if any(len({one.numbers[place] for one in same}) < FEWEST_VALUES for place in found[0]):
        return None
    if not _tell(relation, [one.numbers for one in same]):
        return None
    places = [_place_of(name, relation[: last.arguments]) for name in names]
    if not all(places):
        return None
    conditions = Conditions(tuple(names))
    expected = ", ".join(conditions.python(n) if isinstance(n, tuple) else repr(n) for n in relation)
    columns: dict[Numbers, int] = {}
    for place, column in enumerate(zip(*(one.numbers for one in same), strict=True)):
        columns.setdefault(column, place)
    if len(columns) > MOST_COLUMNS:
        return None
    return Generalised(
        tuple(same),
        tuple(one for one in graphs if one.text != last.text and one.arguments == last.arguments),
        relation,
        conditions.function(f"({expected},)"),
        tuple(place for place in places if place),
        tuple(_steps([one.numbers[place] for one in same]) for place in found[0]),
        tuple((place, min(column), max(column)) for column, place in columns.items()),
        tuple(_orders(columns)),
    )


def _same_constants(one: GraphModule, other: GraphModule) -> bool:
    """Whether graphs of one text have the same numbers where these follow from no sizes."""
    pairs = zip(one.meta["signature"].inputs, other.meta["signature"].inputs, strict=True)
    made = ((a.value, b.value) for a, b in pairs if a.value is not None and a.origin is None)
    return all(a is b or (b is not None and a.dtype == b.dtype and torch.equal(a, b)) for a, b in made)


def _tell(relation: Relation, calls: Sequence[Numbers]) -> bool:
    """Whether the sizes of these calls tell what follows from one of them from what follows from others.

    No size may be a sum of multiples of others and a number, nor one and its product with another, nor a product of
    powers: where 2 * n0 + n1 is always 20, or n0 * n1 is 48, nobody knows what 20 and 48 are in other calls. Such a
    number need be none of a graph: gradients of a mean are divided by 48, and what follows from that may be a float.

    >>> relation = ((("n0",), 1),), ((("n1",), 1),)
    >>> _tell(relation, [(8, 6), (12, 4), (16, 3), (24, 2)]), _tell(relation, [(8, 6), (12, 4), (16, 5), (24, 2)])
    (False, True)
    """
    columns: dict[str, dict[Numbers, None]] = {}  # of each size: its values, and those of a few more or less
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
    """Whether none of the columns is a sum of multiples of others.

    >>> _independent([[1.0, 2.0, 3.0], [1.0, 0.0, 1.0]]), _independent([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]])
    (True, False)
    """
    rest = [[number / (max(map(abs, column)) or 1.0) for number in column] for column in columns]
    while rest:
        column = rest.pop()
        place = max(range(len(column)), key=lambda i: abs(column[i]))
        if abs(column[place]) < 1e-9:
            return False
        for other in rest:
            times = other[place] / column[place]
            other[:] = [b - times * a for a, b in zip(column, other, strict=True)]
            other[place] = 0.0
    return True


def _steps(had: Sequence[int]) -> tuple[int, int]:
    """One of several numbers, and the greatest number of which all differ by a multiple.

    >>> _steps([24, 8, 40])
    (24, 16)
    """
    return had[0], math.gcd(*(one - had[0] for one in had))


def _place_of(name: str, relation: Relation) -> tuple[int, int, int] | None:
    """A number that is a multiple of a size and a few more: its place, the factor and the rest."""
    for place, terms in enumerate(relation):
        if isinstance(terms, tuple):
            factors = dict(terms)
            shift = factors.pop((), 0)
            if list(factors) == [(name,)]:
                return place, factors[name,], shift
    return None


def _orders(columns: Mapping[Numbers, int]) -> list[tuple[int, int, frozenset[int]]]:
    """Of pairs of columns that overlap, which of the two was the larger."""
    found = []
    for (one, place), (other, another) in combinations(columns.items(), 2):
        if max(one) >= min(other) and max(other) >= min(one):
            found.append((place, another, frozenset(_sign(a - b) for a, b in zip(one, other, strict=True))))
    return found


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


@dataclass(eq=False)
class KindOfCalls:
    """Captured calls that differ in sizes only, and what their graphs have in common.

    ``facts`` are those of the tensors of a call that are no sizes. ``sources``: where the placeholders' tensors come
    from. ``reaches``: captures at sizes further out than those of calls, which may still be made. ``_held``: tensors
    that do not come with a call, with the facts of each, sizes among them: ``module.double()`` changes these.
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
        """A call was captured; its graphs are spelled once a call of another size comes. ``held`` are tensors that do
        not come with the call."""
        self._waiting.append(captured)
        self._held |= {id(tensor): (tensor, _facts_of_held(tensor)) for tensor in held}

    def holds(self) -> bool:
        """Whether tensors that do not come with a call are what they were."""
        return all(_facts_of_held(tensor) == facts for tensor, facts in self._held.values())

    def between(self, given: Numbers) -> Between | None:
        """What serves a call whose tensors have these layouts, or may once sizes further out are captured."""
        if self._waiting and self._in_vain < MOST_FOLLOWED:
            spelled = [one for call in self._waiting if (one := call.spelled()) is not None]
            self._captured = [*self._captured, *spelled][-MOST_CAPTURED:]
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
        """What serves a call whose tensors have these layouts, now that a call further out is captured; None where
        nothing does, and then all is as it was before."""
        before = self._captured, self._common
        self._waiting.append(made_up)
        found = self.between(given)
        if found is not None and found.within:
            return found
        self._captured, self._common = before
        return None

    def _as_before(self, common: Generalised) -> bool:
        """Whether what was found of ``forward`` before holds with one more graph; True where nothing was."""
        for before in self._common:
            same = before.members[-1].text == common.members[-1].text and before.relation == common.relation
            if same and before.met is not None:
                return common.decide(before.met)
        return True

    def give_up(self, common: Generalised) -> None:
        """No graph for other sizes comes of it."""
        self._common = [one for one in self._common if one is not common]
        self._in_vain += 1


@dataclass(frozen=True)
class Between:
    """What serves a call whose sizes lie between those of captured calls; or not yet, where they are not ``within``."""

    kind: KindOfCalls
    common: Generalised
    sizes: tuple[int, ...]
    within: bool = True

    def follow(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether ``forward`` may use sizes as it does; where nobody knows yet, it is run for this call."""
        if self.common.met is None and not self.common.follow(model, args, kwargs, self.sizes):
            self.kind.give_up(self.common)
            return False
        return True

    def captured(self) -> CapturedCall | None:
        """The call as if it had been captured, its graphs not built; None where its views are others than the formulas
        say."""
        like = self.common.members[-1].call
        try:
            return CapturedCall(resized(like.graphs, self.common.evaluate(*self.sizes)), like.training)
        except Exception:  # NotResized, or a fault of ours, which must not become the user's
            self.kind.give_up(self.common)
            return None


class KindsOfCalls:
    """The kinds of calls of a model that were captured, by the state that it was in."""

    def __init__(self) -> None:
        self._by_state: WeakKeyDictionary[StateGuard, list[KindOfCalls]] = WeakKeyDictionary()

    def add(self, state: StateGuard, compiled: Compiled, leaves: Sequence[Any], model: nn.Module) -> None:
        """A call with these leaves was captured, and nothing but sizes tells such calls apart."""
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
        """The kind of a call with these leaves and this structure, the model holding these tensors."""
        facts = facts_of(leaves)
        for state in states:
            for kind in self._by_state.get(state, ()):
                if kind.facts == facts and kind.guard.in_context() and kind.holds():
                    guard = call_guard(leaves, spec, kind.sources, held, kind.guard.context)
                    if kind.guard.differs_in_sizes(guard):
                        return kind
        return None


def facts_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What operators look at of the tensors of a call, but for sizes."""
    return tuple(
        (type(leaf), leaf.dtype, leaf.dim(), leaf.device, leaf.requires_grad, torch._C._dispatch_keys(leaf))
        if isinstance(leaf, Tensor)
        else None
        for leaf in leaves
    )


def _facts_of_held(tensor: Tensor) -> tuple[Any, ...]:
    return facts_of([tensor]), tuple(tensor.shape), tensor.stride()
