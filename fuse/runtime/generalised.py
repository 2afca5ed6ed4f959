"""Generalised graphs: one rewritten graph for all sizes between captured ones.

    x [50, 3, 64]   captured                        graph A of (50, 3)
    x [20, 5, 64]   captured                        graph A of (20, 5)
    x [61, 9, 64]   captured                        graph A of (61, 9)
    x [33, 2, 64]   captured                        graph A of (33, 2)
    x [37, 4, 64]   between them: not captured      graph A of (37, 4): its loop takes 37 steps, its view is [148, 64]

A call at new sizes gets the graph of others if all of these conditions hold:

- Graphs of at least ``FEWEST`` calls of this kind (``FEWEST_OF_ONE_SIZE`` where one size varies) have the same text,
  and all their numbers are formulas in the sizes of the arguments.
- ``forward`` was run with symbolic sizes (:mod:`fuse.runtime.size_reads`) at three sizes
  (:mod:`fuse.runtime.probing_sizes`), and each recorded comparison has the same outcome for the new sizes.
- Each new size differs from captured ones by a multiple of the greatest common divisor of their differences: if all
  were even, nothing is known of odd ones. The captured sizes vary independently: if all batches have 48 tokens, a
  division by 48 could also be a division by the number of tokens.
- A number may also be made of sizes that operators compute by a division (:mod:`fuse.runtime.derived_sizes`), as long
  as all formulas of these agree on the new sizes.
- Each number of the new graph is between the least and the largest value that it had in captured graphs, and the order
  of any two numbers occurred in one of these graphs. So a comparison without a record (in a pass, in the decomposition
  of an operator) has an outcome that it had before, with the same text.

Kernels are looked up or made as for a capture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations, combinations_with_replacement, product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fuse.graph.signature import InputSpec
from fuse.kernel.extents import LEAST_LOWERED, Conditions, plain, terms_of
from fuse.kernel.region_text import Numbers
from fuse.kernel.sized import Relation, are_alike, lifted, relation_of, renamed
from fuse.runtime.derived_sizes import formulas_of
from fuse.runtime.guards import sources_of
from fuse.runtime.number_ranges import NumberRanges, number_ranges
from fuse.runtime.probing_sizes import arguments_at, probe_sizes
from fuse.runtime.program import Program
from fuse.runtime.resized import arguments_in, nodes_with, spelled_graphs
from fuse.runtime.size_reads import UNKNOWN, size_conditions
from fuse.runtime.sized_programs import SizedPrograms
from fuse.runtime.training import Training
from fuse.runtime.variants import Compiled

FEWEST = 4
"""Fewest calls with one text where several sizes vary: with fewer, several formulas may fit."""
FEWEST_OF_ONE_SIZE = 3
"""Fewest calls where one size varies, and fewest values of each size: a formula in one size (a multiple, a sum with a
constant, a multiple of a square) follows from one or two calls, and the others check it."""
FEW_COLUMNS = 16
"""Most sizes of which products of four are compared."""
FEWEST_RUNS = 2
"""Fewest runs of ``forward`` with symbolic sizes: at one choice of sizes, two numbers may be equal by chance."""

Derived = Mapping[str, tuple[str, ...]]
"""By name of a size that operators compute, its formulas in the sizes of the arguments."""

MOST_COLUMNS = 256
"""Most distinct numbers of a graph, whose order is compared pair by pair; larger graphs are captured at each size."""


@dataclass(frozen=True)
class CapturedCall:
    """The rewritten graphs of a captured call, or of such a call at other sizes.

    ``integers`` are the call's integer arguments. ``training`` is that of the captured call, if it needs gradients.
    ``made_up``: the user did not make this call, and it has no program.
    """

    graphs: tuple[GraphModule, ...]
    integers: Numbers
    training: Training | None = None
    made_up: bool = False

    @staticmethod
    def of(compiled: Compiled) -> CapturedCall | None:
        """The call that a variant was made for; None if the variant depends on more than sizes."""
        training, graph = compiled.training, compiled.graph
        apart = (compiled.carried and compiled.carried.slots) or compiled.learning or compiled.drawing
        if graph is None or apart or compiled.resized or not isinstance(compiled.program, Program):
            return None
        if training is not None and training.joint.own_gradients:  # Python code, whose uses of sizes are not recorded
            return None
        graphs = training.graphs() if training else (graph,)
        if any(graph.meta.get("failed") for graph in graphs):
            return None
        return CapturedCall(graphs, compiled.guard.integers, training)

    def as_text(self) -> CapturedGraphs | None:
        """The text and numbers of its graphs; None if a graph has no text."""
        try:
            text, numbers = spelled_graphs(self.graphs)
            arguments = len(self.integers) + arguments_in(self.graphs[0])
        except Exception:  # a fault in fuse must not reach the user: every size is captured
            return None
        text += self.training.extra() if self.training else ""
        numbers = (*self.integers, *numbers)
        return CapturedGraphs(self, f"{text}{_small(numbers)}", numbers, arguments)


@dataclass(frozen=True)
class CapturedGraphs:
    """The text of a captured call's graphs, and their numbers behind the call's integer arguments.

    The first ``arguments`` numbers are these integers, and the layouts of arguments.

    The text includes the numbers that are too small to vary: a batch of one has another text than larger ones.
    """

    call: CapturedCall
    text: str
    numbers: Numbers
    arguments: int


@dataclass(eq=False)
class Generalised:
    """Graphs of one text with formulas for their numbers; made by :func:`generalised`.

    Attributes:
        members: the captured graphs with this text.
        others: graphs of calls of this kind with another text.
        relation: each number as a constant or a formula in the sizes.
        sources: for each size, ``(position, factor, shift)``: number ``position`` of the arguments is
            ``factor * size + shift``.
        steps: for each size, one of its values, and the greatest common divisor of differences between its values.
        derived: the formulas of sizes that operators compute.
        distinct: positions of the distinct numbers.
        ranges: the values and orders that these had.
        programs: programs for its sizes without a graph.
        met: whether all comparisons in ``forward`` have the same outcomes at other sizes; None before it was run.
        _origins: those of the placeholders' tensors, once they are known.
    """

    members: tuple[CapturedGraphs, ...]
    others: tuple[CapturedGraphs, ...]
    relation: Relation
    sources: tuple[tuple[int, int, int], ...]
    steps: tuple[tuple[int, int], ...]
    derived: Derived
    distinct: tuple[int, ...]
    ranges: NumberRanges
    programs: SizedPrograms
    met: Callable[..., bool] | None = None
    _origins: tuple[int | Tensor, ...] | None = None

    @property
    def checked(self) -> bool:
        """Whether there are enough members that some of them check the formulas of the others."""
        return len(self.members) >= FEWEST_OF_ONE_SIZE

    @property
    def varies_in_integers(self) -> bool:
        """Whether integer arguments are formulas in the sizes."""
        count = len(self.members[-1].call.integers)
        return any(isinstance(number, tuple) for number in self.relation[:count])

    @cached_property
    def evaluate(self) -> Callable[..., Numbers]:
        """Computes all numbers from sizes."""
        return self._named.evaluator(self.relation)

    @cached_property
    def _evaluate_arguments(self) -> Callable[..., Numbers]:
        return self._named.evaluator(self.relation[: self.members[-1].arguments])

    @cached_property
    def _named(self) -> Conditions:
        return _sizes(len(self.sources), self.derived)

    @cached_property
    def all_sizes(self) -> Callable[..., Numbers]:
        """Computes from sizes the numbers of which all others are polynomials: the sizes, and those derived."""
        return self._named.evaluator([(((name,), 1),) for name in (*self._named.sizes, *self.derived)])

    def are_told(self, sizes: Sequence[int]) -> bool:
        """Whether the formulas of each derived size agree on these sizes, and it is large enough to vary."""
        return bool(self._are_told(*sizes))

    @cached_property
    def _are_told(self) -> Callable[..., Any]:
        tests = (f"{' == '.join(of)} >= {LEAST_LOWERED}" for of in self.derived.values())
        return self._named.function(" and ".join(tests) or "True")

    def sizes(self, given: Numbers) -> tuple[int, ...] | None:
        """The sizes of a call with these integer arguments and layouts; None if these do not fit the formulas."""
        found = []
        for position, factor, shift in self.sources:
            size, rest = divmod(given[position] - shift, factor)
            if rest or size < 1:
                return None
            found.append(size)
        return tuple(found) if self._evaluate_arguments(*found) == given else None

    def covers(self, sizes: Sequence[int]) -> bool:
        """Whether the numbers for these sizes are between those of the members, in an order that some member has."""
        if any((size - had) % step for size, (had, step) in zip(sizes, self.steps, strict=True)):
            return False
        return self.are_told(sizes) and self.ranges.include(sizes)

    def had(self, made_up: bool = True) -> list[tuple[int, ...]]:
        """The sizes of the members, with those of ``made_up`` calls or without."""
        members = (one for one in self.members if made_up or not one.call.made_up)
        return [own for one in members if (own := self.sizes(one.numbers[: one.arguments]))]

    def bounds(self, made_up: bool = True) -> list[tuple[int, int, int]]:
        """The least and the largest value of each size among these members, and the step between its values."""
        had = zip(*self.had(made_up), strict=True)
        return [(min(of), max(of), step) for of, (_, step) in zip(had, self.steps, strict=True)]

    def origins(self, inputs: Sequence[InputSpec], model: nn.Module, count: int) -> list[int | Tensor]:
        """The origins of the placeholders' tensors in a call with ``count`` leaves (:func:`sources_of`): they differ
        from call to call in constants only."""
        if self._origins is None:
            self._origins = tuple(sources_of(inputs, model, count))
        pairs = zip(inputs, self._origins, strict=True)
        return [origin if spec.value is None else spec.value for spec, origin in pairs]

    def follow(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Numbers) -> bool:
        """Run ``forward`` with symbolic sizes at two choices of sizes, and set ``met`` from its comparisons.

        ``sizes`` are those of the call; they are a third choice if the run at another one fails, because two numbers
        are equal by chance. Returns whether that succeeded: all members have the same outcomes, and no graph of another
        text does.
        """
        constants = frozenset(number for number in self.relation if type(number) is int)
        further = probe_sizes(
            self.bounds(), lambda one: one != sizes and self.covers(one), self.all_sizes, self.evaluate, constants
        )
        noted: dict[str, bool] = {}
        runs = 0
        for one in (*further, sizes):
            try:
                found = self._noted(model, *arguments_at(args, kwargs, self.evaluate(*one)), one)
            except Exception:  # of the user's code, or a fault in fuse, which must not reach the user
                continue
            if any(noted.setdefault(text, outcome) is not outcome for text, outcome in found.items()):
                return False
            runs += 1
        known = replace(self._named, values=sizes, noted=noted)
        return runs >= FEWEST_RUNS and self.decide(known.met())

    def _noted(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Numbers
    ) -> dict[str, bool]:
        """The comparisons of sizes in one run of ``forward``, with their outcomes."""
        conditions, numbers = lifted(self.relation, sizes, sizes, of_text=False, derived=self._named.quotients)
        last = self.members[-1].call
        formulas: dict[int, int] = {}
        several: set[int] = set()
        for position in self.distinct:
            number = numbers[position]
            if terms_of(formulas.setdefault(plain(number), number)) != terms_of(number):
                several.add(plain(number))
        for number in several:  # several formulas have this value
            del formulas[number]
        integers = numbers[: len(last.integers)]
        size_conditions(model, args, kwargs, formulas, integers, conditions, last.training is not None)
        return {text: outcome for text, outcome in conditions.noted.items() if UNKNOWN not in text}

    def decide(self, met: Callable[..., bool]) -> bool:
        """Set ``met`` if it is true for all members, and false for each graph of another text between them."""

        def tells(one: CapturedGraphs) -> bool:
            sizes = self.sizes(one.numbers[: one.arguments])
            return sizes is not None and met(*sizes) and self.covers(sizes)

        agree = all(map(tells, self.members)) and not any(map(tells, self.others))
        self.met = met if agree else None
        return agree


def generalised(graphs: Sequence[CapturedGraphs], fewest: int = FEWEST_OF_ONE_SIZE) -> Generalised | None:
    """Formulas for the numbers of all graphs with the text of the last one; None if there are too few graphs.

    With fewer than ``FEWEST_OF_ONE_SIZE``, nothing checks the formulas: they only tell how the layouts of arguments
    probably vary.
    """
    last = graphs[-1]
    alike = (one for one in graphs if one.text == last.text and all(map(are_alike, one.numbers, last.numbers)))
    same = [one for one in alike if all(map(_same_constants, one.call.graphs, last.call.graphs))]
    if len(same) < fewest or last.call.made_up:
        return None
    found = _polynomials(same, fewest)
    if found is None and fewest >= FEWEST_OF_ONE_SIZE:
        found = _with_derived_sizes(same)
    if found is None:
        return None
    positions, relation, derived = found
    names = _sizes(len(positions)).sizes
    if not _are_independent_sizes(names, relation, [one.numbers for one in same]):
        return None
    sources = [_source_of(name, relation[: last.arguments]) for name in names]
    columns: dict[Numbers, int] = {}
    for position, column in enumerate(zip(*(one.numbers for one in same), strict=True)):
        columns.setdefault(column, position)
    if not all(sources) or len(columns) > MOST_COLUMNS:
        return None
    return Generalised(
        tuple(same),
        tuple(one for one in graphs if one.text != last.text and one.arguments == last.arguments),
        relation,
        tuple(source for source in sources if source),
        tuple(_steps([one.numbers[position] for one in same]) for position in positions),
        derived,
        tuple(columns.values()),
        number_ranges(list(columns), _sizes(len(names), derived).evaluator([relation[i] for i in columns.values()])),
        SizedPrograms(len(names)),
    )


Formulas = tuple[tuple[int, ...], Relation, Derived]
"""The positions of the sizes among the numbers of a text; all numbers as polynomials in these and in derived sizes; and
the formulas of derived sizes."""


def _polynomials(same: Sequence[CapturedGraphs], fewest: int) -> Formulas | None:
    """Formulas without derived sizes for the numbers of graphs with one text; None if there are none."""
    last = same[-1]
    found = relation_of(last.numbers, [one.numbers for one in same[:-1]])
    if found is None or (len(found[0]) > 1 and len(same) < FEWEST):
        return None
    positions, relation = found
    if any(len({one.numbers[position] for one in same}) < fewest for position in positions):
        return None
    arguments = relation[: last.arguments]
    return (positions, relation, {}) if all(_source_of(f"n{i}", arguments) for i in range(len(positions))) else None


def _with_derived_sizes(same: Sequence[CapturedGraphs]) -> Formulas | None:
    """Formulas for the numbers of graphs with one text, some of which follow from derived sizes; None if there are
    none."""
    given = relation_of(*_now_and_before([one.numbers[: one.arguments] for one in same]))
    if len(same) < FEWEST or given is None:
        return None
    columns = list(zip(*(one.numbers for one in same), strict=True))
    clearest = min(range(len(same)), key=lambda i: _equal_by_chance(columns, given[0], i))
    chosen = same[clearest]
    numbers = [*(one.numbers for one in same if one is not chosen), chosen.numbers]
    found = relation_of(*_now_and_before(numbers), frozenset(chosen.numbers[position] for position in given[0]))
    if found is None or not set(given[0]) <= set(found[0]):
        return None
    if any(len(set(columns[position])) < FEWEST_OF_ONE_SIZE for position in found[0]):
        return None
    free = given[0]
    rest = [position for position in found[0] if position not in free]
    names = {position: f"n{i}" for i, position in enumerate(free)} | {p: f"derived{i}()" for i, p in enumerate(rest)}
    relation = renamed(found[1], [names[position] for position in found[0]])
    if not rest or not _products_vary(_moved([columns[position] for position in found[0]], columns)):
        return None
    derived = _formulas(chosen, relation, free, {names[position]: chosen.numbers[position] for position in rest})
    return (free, relation, derived) if derived is not None and _give((free, relation, derived), same) else None


def _now_and_before(numbers: Sequence[Numbers]) -> tuple[Numbers, Sequence[Numbers]]:
    return numbers[-1], numbers[:-1]


def _equal_by_chance(columns: Sequence[Numbers], sizes: Sequence[int], call: int) -> int:
    """How many numbers equal one of the sizes in this call, and not in all calls."""
    own = {columns[position] for position in sizes}
    values = {column[call] for column in own}
    return sum(column[call] in values for column in set(columns) - own)


def _moved(sizes: Sequence[Numbers], columns: Sequence[Numbers]) -> list[Numbers]:
    """The numbers that are sizes, or sizes plus a constant.

    >>> _moved([(2, 4, 3)], [(2, 4, 3), (5, 7, 6), (2, 4, 3), (4, 8, 6)])
    [(2, 4, 3), (5, 7, 6)]
    """
    distinct = dict.fromkeys(columns)
    return [one for one in distinct if any(len({a - b for a, b in zip(one, of, strict=True)}) == 1 for of in sizes)]


def _products_vary(columns: Sequence[Numbers]) -> bool:
    """Whether no product of two to four sizes, and no sum of two, is the same in all calls: it would be a constant.

    >>> _products_vary([(2, 4, 3), (24, 12, 16)]), _products_vary([(2, 4, 3), (24, 12, 17)])
    (False, True)
    """
    most = 4 if len(columns) <= FEW_COLUMNS else 3
    several = chain.from_iterable(combinations_with_replacement(columns, count) for count in range(2, most + 1))
    products = (map(prod, zip(*of, strict=True)) for of in several)
    sums = (map(sum, zip(*of, strict=True)) for of in combinations(columns, 2))
    return all(len(set(of)) > 1 for of in chain(products, sums))


def _formulas(
    call: CapturedGraphs, relation: Relation, sizes: Sequence[int], derived: Mapping[str, int]
) -> Derived | None:
    """The formulas of derived sizes, by their values in this call; ``sizes`` are positions among its numbers."""
    now = tuple(call.numbers[position] for position in sizes)
    conditions, numbers = lifted(relation, now, now, derived={name: str(value) for name, value in derived.items()})
    conditions.quotients.clear()  # the values are those of this call only
    try:
        return formulas_of(nodes_with(call.call.graphs, numbers[len(call.call.integers) :]), conditions, list(derived))
    except Exception:  # a fault in fuse must not reach the user: every size is captured
        return None


def _give(formulas: Formulas, calls: Sequence[CapturedGraphs]) -> bool:
    """Whether formulas give the numbers of all calls, and those of a derived size agree."""
    positions, relation, derived = formulas
    conditions = _sizes(len(positions), derived)
    numbers = conditions.evaluator(relation)
    choices = [conditions.function(f"{{{', '.join(of)}}}") for of in derived.values()]
    of_calls = [(one.numbers, [one.numbers[position] for position in positions]) for one in calls]
    return all(numbers(*sizes) == own and all(len(of(*sizes)) == 1 for of in choices) for own, sizes in of_calls)


def _sizes(count: int, derived: Derived | None = None) -> Conditions:
    """So many sizes by their names, and sizes derived from them, without conditions."""
    names = tuple(f"n{i}" for i in range(count))
    return Conditions(names, quotients={name: formulas[0] for name, formulas in (derived or {}).items()})


def _small(numbers: Numbers) -> tuple[tuple[int, Any], ...]:
    """The integers that are too small to vary, with their positions.

    >>> _small((5, 1, 64, -1, 0.5))
    ((1, 1), (3, -1))
    """
    return tuple((i, n) for i, n in enumerate(numbers) if type(n) is int and abs(n) < LEAST_LOWERED)


def _same_constants(one: GraphModule, other: GraphModule) -> bool:
    """Whether two graphs of one text have equal constant tensors, except those that are computed from sizes."""
    pairs = zip(one.meta["signature"].inputs, other.meta["signature"].inputs, strict=True)
    made = ((a.value, b.value) for a, b in pairs if a.value is not None and a.origin is None)
    return all(a is b or (b is not None and a.dtype == b.dtype and torch.equal(a, b)) for a, b in made)


def _are_independent_sizes(names: Sequence[str], relation: Relation, calls: Sequence[Numbers]) -> bool:
    """Whether the sizes of these calls vary independently, so that formulas in them are unique.

    They do not if a size is a linear combination of others and a constant, of another and their product, or a product
    of powers of others: if 2 * n0 + n1 is always 20, or n0 * n1 is always 48, the numbers 20 and 48 are unknown at
    other sizes. These numbers need not be in a graph: the gradient of a mean is divided by 48, which may give a float.

    >>> relation = ((("n0",), 1),), ((("n1",), 1),)
    >>> _are_independent_sizes(("n0", "n1"), relation, [(8, 6), (12, 4), (16, 3), (24, 2)])  # the product is always 48
    False
    >>> _are_independent_sizes(("n0", "n1"), relation, [(8, 6), (12, 4), (16, 5), (24, 2)])
    True
    """
    columns: dict[str, dict[Numbers, None]] = {}  # by size: its values, and the values of size plus a constant
    for terms, column in zip(relation, zip(*calls, strict=True), strict=True):
        if isinstance(terms, tuple):
            ((factors, times), *_) = (term for term in terms if term[0])
            alone = len(factors) == 1 and sum(1 for term in terms if term[0]) == 1
            if alone and factors[0] in names and abs(times) == 1:
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
