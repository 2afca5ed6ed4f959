"""Generalised graphs: one rewritten graph for all sizes between captured ones.

    x [50, 3, 64]   captured                        graph A of (50, 3)
    x [20, 5, 64]   captured                        graph A of (20, 5)
    x [61, 9, 64]   captured                        graph A of (61, 9)
    x [33, 2, 64]   captured                        graph A of (33, 2)
    x [37, 4, 64]   between them: not captured      graph A of (37, 4): its loop takes 37 steps, its view is [148, 64]

A call at new sizes gets the graph of others if all of these conditions hold:

- Graphs of at least ``FEWEST`` calls of this kind (``FEWEST_OF_ONE_SIZE`` where one size varies) have the same text,
  and all their numbers are formulas in the sizes of the arguments.
- ``forward`` was run with symbolic sizes (:mod:`fuse.runtime.size_uses.size_reads`) at two sizes
  (:mod:`fuse.runtime.size_uses.probing_sizes`), and each recorded comparison has the same outcome for the new sizes.
- Each new size differs from captured ones by a multiple of the greatest common divisor of their differences: if all
  were even, nothing is known of odd ones. The captured sizes vary independently: if all batches have 48 tokens, a
  division by 48 could also be a division by the number of tokens.
- A number may also be made of sizes that operators compute by a division (:mod:`fuse.runtime.size_uses.derived_sizes`),
  or that ``forward`` computes so (:mod:`fuse.runtime.size_uses.forward_numbers`), as long as all formulas of these
  agree on the new sizes.
- Each number of the new graph is between the least and the largest value that it had in captured graphs, and the order
  of any two numbers occurred in one of these graphs. So a comparison without a record (in a pass, in the decomposition
  of an operator) has an outcome that it had before, with the same text.

Kernels are looked up or made as for a capture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any

from torch import Tensor, nn

from fuse.graph.signature import InputSpec
from fuse.graph.values.told_values import telling
from fuse.kernel.arithmetic.extents import LEAST_LOWERED, Conditions, plain, terms_of
from fuse.kernel.arithmetic.polynomials import Terms, sum_of
from fuse.kernel.sizes.region_text import MOVED, Numbers, is_moved
from fuse.kernel.sizes.relations import Relation, are_alike, lifted
from fuse.runtime.generalising.captured_calls import CapturedGraphs, same_constants
from fuse.runtime.generalising.number_formulas import (
    FEWEST_OF_ONE_SIZE,
    Derived,
    formulas_through,
    named_sizes,
    source_of,
)
from fuse.runtime.generalising.number_ranges import NumberRanges, number_ranges
from fuse.runtime.guards.call_guards import sources_of
from fuse.runtime.resizing.sized_programs import SizedPrograms
from fuse.runtime.size_uses.derived_sizes import Equation, in_given_sizes
from fuse.runtime.size_uses.forward_numbers import UNKNOWN, agreements, equal_numbers, equations_with, expressions_of
from fuse.runtime.size_uses.loop_steps import Place
from fuse.runtime.size_uses.probing_sizes import arguments_at, probe_sizes
from fuse.runtime.size_uses.size_reads import NeedsWatching, size_conditions
from fuse.runtime.size_uses.watched_loops import StepDifference

FEWEST_RUNS = 2
"""Fewest runs of ``forward`` with symbolic sizes: at one choice of sizes, two numbers may be equal by chance."""

MOST_RUNS = 3
"""Most runs of ``forward`` at sizes of members, to find out which numbers it computes."""
MOST_COLUMNS = 256
"""Most distinct numbers of a graph, whose order is compared pair by pair; larger graphs are captured at each size."""


@dataclass(frozen=True)
class Followed:
    """The comparisons of sizes in ``forward`` with their outcomes, what it computes by divisions, and the plain numbers
    that it counted, such as lengths of lists, which are constants only if they are the same in all runs. ``recorded``:
    what differs between steps of loops, and is no plain number."""

    noted: Mapping[str, bool]
    expressions: Sequence[str]
    counted: tuple[Hashable, ...]
    recorded: frozenset[tuple[Place, str]]

    def tells(self, differences: Collection[StepDifference]) -> bool:
        """Whether it tells all that differs between the steps of a captured call's loops."""
        rest = (one for one in differences if (one.place, one.what) not in self.recorded)
        return all((*one.place, one.count) in self.counted for one in rest)


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
        derived: the formulas of sizes that are computed; none as long as they are unknown.
        equations: those that operators give for them.
        own: whether sizes that operators are told have to be numbers of ``forward``, and not computed in C++.
        distinct: positions of the distinct numbers.
        programs: programs for its sizes without a graph.
        followed: what ``forward`` compares and computes; None before it was run.
        met: whether comparisons have the same outcomes at other sizes, and equal numbers are equal; None before.
        watched: whether sizes are watched while ``forward`` runs with them, because it may look them up in tables.
        unfollowed: why a run of ``forward`` with symbolic sizes failed; empty if none did.
        _origins: those of the placeholders' tensors, once they are known.
    """

    members: tuple[CapturedGraphs, ...]
    others: tuple[CapturedGraphs, ...]
    relation: Relation
    sources: tuple[tuple[int, int, int], ...]
    steps: tuple[tuple[int, int], ...]
    derived: Derived
    equations: tuple[Equation, ...]
    own: bool
    distinct: tuple[int, ...]
    programs: SizedPrograms
    followed: Followed | None = None
    met: Callable[..., bool] | None = None
    watched: bool = False
    unfollowed: str = ""
    _origins: tuple[int | Tensor, ...] | None = None

    @property
    def checked(self) -> bool:
        """Whether there are enough members that some of them check the formulas of the others."""
        return len(self.members) >= FEWEST_OF_ONE_SIZE

    @cached_property
    def facts(self) -> Hashable:
        """The values that its calls read."""
        learning = self.members[-1].call.learning
        return learning and learning.facts()

    @property
    def unknown(self) -> list[str]:
        """The sizes without a formula, for which ``forward`` has to be followed."""
        return [name for name, formulas in self.derived.items() if not formulas]

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

    @cached_property
    def ranges(self) -> NumberRanges:
        """The values and orders that the distinct numbers had."""
        return number_ranges(list(self._columns), self._named.evaluator(list(self._columns.values())))

    @cached_property
    def _columns(self) -> dict[Numbers, int | Terms]:
        """The distinct numbers by their values in the members."""
        numbers = [one.numbers for one in self.members]
        found: dict[Numbers, int | Terms] = {}
        for place in self.distinct:
            column, terms = tuple(of[place] for of in numbers), self.relation[place]
            if is_moved(column):
                column = tuple(number - MOVED for number in column)
                terms = sum_of(terms, (((), -MOVED),)) if isinstance(terms, tuple) else terms - MOVED
            found.setdefault(column, terms)
        return found

    def are_told(self, sizes: Sequence[int]) -> bool:
        """Whether the formulas of each derived size agree on these sizes, and it is large enough to vary."""
        return bool(self._are_told(*sizes))

    @cached_property
    def _agree(self) -> Callable[..., Any]:
        return self._named.function(" and ".join(f"{' == '.join(of)}" for of in self.derived.values()) or "True")

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

    def told(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Generalised | None:
        """The same with formulas for all sizes, by the numbers that ``forward`` computes at sizes of members; None if
        some stay unknown."""
        sizes = sorted(dict.fromkeys(self.had()), key=prod, reverse=True)[:MOST_RUNS]
        runs = [run for one in sizes if (run := self._run(model, args, kwargs, one)) is not None]
        expressions = tuple(dict.fromkeys(chain(*(run.expressions for run in runs))))
        equal = equal_numbers(expressions, self.had(), self._columns, self._named)
        further = equations_with(equal, self.unknown, self._named)
        known = in_given_sizes([*self.equations, *further], list(self.derived))
        if known is None or not all(known.values()) or any(run.counted != runs[0].counted for run in runs):
            return None
        recorded = frozenset(chain(*(run.recorded for run in runs)))
        made = replace(self, derived=known, followed=Followed({}, expressions, runs[0].counted, recorded))
        return made if made.gives(self.members) else None

    def gives(self, calls: Sequence[CapturedGraphs]) -> bool:
        """Whether the formulas give the numbers of these calls, and those of a derived size agree."""
        sizes = (self.sizes(one.numbers[: one.arguments]) for one in calls)
        pairs = zip(sizes, calls, strict=True)
        return all(of is not None and self._agree(*of) and self.evaluate(*of) == one.numbers for of, one in pairs)

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
        expressions = dict.fromkeys(self.followed.expressions if self.followed else ())
        counted = [self.followed.counted] if self.followed else []
        recorded = self.followed.recorded if self.followed else frozenset()
        runs = 0
        for one in (*further, sizes):
            run = self._run(model, args, kwargs, one)
            if run is None:
                continue
            if any(noted.setdefault(text, outcome) is not outcome for text, outcome in run.noted.items()):
                return False
            expressions |= dict.fromkeys(run.expressions)
            counted.append(run.counted)
            recorded |= run.recorded
            runs += 1
        if runs < FEWEST_RUNS or any(one != counted[0] for one in counted):
            return False
        return self.decide(Followed(noted, tuple(expressions), counted[0], recorded))

    def _run(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Numbers
    ) -> Followed | None:
        """One run of ``forward`` at these sizes, with watched sizes if need be; None if it fails."""
        try:
            return self._run_once(model, args, kwargs, sizes)
        except NeedsWatching as needed:
            if not self.watched:
                self.watched = True
                return self._run(model, args, kwargs, sizes)
            self.unfollowed = str(needed)
            return None
        except Exception as error:  # of the user's code, or a fault in fuse, which must not reach the user
            self.unfollowed = str(error).partition("\n")[0] or type(error).__name__
            return None

    def _run_once(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Numbers
    ) -> Followed | None:
        given = arguments_at(args, kwargs, self._evaluate_arguments(*sizes))
        conditions, numbers = self._lifted(sizes)
        last = self.members[-1]
        layouts = numbers[len(last.call.integers) : last.arguments]
        integers = numbers[: len(last.call.integers)]
        training = last.call.training is not None
        formulas = _by_value(numbers)
        with telling(model, last.call.learning):
            uses = size_conditions(model, *given, formulas, integers, conditions, training, layouts, self.watched)
        if self.own and not uses.told:
            return None
        noted = {text: outcome for text, outcome in conditions.noted.items() if UNKNOWN not in text}
        return Followed(noted, expressions_of(conditions), uses.counted, uses.recorded)

    def _lifted(self, sizes: Numbers) -> tuple[Conditions, Numbers]:
        """The numbers of the arguments, and other distinct ones of which no factor is unknown, as extents."""
        further = (self.relation[place] for place in self.distinct if place >= self.members[-1].arguments)
        known = (one for one in further if type(one) is not tuple or not _factors(one) & set(self.unknown))
        relation = (*self.relation[: self.members[-1].arguments], *known)
        conditions, numbers = lifted(relation, sizes, sizes, of_text=False, derived=self._named.quotients)
        conditions.computed = {} if self.own else None
        return conditions, numbers

    def decide(self, followed: Followed) -> bool:
        """Set ``met`` if it is true for all members, and false for each graph of another text between them."""
        equal = equal_numbers(followed.expressions, self.had(), self._columns, self._named)
        met = replace(self._named, noted={**followed.noted, **agreements(equal, self._named)}).met()

        def tells(one: CapturedGraphs) -> bool:
            sizes = self.sizes(one.numbers[: one.arguments])
            return sizes is not None and met(*sizes) and self.covers(sizes)

        known = all(followed.tells(one.call.step_differences) for one in self.members)
        agree = known and all(map(tells, self.members)) and not any(map(tells, self.others))
        self.followed, self.met = (followed, met) if agree else (None, None)
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
        formulas.equations.of_operators,
        formulas.equations.own or not all(formulas.derived.values()),
        tuple(columns.values()),
        SizedPrograms(len(names), _polynomials_in(relation, [*names, *formulas.derived])),
    )


def _polynomials_in(relation: Relation, names: Sequence[str]) -> tuple[Terms, ...]:
    """The polynomials of a relation, with these names in the order of their sizes.

    >>> _polynomials_in((8, ((("half()", "n0"), 4),)), ["n0", "half()"])
    (((('n0', 'n1'), 4),),)
    """
    new = {name: f"n{i}" for i, name in enumerate(names)}
    polynomials = dict.fromkeys(terms for terms in relation if isinstance(terms, tuple))
    return tuple(
        tuple(sorted((tuple(sorted(new[name] for name in factors)), times) for factors, times in terms))
        for terms in polynomials
    )


def _by_value(numbers: Numbers) -> dict[int, int]:
    """Numbers by their values, unless several have one value."""
    found: dict[int, int] = {}
    several: set[int] = set()
    for number in numbers:
        if terms_of(found.setdefault(plain(number), number)) != terms_of(number):
            several.add(plain(number))
    return {value: number for value, number in found.items() if value not in several}


def _factors(terms: Terms) -> set[str]:
    return {factor for factors, _ in terms for factor in factors}


def _steps(had: Sequence[int]) -> tuple[int, int]:
    """The first of several numbers, and the greatest common divisor of their differences.

    >>> _steps([24, 8, 40])
    (24, 16)
    """
    return had[0], math.gcd(*(one - had[0] for one in had))
