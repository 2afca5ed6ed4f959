"""Generalised graphs: one rewritten graph for all sizes between captured ones.

    x [50, 3, 64]   captured                        graph A of (50, 3)
    x [20, 5, 64]   captured                        graph A of (20, 5)
    x [61, 9, 64]   captured                        graph A of (61, 9)
    x [33, 2, 64]   captured                        graph A of (33, 2)
    x [37, 4, 64]   between them: not captured      graph A of (37, 4): its loop takes 37 steps, its view is [148, 64]

A call at new sizes gets the graph of others if all of these conditions hold:

- Graphs of at least ``FEWEST`` calls of this kind (``FEWEST_OF_ONE_SIZE`` where one size varies) have the same text,
  and all their numbers are formulas in the sizes of the arguments.
- ``forward`` was run with symbolic sizes (:mod:`fuse.runtime.size_reads`) at two sizes
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
from typing import Any

from torch import Tensor, nn

from fuse.graph.signature import InputSpec
from fuse.kernel.extents import LEAST_LOWERED, Conditions, plain, terms_of
from fuse.kernel.region_text import Numbers
from fuse.kernel.relations import Relation, are_alike, lifted
from fuse.runtime.captured_calls import CapturedGraphs, same_constants
from fuse.runtime.guards import sources_of
from fuse.runtime.number_formulas import FEWEST_OF_ONE_SIZE, Derived, formulas_through, named_sizes, source_of
from fuse.runtime.number_ranges import NumberRanges, number_ranges
from fuse.runtime.probing_sizes import arguments_at, probe_sizes
from fuse.runtime.size_reads import UNKNOWN, size_conditions
from fuse.runtime.sized_programs import SizedPrograms

FEWEST_RUNS = 2
"""Fewest runs of ``forward`` with symbolic sizes: at one choice of sizes, two numbers may be equal by chance."""

MOST_COLUMNS = 256
"""Most distinct numbers of a graph, whose order is compared pair by pair; larger graphs are captured at each size."""


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
        return named_sizes(len(self.sources), self.derived)

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
    same = [one for one in alike if all(map(same_constants, one.call.graphs, last.call.graphs))]
    if len(same) < fewest or last.call.made_up:
        return None
    formulas = formulas_through(same, fewest)
    if formulas is None:
        return None
    relation, names = formulas.relation, formulas.sizes.sizes
    sources = [source_of(name, relation[: last.arguments]) for name in names]
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
        tuple(_steps([one.numbers[position] for one in same]) for position in formulas.positions),
        formulas.derived,
        tuple(columns.values()),
        number_ranges(list(columns), formulas.sizes.evaluator([relation[i] for i in columns.values()])),
        SizedPrograms(len(names)),
    )


def _steps(had: Sequence[int]) -> tuple[int, int]:
    """The first of several numbers, and the greatest common divisor of their differences.

    >>> _steps([24, 8, 40])
    (24, 16)
    """
    return had[0], math.gcd(*(one - had[0] for one in had))
