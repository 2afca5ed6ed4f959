"""Find steps of a loop among recorded operators: what repeats with operands that correspond.

    t0 = mm(h, w)   h0 = add(t0, x[:, 0])
    t1 = mm(h0, w)  h1 = add(t1, x[:, 1])    ->    mm: carried (from the step before), the same
    t2 = mm(h1, w)  h2 = add(t2, x[:, 2])          add: of the same step, moving by 1 along dimension 1

In every step, an operand is a value of the same step or of a fixed number of steps before, or one tensor from outside,
or a ``select`` of one such tensor at places that are evenly spaced. Numbers are equal in all steps, but for the places
that a ``select`` or ``slice`` of a tensor from outside reads. A step may write to memory that it made itself: all that
reads it in this step or a later one then reads the same writes. It may also fill a place of a tensor from outside
(:mod:`fuse.graph.functional.filled`). Linear in the number of operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Node

from fuse.graph.functional.call_templates import CallTemplate
from fuse.graph.functional.filled import Filled, filled, filled_by
from fuse.graph.functional.short_graphs import STEPS_KEPT, Slot, given
from fuse.graph.periods import find_repetitions
from fuse.graph.signature import Dispatch

Noted = tuple[CallTemplate, Dispatch]
Part = tuple[Node, int, int]

LEAST_STEPS = 2 * STEPS_KEPT
"""Fewer steps are not left out: the whole graph costs little."""

MOST_LAG = 3
"""A step may read values of so many steps before."""

_MOST_RESULTS = 1 << 20
"""More than an operator has: results are numbered by operator times so many."""


@dataclass(frozen=True)
class RepeatedSteps:
    """``count`` equal steps of ``period`` operators from ``start`` on.

    ``made``: by ``id`` of a result, its operator and its number (:func:`place_of`). ``moving``: operands from outside
    that each step reads at another place. ``selected``: operands that were selected from one tensor before the steps.
    ``carried``: operands that an earlier step computes, with the distance in steps; in the first steps they come from
    outside. ``outside``: all tensors from outside, by ``id``. ``viewed``: for an operator, the operand from outside
    that it is a view of. ``filled``: tensors from outside that steps write, and that are not read or written otherwise.
    """

    start: int
    period: int
    count: int
    made: Mapping[int, int]
    moving: dict[Slot, None] = field(default_factory=dict)
    selected: list[Slot] = field(default_factory=list)
    carried: list[tuple[Slot, int]] = field(default_factory=list)
    outside: dict[int, Tensor] = field(default_factory=dict)
    viewed: dict[int, Slot] = field(default_factory=dict)
    filled: list[Filled] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + self.period * self.count


def place_of(made: int) -> tuple[int, int]:
    """Number of an operator in a repeat, and of the result among its results."""
    return divmod(made, _MOST_RESULTS)


def repeats_in(
    before: Sequence[CallTemplate | None], noted: Sequence[Noted], part: Callable[[Tensor], Part | None]
) -> list[RepeatedSteps]:
    """The repeats of at least :data:`LEAST_STEPS` steps among noted operators.

    ``before``: templates of the operators before these; the first step may begin there. ``part`` returns the part that
    an outside tensor selects, and the node that it selects from.
    """
    found = []
    templates = [*before, *(template for template, _ in noted)]
    codes = [id(template) if template is not None else -at for at, template in enumerate(templates)]
    for run in find_repetitions(codes, LEAST_STEPS):
        least, last = max(run.start - len(before), 0), run.end - len(before)
        first = least + (run.start - len(before) - least) % run.period
        if last - first < LEAST_STEPS * run.period:
            continue
        start = least + (first + _narrowest(noted[first:last], run.period) - least) % run.period
        while last < len(noted) and noted[last][0] is noted[last - run.period][0]:
            last += 1
        repeat = _proved(noted, start, run.period, (last - start) // run.period, part)
        if repeat is not None:
            found.append(repeat)
    return found


def results_of(call: Dispatch) -> Sequence[Any]:
    """The results of an operator."""
    return (call.result,) if isinstance(call.result, Tensor) else call.result


def _made(calls: Sequence[Dispatch], templates: Sequence[CallTemplate]) -> dict[int, int]:
    """By ``id`` of a result: number of the operator that made it, and of the result among its results.

    ``templates``: of the operators of a step.
    """
    period = len(templates)
    made: dict[int, int] = {}
    for j, template in enumerate(templates):
        if template.functional is not None:  # a write; the tensor was made before
            continue
        results = [call.result for call in calls[j::period]]
        if isinstance(results[0], Tensor):
            made.update(zip(map(id, results), _numbers(j, period, len(results)), strict=True))
        else:
            for number in range(len(results[0])):
                ids = [id(result[number]) for result in results]
                made.update(zip(ids, _numbers(j, period, len(ids), number), strict=True))
    return made


def _numbers(j: int, period: int, count: int, number: int = 0) -> range:
    """The codes, one a step, of result ``number`` of operator ``j``; see :func:`place_of`."""
    first, step = j * _MOST_RESULTS + number, period * _MOST_RESULTS
    return range(first, first + step * count, step)


def _proved(
    noted: Sequence[Noted], start: int, period: int, count: int, part: Callable[[Tensor], Part | None]
) -> RepeatedSteps | None:
    """The repeat from ``start`` on, as far as operands correspond; None where these are too few steps."""
    if count < LEAST_STEPS:
        return None
    calls = [call for _, call in noted[start : start + period * count]]
    templates = [template for template, _ in noted[start : start + period]]
    if any(isinstance(value, Tensor) for call in calls[:period] for value in call.kwargs.values()):
        return None
    if any(map(_nests, templates)):
        return None
    made = _made(calls, templates)
    places = _places_filled(calls, templates, made)
    if places is None:
        return None
    found = RepeatedSteps(start, period, count, made)
    fewest = count
    for j, template in enumerate(templates):
        column = [call.args for call in calls[j::period]]
        for slot in _slots(j, template, column[0]):
            if (steps := _note(found, slot, column, part)) is None:
                return None
            fewest = min(fewest, steps)
        if template.is_view:
            fewest = min(fewest, _note_view(found, j, column))
    if fewest < count:
        return _proved(noted, start, period, fewest, part)
    for place, *idle in places:
        one = filled(place, calls, period, count)
        if one is None or any(found.moving.pop(Slot(j, 0), one) is not None for j in (place, *idle)):
            return None
        found.filled.append(one)
    return found


def _note(
    found: RepeatedSteps, slot: Slot, column: Sequence[tuple[Any, ...]], part: Callable[[Tensor], Part | None]
) -> int | None:
    """Note the source of an operand. Returns the number of steps, from the first on, that read it from there; None if
    the steps are no loop."""
    operands = [args[slot.at] for args in column] if slot.item < 0 else [given(slot, args) for args in column]
    makers = [found.made.get(one) for one in map(id, operands)]
    typical = makers[LEAST_STEPS - 1]
    if typical is not None:
        lag = LEAST_STEPS - 1 - place_of(typical)[0] // found.period
        if not 0 <= lag <= MOST_LAG:
            return None
        if lag:
            found.carried.append((slot, lag))
            found.outside.update((id(one), one) for one in operands[:lag])
        apart = found.period * _MOST_RESULTS
        first = typical - (LEAST_STEPS - 1 - lag) * apart
        return _common(makers, [*[None] * lag, *range(first, first + apart * (len(makers) - lag), apart)])
    steps = _common(makers, [None] * len(makers))
    if any(one is not operands[0] for one in operands[:steps]):
        parts = [part(one) for one in operands[:steps]]
        if parts[0] is None or parts[1] is None:
            return 0
        whole, dim, at = parts[0]
        apart = parts[1][2] - at
        steps = _common(parts, [(whole, dim, at + apart * k) for k in range(steps)])
        found.selected.append(slot)
    found.outside.update((id(one), one) for one in operands[:steps])
    return steps


def _note_view(found: RepeatedSteps, j: int, column: Sequence[tuple[Any, ...]]) -> int:
    """Note the outside operand that a view belongs to. Returns the number of steps, from the first on, whose views are
    evenly spaced."""
    slot, typical = Slot(j, 0), column[LEAST_STEPS - 1][0]
    maker = found.made.get(id(typical))
    if maker is not None:
        step, position = divmod(place_of(maker)[0], found.period)
        if step == LEAST_STEPS - 1 and position in found.viewed:
            found.viewed[j] = found.viewed[position]
    elif typical is column[0][0]:
        found.viewed[j] = slot
    places = [args[1:] for args in column]
    first, second = places[:2]
    if first == second or len(first) != len(second):
        return _common(places, [first] * len(places))
    if j not in found.viewed or not all(type(a) is type(b) is int for a, b in zip(first, second, strict=True)):
        return 0
    moves = [b - a for a, b in zip(first, second, strict=True)]
    if moves[0]:  # the dimension
        return 0
    found.moving[found.viewed[j]] = None
    ranges = [range(a, a + m * len(column), m) if m else [a] * len(column) for a, m in zip(first, moves, strict=True)]
    return _common(places, list(zip(*ranges, strict=True)))


def _common(some: Sequence[object], others: Sequence[object]) -> int:
    """The number of items from the first on that two sequences have in common."""
    if some == others:
        return len(some)
    return next(k for k, (one, other) in enumerate(zip(some, others, strict=True)) if one != other)


def _nests(template: CallTemplate) -> bool:
    """Whether a list among the arguments holds lists."""
    return any(type(item) in (tuple, list) for at in template.lists for item in template.args[at])


def _slots(j: int, template: CallTemplate, args: tuple[Any, ...]) -> list[Slot]:
    """The operands of an operator that are tensors."""
    alone = [Slot(j, at) for at in template.tensors]
    items = [Slot(j, at, n) for at in template.lists for n, item in enumerate(args[at]) if isinstance(item, Tensor)]
    return alone + items


def _roots(calls: Sequence[Dispatch], templates: Sequence[CallTemplate], made: Mapping[int, int]) -> list[int]:
    """For each operator, the number of the one that makes the memory that it computes, views or writes; -1: outside."""
    roots: list[int] = []
    for i, call in enumerate(calls):
        template = templates[i % len(templates)]
        if template.is_view or template.functional is not None:
            maker = made.get(id(call.args[0]))
            roots.append(-1 if maker is None else roots[place_of(maker)[0]])
        else:
            roots.append(i)
    return roots


def _places_filled(
    calls: Sequence[Dispatch], templates: Sequence[CallTemplate], made: Mapping[int, int]
) -> list[list[int]] | None:
    """The operators that select each place which a step fills; None if a step writes to anything else that it did not
    make."""
    period, step = len(templates), LEAST_STEPS - 1
    roots = _roots(calls[: LEAST_STEPS * period], templates, made)
    places = []

    def maker(tensor: Tensor) -> tuple[int, int] | None:
        found = made.get(id(tensor))
        return None if found is None else divmod(place_of(found)[0], period)

    for j, template in enumerate(templates):
        if template.functional is not None and roots[step * period + j] < step * period:
            place = filled_by(calls, templates, maker, j, step)
            if place is None:
                return None
            places.append(place)
    return places


def _narrowest(steps: Sequence[Noted], period: int) -> int:
    """The position at which steps begin so that the fewest bytes are carried, and views from outside belong to what
    follows; it may be negative. A write stays in the step that made what it writes to."""
    calls = [call for _, call in steps[: (MOST_LAG + 2) * period]]
    templates = [template for template, _ in steps[:period]]
    made = _made(calls, templates)
    roots = _roots(calls, templates, made)
    last: dict[int, int] = {}
    apart: set[int] = set()
    for i, call in enumerate(calls):
        template = templates[i % period]
        makers = [made.get(id(given(slot, call.args))) for slot in _slots(i % period, template, call.args)]
        operators = [place_of(maker)[0] for maker in makers if maker is not None]
        last.update((roots[operator], i) for operator in operators)
        if template.functional is not None:
            begin = roots[i] if roots[i] >= 0 else min(operators, default=i)
            apart.update(at % period for at in range(begin + 1, i + 1))
    alive = [0] * period
    for root in range(period):
        if roots[root] == root:
            size = sum(one.numel() * one.itemsize for one in results_of(calls[root]) if isinstance(one, Tensor))
            for at in range(root + 1, last.get(root, root) + 1):
                alive[at % period] += size
    cut = min(range(period), key=lambda cut: (cut in apart, alive[cut], cut))
    for n in range(period):
        at = (cut - 1 - n) % period
        if roots[period + at] >= 0 or templates[at].functional is not None:
            return cut - n
    return cut
