"""Programs for further sizes, from those that were made for some: no graph is copied, no region is lowered.

    sizes     result        kernel's size   workspace
    (50, 3)   [50, 3, 64]   n = 150         38,400       programs of graphs that were resized
    (20, 5)   [20, 5, 64]   n = 100         25,600       (fuse/runtime/resizing/resized.py), all with one outline
    ...
    (n0, n1)  [n0, n1, 64]  n = n0 * n1     256 * n0 * n1
    (37, 4)   [37, 4, 64]   n = 148         37,888       the same steps with these numbers

A graph for all sizes (:mod:`fuse.runtime.generalising.generalised`) gives equal steps at all of its sizes, apart from
numbers. A number of a step is a size, a stride, an offset or a product of these, and so a polynomial in the sizes
(:mod:`fuse.runtime.resizing.fitting`). A program is made in this way only for sizes between those of the samples. Its
kernels are asked whether they serve these sizes. Where there is no polynomial, each size has its graph resized.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

from torch import Tensor

from fuse.graph.signature import Signature
from fuse.kernel.arithmetic.extents import Conditions
from fuse.kernel.arithmetic.polynomials import Terms
from fuse.kernel.sizes.region_text import Numbers
from fuse.runtime.guards.call_guards import picker
from fuse.runtime.programs.program import Program
from fuse.runtime.programs.steps import kernels_of
from fuse.runtime.programs.wiring import Wiring, wiring_of
from fuse.runtime.resizing.fitting import MOST_SIZES, Samples, fewest_samples
from fuse.runtime.resizing.resized import NotResized
from fuse.runtime.resizing.schedule_numbers import SizedPart, outline_and_numbers
from fuse.runtime.resizing.sized_code import copier
from fuse.runtime.resizing.sized_constants import Constants, constant_numbers, sized_constants

MOST_SAMPLES = 48
"""Most samples of one outline that are kept, and most calls whose graphs are resized only to be samples."""

Outline = tuple[Hashable, ...]


@dataclass(frozen=True)
class SizedProgram:
    """The program of a part at sizes for which no graph was made."""

    program: Program
    signature: Signature
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class _Sample:
    """The sizes of a call, and the numbers of its parts and of their constants."""

    sizes: Numbers
    numbers: Numbers


@dataclass(frozen=True)
class _Template:
    """The parts of calls with one outline, as functions of the sizes.

    ``copy`` makes the parts, which have these ``wirings``. ``evaluate`` computes their numbers; the last of these are
    those of ``constants``, which are computed from sizes: how many there are in each part, and its inputs with them.
    ``bounds``: the least and the largest value of each size among the samples. ``functions``: the addresses of the
    kernels.
    """

    copy: Callable[..., list[SizedPart]]
    evaluate: Callable[..., Numbers]
    wirings: tuple[Wiring, ...]
    constants: tuple[tuple[int, Constants], ...]
    bounds: tuple[tuple[int, int], ...]
    functions: dict[str, int]

    def at(self, sizes: Numbers) -> tuple[SizedProgram, ...] | None:
        """The programs for these sizes; None if they are out of bounds, or if a kernel does not serve them."""
        if not self.bounded(sizes):
            return None
        made = []
        try:
            of_constants = sum(count for count, _ in self.constants)
            rest = iter(self.evaluate(*sizes)[-of_constants:] if of_constants else ())
            for part, wiring, (count, inputs) in zip(self.copy(*sizes), self.wirings, self.constants, strict=True):
                signature = part.signature
                if count:
                    signature = replace(signature, inputs=inputs(tuple(islice(rest, count))))
                made.append(SizedProgram(Program(part.plan, self.functions, wiring), signature, part.tensors))
        except NotResized:
            return None
        return tuple(made)

    def bounded(self, sizes: Numbers) -> bool:
        """Whether the sizes are between those of the samples."""
        return all(low <= size <= high for size, (low, high) in zip(sizes, self.bounds, strict=True))

    def extended(self, sample: _Sample) -> _Template | None:
        """The template with wider bounds; None if the sample has other numbers."""
        if self.evaluate(*sample.sizes) != sample.numbers:
            return None
        bounds = [(min(low, n), max(high, n)) for n, (low, high) in zip(sample.sizes, self.bounds, strict=True)]
        return replace(self, bounds=tuple(bounds))


@dataclass(eq=False)
class SizedPrograms:
    """The samples and the templates of a generalised graph, by outline.

    Sizes are those of the arguments, of which there are ``free``, and then those that operators compute from them.
    ``of_graph``: the graph's numbers as polynomials in sizes.
    ``learnt``: calls of resized graphs that were added. ``_refuted``: outlines in which some number is no polynomial.
    """

    free: int
    of_graph: tuple[Terms, ...] = ()
    learnt: int = 0
    _learnt: set[Numbers] = field(default_factory=set)
    _samples: dict[Outline, list[_Sample]] = field(default_factory=dict)
    _templates: dict[Outline, _Template] = field(default_factory=dict)
    _refuted: set[Outline] = field(default_factory=set)

    def at(self, sizes: Numbers) -> tuple[SizedProgram, ...] | None:
        """The programs for a call with these sizes, one for each graph; None if graphs have to be resized."""
        return next((made for one in self._templates.values() if (made := one.at(sizes)) is not None), None)

    def learns(self, sizes: Numbers) -> bool:
        """Whether a program of a graph that is resized to these sizes is worth making, although they may be rare."""
        return self.learnt < MOST_SAMPLES and not self.bounded(sizes) and sizes not in self._learnt

    def bounded(self, sizes: Numbers) -> bool:
        """Whether a template has these sizes in its bounds; its kernels may still not serve them."""
        return any(one.bounded(sizes) for one in self._templates.values())

    def beyond(self, sizes: Numbers) -> bool:
        """Whether there are templates, but none with these sizes in its bounds, nor a sample of these sizes."""
        return bool(self._templates) and not self.bounded(sizes) and sizes not in self._learnt

    def give_up(self) -> None:
        """Make no programs, and ask for none."""
        self.learnt = MOST_SAMPLES
        self._templates.clear()

    def learn(self, sizes: Numbers, parts: tuple[SizedPart, ...]) -> None:
        """Add the schedules that were made from resized graphs; without any, no more are asked for."""
        self.learnt += 1
        self._learnt.add(sizes)
        try:
            outline, numbers = outline_and_numbers(parts)
        except NotResized:
            outline = ()
        if not outline or len(sizes) > MOST_SIZES:
            self.learnt = MOST_SAMPLES
            return
        self._add(sizes, parts, outline, numbers)

    def _add(self, sizes: Numbers, parts: tuple[SizedPart, ...], outline: Outline, numbers: Numbers) -> None:
        constants = [constant_numbers(part.signature.inputs) for part in parts]
        outline = (*outline, *map(len, constants))
        if outline in self._refuted:
            return
        sample = _Sample(sizes, (*numbers, *chain(*constants)))
        if (known := self._templates.pop(outline, None)) is not None:
            made = known.extended(sample)
        else:
            samples = self._samples.setdefault(outline, [])
            samples.append(sample)
            del samples[:-MOST_SAMPLES]
            known_at = Samples(tuple(one.sizes for one in samples), self.free, self.of_graph)
            if len(samples) < fewest_samples(len(sizes)) or not known_at.determine():
                return
            made = _template(parts, samples, known_at, tuple(map(len, constants)))
            del self._samples[outline]
        if made is not None:
            self._templates[outline] = made
        else:
            self._refuted.add(outline)
            self.learnt = MOST_SAMPLES


def _template(
    parts: tuple[SizedPart, ...], samples: Sequence[_Sample], known_at: Samples, constants: tuple[int, ...]
) -> _Template | None:
    """The template of calls with the outline of ``parts``; None if a number is no polynomial."""
    had = known_at.sizes
    columns = list(zip(*(one.numbers for one in samples), strict=True))
    formulas: dict[tuple[Any, ...], Terms] = {}
    for column in columns:
        if column not in formulas:
            terms = known_at.polynomial_through(column)
            if terms is None:
                return None
            formulas[column] = terms
    position = {column: i for i, column in enumerate(formulas)}
    pick = picker([position[column] for column in columns])
    distinct = _evaluator(formulas.values(), len(had[0]))
    varying = {column: terms for column, terms in formulas.items() if len(set(column)) > 1}
    varies = {column: i for i, column in enumerate(varying)}
    inputs = [sized_constants(part.signature.inputs) for part in parts]
    made = copier(parts, [varies.get(column) for column in columns], len(varying))
    numbers = _evaluator(varying.values(), len(had[0]))
    bounds = tuple((min(of), max(of)) for of in zip(*had, strict=True))
    functions: dict[str, int] = {}
    for part in parts:
        functions |= part.plan.runtime.functions(list({one.name: one for one in kernels_of(part.plan)}.values()))
    return _Template(
        lambda *sizes: made(*numbers(*sizes)),
        lambda *sizes: pick(distinct(*sizes)),
        tuple(wiring_of(part.plan).shared() for part in parts),
        tuple(zip(constants, inputs, strict=True)),
        bounds,
        functions,
    )


def _evaluator(formulas: Iterable[Terms], sizes: int) -> Callable[..., Numbers]:
    """A function of so many sizes that computes these polynomials."""
    return Conditions(tuple(f"n{i}" for i in range(sizes))).evaluator(list(formulas))
