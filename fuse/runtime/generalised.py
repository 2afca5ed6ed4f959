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
- Each number of the new graph is between the least and the largest value that it had in captured graphs, and the order
  of any two numbers occurred in one of these graphs. So a comparison without a record (in a pass, in the decomposition
  of an operator) has an outcome that it had before, with the same text.

Kernels are looked up or made as for a capture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fuse.graph.signature import InputSpec
from fuse.kernel.extents import LEAST_LOWERED, Conditions, plain, terms_of
from fuse.kernel.polynomials import Terms
from fuse.kernel.region_text import Numbers
from fuse.kernel.sized import Relation, are_alike, lifted, relation_of
from fuse.runtime.guards import sources_of
from fuse.runtime.number_ranges import NumberRanges, number_ranges
from fuse.runtime.probing_sizes import arguments_at, probe_sizes
from fuse.runtime.program import Program
from fuse.runtime.resized import arguments_in, spelled_graphs
from fuse.runtime.size_reads import UNKNOWN, size_conditions
from fuse.runtime.sized_programs import SizedPrograms
from fuse.runtime.training import Training
from fuse.runtime.variants import Compiled

FEWEST = 4
"""Fewest calls with one text where several sizes vary: with fewer, several formulas may fit."""
FEWEST_OF_ONE_SIZE = 3
"""Fewest calls where one size varies, and fewest values of each size: a formula in one size (a multiple, a sum with a
constant, a multiple of a square) follows from one or two calls, and the others check it."""
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
        distinct: positions of the distinct numbers.
        ranges: the values and orders that these had.
        met: whether all comparisons in ``forward`` have the same outcomes at other sizes; None before it was run.
        programs: programs for its sizes without a graph.
        _origins: those of the placeholders' tensors, once they are known.
    """

    members: tuple[CapturedGraphs, ...]
    others: tuple[CapturedGraphs, ...]
    relation: Relation
    sources: tuple[tuple[int, int, int], ...]
    steps: tuple[tuple[int, int], ...]
    distinct: tuple[int, ...]
    ranges: NumberRanges
    met: Callable[..., bool] | None = None
    programs: SizedPrograms = field(default_factory=SizedPrograms)
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
        return _sizes(len(self.sources)).evaluator(self.relation)

    @cached_property
    def _evaluate_arguments(self) -> Callable[..., Numbers]:
        return _sizes(len(self.sources)).evaluator(self.relation[: self.members[-1].arguments])

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
        return self.ranges.include(sizes)

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
        """Run ``forward`` with symbolic sizes at ``sizes`` and at two others, and set ``met`` from its comparisons.

        Returns whether that succeeded: all members have the same outcomes, and no graph of another text does.
        """
        further = probe_sizes(self.bounds(), lambda one: one != sizes and self.covers(one), self.evaluate)
        noted: dict[str, bool] = {}
        for one in (sizes, *further):
            try:
                found = self._noted(model, *arguments_at(args, kwargs, self.evaluate(*one)), one)
            except Exception:  # of the user's code, or a fault in fuse, which must not reach the user
                return False
            if any(noted.setdefault(text, outcome) is not outcome for text, outcome in found.items()):
                return False
        known = replace(_sizes(len(sizes)), values=sizes, noted=noted)
        return bool(further) and self.decide(known.met())

    def _noted(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Numbers
    ) -> dict[str, bool]:
        """The comparisons of sizes in one run of ``forward``, with their outcomes."""
        conditions, numbers = lifted(self.relation, sizes, sizes, of_text=False)
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
    found = relation_of(last.numbers, [one.numbers for one in same[:-1]])
    if found is None or (len(found[0]) > 1 and len(same) < FEWEST):
        return None
    positions, relation = _in_order(*found)
    names = _sizes(len(positions)).sizes
    if any(len({one.numbers[position] for one in same}) < fewest for position in positions):
        return None
    if not _are_independent_sizes(relation, [one.numbers for one in same]):
        return None
    sources = [_source_of(name, relation[: last.arguments]) for name in names]
    if not all(sources):
        return None
    columns: dict[Numbers, int] = {}
    for position, column in enumerate(zip(*(one.numbers for one in same), strict=True)):
        columns.setdefault(column, position)
    if len(columns) > MOST_COLUMNS:
        return None
    return Generalised(
        tuple(same),
        tuple(one for one in graphs if one.text != last.text and one.arguments == last.arguments),
        relation,
        tuple(source for source in sources if source),
        tuple(_steps([one.numbers[position] for one in same]) for position in positions),
        tuple(columns.values()),
        number_ranges(list(columns), _sizes(len(names)).evaluator([relation[i] for i in columns.values()])),
    )


def _in_order(positions: Sequence[int], relation: Relation) -> tuple[tuple[int, ...], Relation]:
    """The sizes in the order of their positions, so that a further captured call does not change it.

    >>> _in_order((3, 0), (((("n1",), 1),), 8, ((("n0", "n1"), 2),), ((("n0",), 1),)))
    ((0, 3), (((('n0',), 1),), 8, ((('n0', 'n1'), 2),), ((('n1',), 1),)))
    """
    names = {f"n{i}": f"n{new}" for new, i in enumerate(sorted(range(len(positions)), key=lambda i: positions[i]))}

    def renamed(terms: Terms) -> Terms:
        return tuple(sorted((tuple(sorted(names[name] for name in factors)), times) for factors, times in terms))

    ordered = (renamed(terms) if isinstance(terms, tuple) else terms for terms in relation)
    return tuple(sorted(positions)), tuple(ordered)


def _sizes(count: int) -> Conditions:
    """So many sizes by their names, without conditions."""
    return Conditions(tuple(f"n{i}" for i in range(count)))


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
