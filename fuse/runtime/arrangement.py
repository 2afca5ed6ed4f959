"""Memory planning of a program: live ranges of its buffers, and their offsets in a workspace.

steps that read or write a buffer: 3, 4, 7   ->   live from 3 to 7   ->   memory that no other buffer has from 3 to 7
"""

from __future__ import annotations

from typing import Any

from fuse.runtime.plan import Arena, LiveRange, assign_offsets
from fuse.runtime.steps import CallStep, KernelStep, Place, PythonStep, Ref, Schedule, Step


def touched(step: Step, plan: Schedule) -> set[int]:
    """The buffers that a step reads or writes."""
    if not isinstance(step, PythonStep):
        return {place.buffer for place in (*step.reads, *step.writes)}
    return buffers_in((step.args, step.kwargs, [ref for _, ref in step.results]), plan)


def first_touched(plan: Schedule) -> dict[int, int]:
    """The number of the first step that reads or writes each buffer."""
    found: dict[int, int] = {}
    for number, step in enumerate(plan.steps):
        for buffer in touched(step, plan):
            found.setdefault(buffer, number)
    return found


def refs_in(argument: Any) -> list[Ref]:
    """Every reference to a buffer or view in an argument."""
    if isinstance(argument, Ref):
        return [argument]
    if isinstance(argument, dict):
        argument = list(argument.values())
    if isinstance(argument, tuple | list):
        return [ref for item in argument for ref in refs_in(item)]
    return []


def buffers_in(argument: Any, plan: Schedule) -> set[int]:
    """The buffers that an argument refers to, directly or by a view."""
    return {plan.views[ref.index].buffer if ref.view else ref.index for ref in refs_in(argument)}


def called_upon(plan: Schedule) -> list[int]:
    """The buffers that Python calls take as whole tensors, in order of first use."""
    found: dict[int, None] = {}
    for step in plan.steps:
        if isinstance(step, PythonStep):
            for ref in (*refs_in(step.args), *refs_in(step.kwargs)):
                if not ref.view:
                    found.setdefault(ref.index)
    return list(found)


def handed_out(plan: Schedule) -> set[int]:
    """The buffers that custom operators get. Their memory is not reused, because the operator's code may keep them.

    Loops contain no custom operators.
    """
    found: set[int] = set()
    for step in plan.steps:
        if isinstance(step, CallStep) and not of_aten(step.function):
            found |= buffers_in((step.args, step.kwargs), plan)
    return found


def of_aten(function: Any) -> bool:
    """Whether a function is an ATen operator, or a module of them."""
    return getattr(function, "namespace", "aten") == "aten"


def planned_memory(plan: Schedule, returned: set[int], scratch: int) -> tuple[dict[int, int], Arena]:
    """Offsets in the workspace for all buffers of origin ``made`` that are not ``returned``.

    Returns the index of each buffer's live range, and the arena. The first ``scratch`` bytes stay free.
    """
    range_of: dict[int, int] = {}
    spans: list[tuple[int, int, list[int]]] = []
    for number, step in enumerate(plan.steps):
        for buffer in sorted(touched(step, plan)):
            if plan.buffers[buffer].origin != "made" or buffer in returned:
                continue
            if buffer not in range_of:
                range_of[buffer] = len(spans)
                spans.append((number, number, []))
            first, _, heirs = spans[range_of[buffer]]
            spans[range_of[buffer]] = first, number, heirs
        if isinstance(step, KernelStep):
            reads = [place.buffer for place in step.reads]
            for i, o in step.shareable:
                source, target = step.reads[i], step.writes[o]
                whole = source.offset == target.offset == 0 and reads.count(source.buffer) == 1
                if whole and source.buffer in range_of and target.buffer in range_of:
                    spans[range_of[target.buffer]][2].append(range_of[source.buffer])
    sizes = {home: plan.buffers[buffer].size for buffer, home in range_of.items()}
    live_ranges = [LiveRange(sizes[i], first, last, tuple(heirs)) for i, (first, last, heirs) in enumerate(spans)]
    return range_of, assign_offsets(live_ranges, scratch)


def address(
    place: Place, bases: dict[int, int], range_of: dict[int, int], arena: Arena, workspace: int
) -> tuple[int, int]:
    """A place as the native runner addresses it: index of a base pointer, and bytes from there."""
    if place.buffer in bases:
        return bases[place.buffer], place.offset
    return workspace, arena.offsets[range_of[place.buffer]] + place.offset
