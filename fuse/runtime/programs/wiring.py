"""The wiring of a program: all that follows from a schedule and is the same at all sizes.

    buffers   0 input, 1 made, 2 made, 3 result        bases   input 0, result 1, workspace 2
    steps     kernel, sort, kernel                     kernel, call sort, kernel; buffer 1 lives in steps 0 and 1

Schedules with one outline (:mod:`fuse.runtime.resizing.schedule_numbers`) have one wiring.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule

from fuse import ops
from fuse.runtime.programs.arenas import Addresses, Arenas, Shared
from fuse.runtime.programs.footprint import fresh_results
from fuse.runtime.programs.live_ranges import MadeBuffers, called_upon, made_buffers, of_aten
from fuse.runtime.programs.steps import CallStep, LoopStep, PythonStep, Schedule
from fuse.runtime.programs.stretches import Stretch, due, slots_read, stretches_of


@dataclass(frozen=True)
class Wiring:
    """The wiring of one schedule.

    Attributes:
        bases: index of each buffer outside of the workspace in the array of base addresses.
        workspace: the same for the workspace.
        count: length of that array.
        made: the buffers in the workspace, and their live ranges.
        held: those of them that Python calls take as tensors.
        taken: results that are allocated in each call, and that Python calls take.
        native_buffers: buffers that native steps read or write.
        called_slots: slots of buffers and views that Python calls take.
        stretches: the steps, split at Python calls.
        due: results to allocate before a stretch, by its index.
        native: whether no step is a Python call.
        confirmed: number of native steps after which results are confirmed; None if they are not.
        draws: whether an operator advances torch's random generator.
        behind_autocast: whether operators run without autocast.
        loops: the wirings of the bodies of loops, by the number of the step.
        codes: the code that runs the steps if all are native, by the results that are in reused memory.
        functions: the functions that Python calls call, by the number of the step, once they are known.
        arenas: the workspaces of programs that differ in sizes; None for the wiring of one program.
    """

    bases: Mapping[int, int]
    workspace: int
    count: int
    made: MadeBuffers
    held: tuple[int, ...]
    taken: frozenset[int]
    native_buffers: frozenset[int]
    called_slots: frozenset[int]
    stretches: tuple[Stretch, ...]
    due: Mapping[int, Sequence[int]]
    native: bool
    confirmed: int | None
    draws: bool
    behind_autocast: bool
    loops: Mapping[int, Wiring]
    codes: dict[Hashable, CodeType] = field(default_factory=dict, compare=False)
    functions: dict[int, Callable[..., Any]] = field(default_factory=dict, compare=False)
    arenas: Arenas | None = field(default=None, compare=False)

    def shared(self) -> Wiring:
        """The same for programs that differ in sizes."""
        loops = {number: loop.shared() for number, loop in self.loops.items()}
        return replace(self, loops=loops, arenas=Arenas())

    def memory(self, plan: Schedule) -> Shared:
        """The workspace of a program."""
        sizes, scratch = self.made.sizes(plan), plan.runtime.scratch_bytes(plan.steps)
        if self.arenas is None:
            return Shared(self.made.arena(sizes, scratch), [], Addresses())
        found = self.arenas.at(self.made, sizes, scratch)
        return found._replace(pool=[]) if self.held else found  # tensors in it have sizes


def wiring_of(plan: Schedule) -> Wiring:
    """The wiring of a schedule."""
    loops = {number: wiring_of(step.body) for number, step in enumerate(plan.steps) if isinstance(step, LoopStep)}
    calls = [step for step in plan.steps if isinstance(step, PythonStep)]
    functions = [step.function for step in calls if isinstance(step, CallStep)]
    kernels = [step for step in plan.steps if not isinstance(step, PythonStep)]
    fresh = list(fresh_results(plan))
    outside = [
        *(b for b, buffer in enumerate(plan.buffers) if buffer.origin == "input"),
        *fresh,
        None,
        *(b for b, buffer in enumerate(plan.buffers) if buffer.origin == "called"),
    ]
    made, needed, stretches = made_buffers(plan, set(fresh)), called_upon(plan), stretches_of(plan)
    before = None if plan.confirmed is None else plan.steps[: plan.confirmed]
    return Wiring(
        bases={buffer: base for base, buffer in enumerate(outside) if buffer is not None},
        workspace=outside.index(None),
        count=len(outside),
        made=made,
        held=tuple(buffer for buffer in needed if buffer in made.position),
        taken=frozenset(fresh).intersection(needed),
        native_buffers=frozenset(place.buffer for step in kernels for place in (*step.reads, *step.writes)),
        called_slots=frozenset(slot for step in calls for slot in slots_read((step.args, step.kwargs), plan)),
        stretches=stretches,
        due=due(plan, stretches, fresh) if calls else {0: fresh},
        native=not calls,
        confirmed=None if before is None else sum(not isinstance(step, PythonStep) for step in before),
        draws=any(map(_is_random, functions)) or any(body.draws for body in loops.values()),
        behind_autocast=all(map(of_aten, functions)) and all(body.behind_autocast for body in loops.values()),
        loops=loops,
    )


def _is_random(function: Any) -> bool:
    parts = function.modules() if isinstance(function, torch.nn.Module) else ()
    nodes = (node for part in parts if isinstance(part, GraphModule) for node in part.graph.nodes)
    if not of_aten(function):  # a custom operator may draw random numbers
        return True
    return ops.is_random(function) or any(ops.is_random(node.target) for node in nodes)
