"""The peak memory of a program, computed from its schedule: nothing is compiled or run.

    inputs, parameters   the workspace        results of the model         results of ATen calls
    all the time         from the beginning   from the step that makes it  from the call to the last step that reads it

Without ATen calls, the results of the model are allocated at the beginning.

The workspace has the intermediate values, whose memory is reused as soon as a value is dead, and the workspaces of
kernels (packed weights, scratch rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor
from torch.fx import GraphModule

from fuse.cost.memory import most_at_once, peak_of_graph
from fuse.errors import FuseError
from fuse.graph.strides import extent
from fuse.runtime.programs.live_ranges import handed_out, lives, made_buffers, touched
from fuse.runtime.programs.refusals import without_kernels
from fuse.runtime.programs.schedule import schedule
from fuse.runtime.programs.steps import CallStep, KernelStep, LoopStep, PythonStep, Schedule


@dataclass(frozen=True)
class Peak:
    """The most bytes that a call holds at once, and its parts at that time; the parts are 0 without a program.

    Attributes:
        bytes: the peak.
        inputs: arguments and parameters.
        results: what the caller receives.
        values: intermediate values, and results of ATen calls.
        kernels: the workspace of a kernel (packed weights, scratch rows).
    """

    bytes: int
    inputs: int = 0
    results: int = 0
    values: int = 0
    kernels: int = 0

    def held(self) -> dict[str, int]:
        """The parts by name, without empty ones.

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

    If there is no program (another device, an unusual result), it is the peak of the graph run operator by operator.

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
    """The parts of the peak of ``most`` bytes of a run of ``plan``."""
    inputs = sum(buffer.size for buffer in plan.buffers if buffer.origin == "input")
    fresh = fresh_results(plan)
    results = sum(map(extent, fresh.values()))
    change = [0] * (len(plan.steps) + 1)
    for buffer, (first, last) in lives(plan).items():
        if plan.buffers[buffer].origin == "made" and buffer not in fresh:
            change[first] += plan.buffers[buffer].size
            change[last + 1] -= plan.buffers[buffer].size
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
    spans = lives(plan)
    held = [(size, spans.get(b, (0, 0))[0], len(plan.steps)) for b, size in fresh.items()]
    return inputs + _held(plan, 0, held)


def fresh_results(plan: Schedule) -> dict[int, Tensor]:
    """The buffers that each call allocates for the caller or for custom operators, with fake tensors of their
    layouts."""
    fresh = {r.buffer: r.value for r in plan.results if r and plan.buffers[r.buffer].origin == "made"}
    for buffer in sorted(handed_out(plan)):
        if plan.buffers[buffer].origin == "made":
            fresh.setdefault(buffer, plan.buffers[buffer].value)
    return fresh


def _held(plan: Schedule, results: int, further: Sequence[tuple[int, int, int]] = ()) -> int:
    """Peak bytes of a run without its inputs.

    ``results`` bytes are held all the time; each of ``further`` is (bytes, first step, last step).
    """
    made = made_buffers(plan, set(fresh_results(plan)))
    arena = made.arena(made.sizes(plan), plan.runtime.scratch_bytes(plan.steps))
    return results + arena.size + most_at_once([*_called(plan), *further], len(plan.steps))


def _called(plan: Schedule) -> list[tuple[int, int, int]]:
    """(bytes, first step, last step) of results of Python calls, and of the memory of loops while they run.

    A tensor whose last reader is no Python call is held to the end.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    held = []
    for number, step in enumerate(plan.steps):
        for buffer in touched(step, plan):
            if plan.buffers[buffer].origin == "called":
                first.setdefault(buffer, number)
                last[buffer] = number if isinstance(step, PythonStep) else len(plan.steps)
        if isinstance(step, LoopStep):
            held.append((_held(step.body, _states(step)), number, number))
            handed = {ref.index for position, ref in step.results if (position or 0) < step.spec.carries}
            first |= dict.fromkeys(handed, number + 1)  # until then they are part of the loop's memory
        elif isinstance(step, CallStep):
            held.append((step.passing, number, number))
    last |= dict.fromkeys((r.buffer for r in plan.results if r and r.buffer in last), len(plan.steps))
    return held + [(plan.buffers[b].size, begin, max(begin, last[b])) for b, begin in first.items()]


def _states(loop: LoopStep) -> int:
    """Bytes of a loop's states: those of two steps are held at once. Results of calls are counted once elsewhere."""
    handed = {r.buffer for r in loop.body.results[: loop.spec.carries] if r}
    made = fresh_results(loop.body)
    called = [loop.body.buffers[buffer] for buffer in handed]
    again = sum(buffer.size for buffer in called if buffer.origin == "called")
    return again + sum(2 * extent(made[buffer]) for buffer in handed if buffer in made)
