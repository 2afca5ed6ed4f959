"""Programs for further sizes, from those that were made for some: no graph is copied, no region is lowered.

    sizes     result        kernel's size   workspace
    (50, 3)   [50, 3, 64]   n = 150         38,400       programs of graphs that were resized
    (20, 5)   [20, 5, 64]   n = 100         25,600       (fuse/runtime/resized.py), all with one outline
    ...
    (n0, n1)  [n0, n1, 64]  n = n0 * n1     256 * n0 * n1
    (37, 4)   [37, 4, 64]   n = 148         37,888       the same steps with these numbers

A graph for all sizes (:mod:`fuse.runtime.generalised`) gives equal steps at all of its sizes, apart from numbers. A
number of a step is a size, a stride, an offset or a product of these, and so a polynomial in the sizes
(:mod:`fuse.runtime.fitting`). A program is made in this way only for sizes between those of the samples. Its kernels
are asked whether they serve these sizes. Where there is no polynomial, each size has its graph resized.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fuse.graph.signature import Signature
from fuse.kernel.extents import Conditions
from fuse.kernel.region_text import Numbers
from fuse.runtime.fitting import MOST_SIZES, determine, fewest_samples, polynomial_through
from fuse.runtime.guards import picker
from fuse.runtime.program import Program
from fuse.runtime.resized import NotResized, constant_numbers, with_constants
from fuse.runtime.schedule_numbers import NotSplit, outline_and_numbers, with_numbers
from fuse.runtime.steps import Schedule, kernels_of

MOST_SAMPLES = 24
"""Most samples of one outline that are kept, and most programs that are made from resized graphs only to be samples."""

Outline = tuple[Hashable, ...]


@dataclass(frozen=True)
class _Sample:
    """The sizes of a call, and the numbers of its schedule, results and constants."""

    sizes: Numbers
    numbers: Numbers


@dataclass(frozen=True)
class _Template:
    """The steps of one outline with formulas.

    ``evaluate`` computes the numbers from sizes; those from ``constants`` on are of constants that are computed from
    sizes. ``bounds``: the least and the largest value of each size among the samples. ``functions``: the addresses of
    the kernels.
    """

    plan: Schedule
    signature: Signature
    evaluate: Callable[..., Numbers]
    constants: int
    bounds: tuple[tuple[int, int], ...]
    functions: dict[str, int]

    def at(self, sizes: Numbers) -> SizedProgram | None:
        """The program for these sizes; None if they are out of bounds, or if a kernel does not serve them."""
        if not self.bounded(sizes):
            return None
        numbers = self.evaluate(*sizes)
        try:
            plan, outputs = with_numbers(self.plan, self.signature.outputs, iter(numbers))
            inputs = with_constants(self.signature.inputs, numbers[self.constants :])
        except (NotSplit, NotResized):
            return None
        return SizedProgram(Program(plan, self.functions), replace(self.signature, inputs=inputs, outputs=outputs))

    def bounded(self, sizes: Numbers) -> bool:
        """Whether the sizes are between those of the samples."""
        return all(low <= size <= high for size, (low, high) in zip(sizes, self.bounds, strict=True))

    def extended(self, sample: _Sample) -> _Template | None:
        """The template with wider bounds; None if the sample has other numbers."""
        if self.evaluate(*sample.sizes) != sample.numbers:
            return None
        bounds = [(min(low, n), max(high, n)) for n, (low, high) in zip(sample.sizes, self.bounds, strict=True)]
        return replace(self, bounds=tuple(bounds))


@dataclass(frozen=True)
class SizedProgram:
    """A program for sizes of which no graph was made, with the signature of its graph."""

    program: Program
    signature: Signature


@dataclass(eq=False)
class SizedPrograms:
    """The samples and the templates of a generalised graph, by outline. Of a template, the latest samples are used.

    ``made``: programs that templates gave. ``learnt``: programs of resized graphs that were added.
    """

    made: int = 0
    learnt: int = 0
    _learnt: set[Numbers] = field(default_factory=set)
    _samples: dict[Outline, list[_Sample]] = field(default_factory=dict)
    _templates: dict[Outline, _Template] = field(default_factory=dict)

    def at(self, sizes: Numbers) -> SizedProgram | None:
        """The program for a call with these sizes; None if a graph has to be resized."""
        found = next((made for one in self._templates.values() if (made := one.at(sizes)) is not None), None)
        self.made += found is not None
        return found

    def learns(self) -> bool:
        """Whether a further program of a resized graph is worth making, although its size may be a rare one."""
        if self._templates:
            return not self.made
        return self.learnt < MOST_SAMPLES

    def beyond(self, sizes: Numbers) -> bool:
        """Whether there are templates, but none with these sizes in its bounds, nor a sample of these sizes."""
        known = any(one.bounded(sizes) for one in self._templates.values())
        return bool(self._templates) and not known and sizes not in self._learnt

    def learn(self, sizes: Numbers, plan: Schedule, signature: Signature) -> None:
        """Add a schedule that was made from a resized graph."""
        self.learnt += 1
        self._learnt.add(sizes)
        if len(sizes) > MOST_SIZES:
            self.learnt = MOST_SAMPLES
            return
        try:
            outline, numbers = outline_and_numbers(plan, signature.outputs)
        except NotSplit:
            self.learnt = MOST_SAMPLES
            return
        constants = len(numbers)
        sample = _Sample(sizes, numbers + constant_numbers(signature.inputs))
        samples = self._samples.setdefault(outline, [])
        samples.append(sample)
        del samples[:-MOST_SAMPLES]
        known = self._templates.pop(outline, None)
        made = known.extended(sample) if known else None
        made = made or _template(plan, signature, samples, constants)
        if made is not None:
            self._templates[outline] = made


def _template(plan: Schedule, signature: Signature, samples: Sequence[_Sample], constants: int) -> _Template | None:
    """The template of schedules with one outline, of which ``plan`` is one; None if there are too few, or if a number
    is no polynomial."""
    had = [one.sizes for one in samples]
    if len(had) < fewest_samples(len(had[0])) or not determine(had):
        return None
    columns = list(zip(*(one.numbers for one in samples), strict=True))
    conditions = Conditions(tuple(f"n{i}" for i in range(len(had[0]))))
    formulas: dict[tuple[Any, ...], str] = {}
    for column in columns:
        if column not in formulas:
            terms = polynomial_through(column, had)
            if terms is None:
                return None
            formulas[column] = conditions.python(terms)
    distinct = conditions.function(f"({', '.join(formulas.values())},)")
    position = {column: i for i, column in enumerate(formulas)}
    pick = picker([position[column] for column in columns])
    bounds = tuple((min(of), max(of)) for of in zip(*had, strict=True))
    functions = plan.runtime.functions(list({one.name: one for one in kernels_of(plan)}.values()))
    return _Template(plan, signature, lambda *sizes: pick(distinct(*sizes)), constants, bounds, functions)
