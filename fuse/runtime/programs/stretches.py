"""Split the steps of a program into stretches of native steps and Python calls.

kernel, product, sort, kernel      ->      Native(0, 2), PythonCall(sort), Native(2, 3)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fuse.runtime.programs.live_ranges import lives, refs_in, touched
from fuse.runtime.programs.steps import PythonStep, Ref, Schedule


@dataclass(frozen=True)
class Native:
    """Steps ``first`` to ``last`` (excluded) of the native tables."""

    first: int
    last: int


@dataclass(frozen=True)
class PythonCall:
    """The Python call that is step ``number``. ``dead`` are the slots whose last use it is."""

    number: int
    dead: tuple[int, ...]


Stretch = Native | PythonCall


def stretches_of(plan: Schedule) -> tuple[Stretch, ...]:
    """The stretches of all steps; a new stretch begins where results are confirmed."""
    last_use: dict[int, int] = {}
    for number, step in enumerate(plan.steps):
        if isinstance(step, PythonStep):
            last_use.update((slot, number) for slot in slots_of(step, plan))
        last_use.update((buffer, number) for buffer in touched(step, plan))
    kept = {result.buffer for result in plan.results if result}
    parts: list[Stretch] = []
    native = 0
    for number, step in enumerate(plan.steps):
        if isinstance(step, PythonStep):
            used = dict.fromkeys(slots_of(step, plan))
            parts.append(PythonCall(number, tuple(s for s in used if last_use[s] == number and s not in kept)))
            continue
        if parts and isinstance(before := parts[-1], Native) and number != plan.confirmed:
            parts[-1] = Native(before.first, native + 1)
        else:
            parts.append(Native(native, native + 1))
        native += 1
    return tuple(parts) or (Native(0, 0),)


def due(plan: Schedule, stretches: Sequence[Stretch], buffers: Sequence[int]) -> dict[int, list[int]]:
    """By stretch: the ``buffers`` that it is the first to use. Unused buffers belong to the first stretch."""
    lengths = [s.last - s.first if isinstance(s, Native) else 1 for s in stretches]
    stretch_of = [number for number, length in enumerate(lengths) for _ in range(length)]
    spans = lives(plan)
    found: dict[int, list[int]] = {}
    for buffer in buffers:
        found.setdefault(stretch_of[spans[buffer][0]] if buffer in spans else 0, []).append(buffer)
    return found


def slot_of(ref: Ref, plan: Schedule) -> int:
    """The slot of a reference: a number for each buffer, then for each view."""
    return len(plan.buffers) + ref.index if ref.view else ref.index


def slots_of(step: PythonStep, plan: Schedule) -> list[int]:
    """The slots of a Python call's arguments and results."""
    refs: list[Ref] = [*refs_in(step.args), *refs_in(step.kwargs), *(ref for _, ref in step.results)]
    return [slot_of(ref, plan) for ref in refs]


def slots_read(argument: Any, plan: Schedule) -> list[int]:
    """The slots of all references in an argument."""
    return [slot_of(ref, plan) for ref in refs_in(argument)]
