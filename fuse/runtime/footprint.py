"""The most memory that a program holds at once, read from its plan: nothing is compiled or run.

    inputs, parameters   the workspace        what the caller receives     what ATen calls return
    all the time         from the beginning   from the step that makes it  from the call to the last that reads it

Without ATen calls, what the caller receives is there from the beginning.

The workspace is that of all intermediate values, reused as soon as one is dead, and of what kernels need for
themselves (packed weights, rows that they keep).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.fx import GraphModule

from fuse.cost.memory import most_at_once, peak_of_graph
from fuse.errors import FuseError
from fuse.runtime.arrangement import arranged, first_touched, touched
from fuse.runtime.choice import lower_measured, preferred
from fuse.runtime.layout import extent
from fuse.runtime.schedule import schedule
from fuse.runtime.steps import CallStep, LoopStep, PythonStep, Schedule
from fuse.runtime.tables import scratch_bytes


def peak_of_program(graph: GraphModule) -> int:
    """Peak bytes of a call of a captured and rewritten graph, inputs and parameters included.

    Where there is no program (another device, a result that cannot be laid out) it is what the graph's values take.

    >>> import torch, fuse
    >>> graph = fuse.capture(torch.nn.Tanh(), (torch.ones(256),))
    >>> peak_of_program(graph) - 2 * 1024 < 100  # a few pointers
    True
    """
    tensors = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    if any(isinstance(tensor, Tensor) and tensor.device.type != "cpu" for tensor in tensors):
        return peak_of_graph(graph)
    try:
        return peak_of_plan(schedule(graph, lower_measured, preferred))
    except FuseError:
        return peak_of_graph(graph)


def peak_of_plan(plan: Schedule) -> int:
    """Peak bytes of a run of ``plan``, its inputs included."""
    inputs = sum(buffer.size for buffer in plan.buffers if buffer.origin == "input")
    fresh = {buffer: extent(value) for buffer, value in fresh_results(plan).items()}
    if not any(isinstance(step, PythonStep) for step in plan.steps):
        return inputs + _held(plan, sum(fresh.values()))
    first = first_touched(plan)
    return inputs + _held(plan, 0, [(size, first.get(b, 0), len(plan.steps)) for b, size in fresh.items()])


def fresh_results(plan: Schedule) -> dict[int, Tensor]:
    """The buffers that are made anew for the caller, and how they are laid out."""
    return {r.buffer: r.value for r in plan.results if r and plan.buffers[r.buffer].origin == "made"}


def _held(plan: Schedule, results: int, lives: Sequence[tuple[int, int, int]] = ()) -> int:
    """Bytes of a run besides its inputs: its results take ``results`` all the time, and others as long as ``lives``
    says."""
    _, arena = arranged(plan, set(fresh_results(plan)), scratch_bytes(plan.steps))
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
