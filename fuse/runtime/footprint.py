"""The most memory that a program holds at once, read from its plan: nothing is compiled or run.

    inputs, parameters   the workspace        what the caller receives     what ATen calls return
    all the time         from the beginning   from the step that makes it  from the call to the last that reads it

Without ATen calls, what the caller receives is there from the beginning.

The workspace is that of all intermediate values, reused as soon as one is dead, and of what kernels need for
themselves (packed weights, rows that they keep).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor
from torch.fx import GraphModule

from fuse.cost.memory import most_at_once, peak_of_graph
from fuse.errors import FuseError
from fuse.runtime.arrangement import arranged, first_touched, handed_out, touched
from fuse.runtime.layout import extent
from fuse.runtime.refusals import without_kernels
from fuse.runtime.schedule import schedule
from fuse.runtime.steps import CallStep, KernelStep, LoopStep, PythonStep, Schedule


@dataclass(frozen=True)
class Peak:
    """The most bytes that a call holds, and what holds them then: nothing where there is no program.

    ``inputs`` are those of the caller, parameters included; ``results`` what it receives; ``kernels`` what a kernel
    needs for itself (packed weights, rows that it keeps); ``values`` the other intermediate values, and what ATen
    calls return.
    """

    bytes: int
    inputs: int = 0
    results: int = 0
    values: int = 0
    kernels: int = 0

    def held(self) -> dict[str, int]:
        """The parts by name, without those that hold nothing.

        >>> Peak(12, inputs=8, kernels=4).held()
        {'inputs and weights': 8, 'kernel workspaces': 4}
        """
        names = {
            "inputs and weights": self.inputs,
            "results": self.results,
            "intermediate values": self.values,
            "kernel workspaces": self.kernels,
        }
        return {name: size for name, size in names.items() if size}


def peak_of_program(graph: GraphModule) -> Peak:
    """The peak of a call of a captured and rewritten graph, inputs and parameters included.

    Where there is no program (another device, a result that cannot be laid out) it is what the graph's values take.

    >>> import torch, fuse
    >>> graph = fuse.capture(torch.nn.Tanh(), (torch.ones(256),))
    >>> peak_of_program(graph).bytes - 2 * 1024 < 100  # a few pointers
    True
    """
    if without_kernels(graph):
        return Peak(peak_of_graph(graph))
    try:
        plan = schedule(graph)
        return _parted(plan, peak_of_plan(plan))
    except FuseError:
        return Peak(peak_of_graph(graph))


def _parted(plan: Schedule, most: int) -> Peak:
    """What holds the ``most`` bytes of a run of ``plan``."""
    inputs = sum(buffer.size for buffer in plan.buffers if buffer.origin == "input")
    fresh = fresh_results(plan)
    results = sum(map(extent, fresh.values()))
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, step in enumerate(plan.steps):
        for buffer in touched(step, plan):
            if plan.buffers[buffer].origin == "made" and buffer not in fresh:
                first.setdefault(buffer, number)
                last[buffer] = number
    change = [0] * (len(plan.steps) + 1)
    for buffer, begin in first.items():
        change[begin] += plan.buffers[buffer].size
        change[last[buffer] + 1] -= plan.buffers[buffer].size
    live = list(accumulate(change[:-1]))
    at = max(range(len(live)), key=live.__getitem__, default=0)
    busiest = plan.steps[at] if plan.steps else None
    own = busiest.kernel.workspace_bytes if isinstance(busiest, KernelStep) else 0
    return Peak(most, inputs, results, max(0, most - inputs - results - own), own)


def peak_of_plan(plan: Schedule) -> int:
    """Peak bytes of a run of ``plan``, its inputs included."""
    inputs = sum(buffer.size for buffer in plan.buffers if buffer.origin == "input")
    fresh = {buffer: extent(value) for buffer, value in fresh_results(plan).items()}
    if not any(isinstance(step, PythonStep) for step in plan.steps):
        return inputs + _held(plan, sum(fresh.values()))
    first = first_touched(plan)
    return inputs + _held(plan, 0, [(size, first.get(b, 0), len(plan.steps)) for b, size in fresh.items()])


def fresh_results(plan: Schedule) -> dict[int, Tensor]:
    """The buffers that are made anew in a call, for the caller or for custom operators, and how they are laid out."""
    fresh = {r.buffer: r.value for r in plan.results if r and plan.buffers[r.buffer].origin == "made"}
    for buffer in sorted(handed_out(plan)):
        if plan.buffers[buffer].origin == "made":
            fresh.setdefault(buffer, plan.buffers[buffer].value)
    return fresh


def _held(plan: Schedule, results: int, lives: Sequence[tuple[int, int, int]] = ()) -> int:
    """Bytes of a run besides its inputs: its results take ``results`` all the time, and others as long as ``lives``
    says."""
    _, arena = arranged(plan, set(fresh_results(plan)), plan.runtime.scratch_bytes(plan.steps))
    return results + arena.size + most_at_once([*_called(plan), *lives], len(plan.steps))


def _called(plan: Schedule) -> list[tuple[int, int, int]]:
    """Bytes, first and last step of what Python calls return, and of what loops hold while they run.

    A tensor that no later Python call reads is there to the end.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    lives = []
    for number, step in enumerate(plan.steps):
        for buffer in touched(step, plan):
            if plan.buffers[buffer].origin == "called":
                first.setdefault(buffer, number)
                last[buffer] = number if isinstance(step, PythonStep) else len(plan.steps)
        if isinstance(step, LoopStep):
            lives.append((_held(step.body, _states(step)), number, number))
            handed = {ref.index for position, ref in step.results if (position or 0) < step.spec.carries}
            first |= dict.fromkeys(handed, number + 1)  # till then they are among what the loop holds
        elif isinstance(step, CallStep):
            lives.append((step.passing, number, number))
    last |= dict.fromkeys((r.buffer for r in plan.results if r and r.buffer in last), len(plan.steps))
    return lives + [(plan.buffers[b].size, begin, max(begin, last[b])) for b, begin in first.items()]


def _states(loop: LoopStep) -> int:
    """Bytes of the states that a loop hands from step to step, in two places each: what a call returns is there once
    already."""
    handed = {r.buffer for r in loop.body.results[: loop.spec.carries] if r}
    made = fresh_results(loop.body)
    called = [loop.body.buffers[buffer] for buffer in handed]
    again = sum(buffer.size for buffer in called if buffer.origin == "called")
    return again + sum(2 * extent(made[buffer]) for buffer in handed if buffer in made)
