"""Programs: graphs that run with one call into native code (several if ATen operators are called from Python).

    schedule  ->  translation units with all kernels  ->  tables of 64-bit integers  ->  fuse_run(tables, bases)

In a call, Python allocates the results, takes a workspace from a pool, and reads the data pointers. Concurrent calls
share no memory, and results are never in memory that is reused.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled as _autocasts
from torch._C._autograd import _profiler_enabled as _profiled
from torch._C._profiler import _RecordFunctionFast
from torch.fx import GraphModule

from fuse.devices import without_autocast
from fuse.graph.strides import extent
from fuse.kernel.kernel import Kernel
from fuse.runtime.building.interrupts import awaited
from fuse.runtime.programs.call_code import ProgramMemory, Writer, function_of
from fuse.runtime.programs.footprint import fresh_results
from fuse.runtime.programs.layout import same_layout
from fuse.runtime.programs.live_ranges import buffers_in, handed_out, touched
from fuse.runtime.programs.predicted import KernelFailed, fitted
from fuse.runtime.programs.reference import Confirm
from fuse.runtime.programs.saved_memory import SavedMemory, can_be_used_again, forget
from fuse.runtime.programs.schedule import schedule
from fuse.runtime.programs.steps import (
    CallStep,
    Fallback,
    Launches,
    LoopStep,
    Place,
    PythonStep,
    Ref,
    Schedule,
    kernels_of,
    title,
)
from fuse.runtime.programs.wiring import Wiring, wiring_of

_OF_ANY_LAYOUT = (torch.ops.aten.convolution_backward.default,)
"""Operators that take their first operand in any layout, and copy it if they need another."""


class _Workspace(NamedTuple):
    """The memory of one running call: ``memory`` of intermediate values, ``held`` tensors in it for Python calls, the
    array ``bases`` of all base addresses, and the ``address`` of that array."""

    memory: Tensor
    held: tuple[Tensor, ...]
    bases: array[int]
    address: int


def program_of(graph: GraphModule) -> Program:
    """The program of a captured (and rewritten) graph.

    Raises:
        CompilerMissing, CompileFailed: see :mod:`fuse.errors`.
    """
    return Program(schedule(graph))


def begun(graph: GraphModule) -> Callable[[], Program]:
    """Like :func:`program_of`, but kernels are compiled in the background.

    The returned function waits for them, and raises the same errors. In a child of ``fork``, which has no such
    threads, it compiles them.
    """
    plan = schedule(graph)
    functions = compiled_later(plan)
    process = os.getpid()
    return lambda: Program(plan, awaited(functions) if os.getpid() == process else None)


def compiled_later(plan: Schedule) -> Future[dict[str, int]]:
    """The addresses of a schedule's kernels, which are compiled in the background."""
    with_compilers = ThreadPoolExecutor(1)  # not kept: a process that forks would have a pool without threads
    distinct = {kernel.name: kernel for kernel in kernels_of(plan)}
    functions = with_compilers.submit(copy_context().run, plan.runtime.functions, list(distinct.values()))
    with_compilers.shutdown(wait=False)
    return functions


