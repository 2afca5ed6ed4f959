"""Memory planning of a program: live ranges of its buffers, and their offsets in a workspace.

steps that read or write a buffer: 3, 4, 7   ->   live from 3 to 7   ->   memory that no other buffer has from 3 to 7
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fuse.runtime.programs.plan import Arena, LiveRange, assign_offsets
from fuse.runtime.programs.steps import CallStep, KernelStep, PythonStep, Ref, Schedule, Step


def touched(step: Step, plan: Schedule) -> set[int]:
    """The buffers that a step reads or writes."""
    if not isinstance(step, PythonStep):
        return {place.buffer for place in (*step.reads, *step.writes)}
    return buffers_in((step.args, step.kwargs, [ref for _, ref in step.results]), plan)


def lives(plan: Schedule) -> dict[int, tuple[int, int]]:
    """The first and the last step that reads or writes each buffer, in the order of the first."""
    found: dict[int, tuple[int, int]] = {}
    for number, step in enumerate(plan.steps):
        for buffer in sorted(touched(step, plan)):
            found[buffer] = found.get(buffer, (number, number))[0], number
    return found


def refs_in(argument: Any) -> list[Ref]:
    """Every reference to a buffer or view in an argument."""
    found: list[Ref] = []
    waiting = [argument]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Ref):
            found.append(one)
        elif isinstance(one, (tuple, list)):
            waiting += reversed(one)
        elif isinstance(one, dict):
            waiting += reversed(one.values())
    return found


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


@dataclass(frozen=True)
class MadeBuffers:
    """Buffers in the workspace: their first and last steps, and the positions of those whose memory each may take over.

    ``position`` is that of each buffer.
    """

    position: Mapping[int, int]
    spans: Sequence[tuple[int, int]]
    heirs: Sequence[Sequence[int]]

    def sizes(self, plan: Schedule) -> list[int]:
        """The sizes of the buffers in a schedule."""
        return [plan.buffers[buffer].size for buffer in self.position]

    def arena(self, sizes: Sequence[int], scratch: int) -> Arena:
        """Offsets in the workspace for buffers of these sizes. The first ``scratch`` bytes stay free."""
        ranges = zip(sizes, self.spans, self.heirs, strict=True)
        return assign_offsets([LiveRange(size, *span, tuple(heirs)) for size, span, heirs in ranges], scratch)


def made_buffers(plan: Schedule, returned: set[int]) -> MadeBuffers:
    """The buffers of origin ``made`` that are not ``returned``."""
    live = {b: span for b, span in lives(plan).items() if plan.buffers[b].origin == "made" and b not in returned}
    range_of = {buffer: position for position, buffer in enumerate(live)}
    heirs: list[list[int]] = [[] for _ in live]
    for step in plan.steps:
        if isinstance(step, KernelStep):
            reads = [place.buffer for place in step.reads]
            for i, o in step.shareable:
                source, target = step.reads[i], step.writes[o]
                whole = source.offset == target.offset == 0 and reads.count(source.buffer) == 1
                if whole and source.buffer in range_of and target.buffer in range_of:
                    heirs[range_of[target.buffer]].append(range_of[source.buffer])
    return MadeBuffers(range_of, list(live.values()), heirs)