class Program:
    """A built schedule. ``run`` may be called from several threads at once.

    ATen operators run without autocast, because the graph contains its conversions. Programs with a custom operator run
    under the caller's autocast, because the operator's code may use it.

    Attributes:
        regions: number of regions that run as one kernel each.
        fallbacks: regions that run op by op, and why.
        kernels: the distinct generated kernels, in order of first use.
        workspace_bytes: memory for intermediate values.
        wiring: the parts that all programs with this outline share.
        draws: whether an operator advances torch's random generator.
        confirm: if set, called with the values before anything is written to an input; it may raise.
    """

    confirm: Confirm | None = None

    def __init__(
        self,
        plan: Schedule,
        functions: dict[str, int] | None = None,
        wiring: Wiring | None = None,
        loop: LoopStep | None = None,
    ) -> None:
        self.regions = plan.regions
        self.fallbacks: tuple[Fallback, ...] = plan.fallbacks
        self.kernels: dict[str, Kernel] = {kernel.name: kernel for kernel in kernels_of(plan)}
        if functions is None:
            functions = plan.runtime.functions(self.kernels.values())
        self._plan, self._loop = plan, loop  # the loop whose body this is, if it is one
        self.wiring = wiring = wiring or wiring_of(plan)
        self.draws = wiring.draws
        self._native, self._behind_autocast = wiring.native, wiring.behind_autocast
        self._loops = {
            number: Program(step.body, functions, wiring.loops[number], step)
            for number in wiring.loops
            if isinstance(step := plan.steps[number], LoopStep)
        }
        arena, self._pool, known = wiring.memory(plan)
        self.workspace_bytes = arena.size
        bases, position = wiring.bases, wiring.made.position

        def addresses(places: tuple[Place, ...]) -> list[int]:
            if (found := known.get(places)) is None:
                found = known.put(places, [number for place in places for number in address(place)])
            return found

        def address(place: Place) -> tuple[int, int]:
            if (base := bases.get(place.buffer)) is not None:
                return base, place.offset
            return wiring.workspace, arena.offsets[position[place.buffer]] + place.offset

        tables = plan.runtime.tables(wiring.workspace, functions)
        for step in plan.steps:
            if not isinstance(step, PythonStep):
                tables.add(step, addresses)
        self._tables = tables.freeze()
        self._held = tuple((arena.offsets[position[b]], plan.buffers[b].value) for b in wiring.held)
        layouts = {
            buffer: ((tuple(value.shape), value.stride(), value.dtype), _reshaped(plan, buffer, value, wiring.taken))
            for buffer, value in fresh_results(plan).items()
        }
        self._memory = ProgramMemory(bases, layouts, wiring.held, wiring.due, wiring.confirmed)
        self._functions: dict[bool, Callable[..., Any]] = {}
        self._saved: SavedMemory | None = None
        self._run, self._empty = plan.runtime.run(), plan.runtime.empty

    @property
    def schedule(self) -> Schedule:
        """The steps that it runs."""
        return self._plan

    def save_in_blocks(self, positions: Set[int]) -> None:
        """Put the outputs at these positions into memory that later calls reuse.

        The caller passes these values to autograd only. To be called before the first run.
        """
        received = {r.buffer for i, r in enumerate(self._plan.results) if r and i not in positions}
        kept = {r.buffer for i, r in enumerate(self._plan.results) if r and i in positions} - received
        kept -= handed_out(self._plan)
        fresh = fresh_results(self._plan)
        values = {buffer: value for buffer, value in fresh.items() if buffer in kept}
        if can_be_used_again(list(values.values())):
            self._saved = SavedMemory(list(values.values()))
            self._memory = replace(self._memory, saved={buffer: i for i, buffer in enumerate(values)})

    def kernels_alone_read(self, position: int) -> bool:
        """Whether only native steps read the input at ``position``: no Python call takes it, and it is no result."""
        called = {
            buffer for step in self._plan.steps if isinstance(step, PythonStep) for buffer in touched(step, self._plan)
        }
        return position not in called and all(r is None or r.buffer != position for r in self._plan.results)

    def takes_any_layout(self, position: int) -> bool:
        """Whether the input at ``position`` may have any layout: it is no result, and only operators read it that take
        any layout and return results of one layout."""
        steps = [step for step in self._plan.steps if position in touched(step, self._plan)]
        return all(r is None or r.buffer != position for r in self._plan.results) and all(
            isinstance(step, CallStep)
            and step.function in _OF_ANY_LAYOUT
            and step.args[0] == Ref(position)
            and position not in buffers_in((step.args[1:], step.kwargs), self._plan)
            for step in steps
        )

    def run(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor | None], Launches | int]:
        """Run on the placeholders' tensors, which must have the layouts that the graph was captured with.

        Returns the value at each position of the graph's output tuple (None for values that the caller does not
        receive), and the launches: :class:`Launches`, or ``kernels + (libraries << 32)`` if no ATen call was made.

        Raises:
            KernelFailed: an index (embedding, gather) is out of range, or a matrix may be singular.
            Mispredicted: an ATen operator returned another layout than predicted.
        """
        called = self._functions.get(profiled := _profiled()) or self._written(profiled)
        if self._native or (not torch.is_grad_enabled() and not _autocasts()):
            values, native, aten = called(tensors, self.confirm)
        else:  # without gradients, because a call may return a parameter
            with torch.no_grad(), without_autocast() if self._behind_autocast else contextlib.nullcontext():
                values, native, aten = called(tensors, self.confirm)
        return values, Launches(native & 0xFFFFFFFF, native >> 32, aten) if aten else native

    def run_steps(self, operands: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], int, int]:
        """Run all steps of a loop, if this is the program of a loop's body.

        Returns the last states and collected outputs, the launches of native steps (packed), and those of ATen calls.
        """
        called = self._functions.get(profiled := _profiled()) or self._written(profiled)
        made: tuple[tuple[Tensor, ...], int, int] = called(operands)
        return made

    @cached_property
    def _titles(self) -> tuple[str, ...]:
        return tuple(title(step) for step in self._plan.steps if not isinstance(step, PythonStep))

    def _recorded(self, tables: Any, first: int, last: int, bases: Any) -> int:
        """Like ``_run``, step by step, with a profiler event for each step."""
        launches, titles = 0, self._titles
        for number in range(first, last):
            with _RecordFunctionFast(titles[number]):
                made: int = self._run(tables, number, number + 1, bases)
            if made < 0:
                return made
            launches += made
        return launches

    def forget_workspaces(self) -> None:
        """Free the workspaces that are kept for later calls."""
        self._pool.clear()
        if self._saved is not None:
            forget()
        for body in self._loops.values():
            body.forget_workspaces()

    def _written(self, profiled: bool) -> Callable[..., Any]:
        """Generate the function that runs all steps; ``profiled``: with a profiler event for each step."""
        names = {
            "run": self._recorded if profiled else self._run,
            "empty": self._empty,
            "pool": self._pool,
            "new": self._new_workspace,
            "take": self._saved.take if self._saved else None,
            "tables": self._tables.address,
            "fitted": fitted,
            "KernelFailed": KernelFailed,
        }
        codes, saved = self.wiring.codes, tuple(self._memory.saved.items())
        if self._native and saved in codes:
            made = function_of(codes[saved], {**names, **self._memory.layouts()})
        else:
            steps = {number: body.run_steps for number, body in self._loops.items()}
            writer = Writer(self._plan, self.wiring, self._memory, names, steps, profiled)
            made = writer.loop(self._loop) if self._loop else writer.program()
            if self._native and self._loop is None:
                codes[saved] = writer.code
        self._functions[profiled] = made
        return made

    def _new_workspace(self) -> _Workspace:
        memory = self._empty((self.workspace_bytes,), (1,), torch.uint8)
        tensors = []
        for offset, value in self._held:
            typed = self._empty((0,), (1,), value.dtype)
            # A separate storage, because some operators copy the whole storage of an argument.
            own = memory.untyped_storage()[offset : offset + extent(value)]
            tensors.append(typed.set_(own, 0, value.shape, value.stride()))
        bases = array("q", bytes(8 * self.wiring.count))
        bases[self.wiring.workspace] = memory.data_ptr()
        return _Workspace(memory, tuple(tensors), bases, bases.buffer_info()[0])


def _reshaped(plan: Schedule, buffer: int, value: Tensor, taken: Set[int]) -> tuple[Any, ...] | None:
    """The layout in which Python calls take a result, where the caller receives it in another layout."""
    own = plan.buffers[buffer].value
    return (tuple(own.shape), own.stride(), 0) if buffer in taken and not same_layout(own, value) else None
