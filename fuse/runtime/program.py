"""A graph as a program that runs with one call into native code (more only where an ATen operator has to be called
from Python).

    schedule  ->  one translation unit with all kernels  ->  tables of 64-bit integers  ->  fuse_run(tables, bases)

What Python does in a call: allocate what the caller receives, take a workspace from a pool, read the data pointers.
Nothing is shared between calls that run at the same time, and no value that the caller receives lies in memory that
is used again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled as _profiled
from torch._C._profiler import _RecordFunctionFast
from torch._ops import OpOverload
from torch.fx import GraphModule

from fuse import ops
from fuse.kernel.lower import Kernel
from fuse.runtime.arrangement import address, arranged, called_upon, first_touched, refs_in, touched
from fuse.runtime.calling import calling, gathering
from fuse.runtime.choice import lower_measured, preferred
from fuse.runtime.footprint import fresh_results
from fuse.runtime.functions import addresses_of, kernels_of
from fuse.runtime.layout import extent, part, same_layout
from fuse.runtime.loop_memory import Drive, empty
from fuse.runtime.reference import Confirm
from fuse.runtime.schedule import schedule
from fuse.runtime.steps import (
    CallStep,
    Fallback,
    Launches,
    Layout,
    LoopStep,
    PythonStep,
    Ref,
    Schedule,
    title,
)
from fuse.runtime.tables import Tables, runner, scratch_bytes


@dataclass(frozen=True)
class _Native:
    """Steps ``first`` to ``last`` (excluded) of the native tables."""

    first: int
    last: int


@dataclass(frozen=True)
class _Call:
    """A Python call between native stretches; tensors are numbered by slot.

    ``run`` calls it, given the slots; of a loop with a program for its body it only puts the arguments together.
    ``results`` are (position in the returned tuple or None, slot, base, what is predicted); for a view, whose pointer
    no native step needs, the base is -1 and nothing is predicted. ``dead`` are slots that nothing needs afterwards.
    """

    step: PythonStep
    run: Callable[[Sequence[Any]], Any]
    results: tuple[tuple[int | None, int, int, Layout | None], ...]
    dead: tuple[int, ...]
    loop: Program | None = None


@dataclass(frozen=True)
class _Workspace:
    """Memory for intermediate values of one running call, and tensors over it for Python calls."""

    memory: Tensor
    address: int
    tensors: tuple[tuple[int, Tensor], ...]


class PositionOutOfRange(Exception):
    """A kernel found a position of a look-up out of range and stopped before it wrote anything."""


def plan_of(graph: GraphModule) -> Schedule:
    """The steps of a captured (and rewritten) graph."""
    return schedule(graph, lower_measured, preferred)


def program_of(graph: GraphModule) -> Program:
    """The program of a captured (and rewritten) graph.

    Raises:
        CompilerMissing, CompileFailed: see :mod:`fuse.runtime.compiler`.
    """
    return Program(plan_of(graph))


def begun(graph: GraphModule) -> Callable[[], Program]:
    """As :func:`program_of`, but that the kernels are compiled while the caller does something else.

    What is returned waits for them; it raises what :func:`program_of` does.
    """
    plan = plan_of(graph)
    with_compilers = ThreadPoolExecutor(1)  # not kept: a process that forks would have a pool without threads
    distinct = {kernel.name: kernel for kernel in kernels_of(plan)}
    functions = with_compilers.submit(copy_context().run, addresses_of, list(distinct.values()))
    with_compilers.shutdown(wait=False)
    return lambda: Program(plan, functions.result())


class Mispredicted(Exception):
    """An ATen operator returned something else than capture had expected, so that this program is no good.

    Nothing that the caller can see has been written by then. ``op`` and ``source`` say which operator, ``shape`` what
    size its result has.
    """

    def __init__(self, op: str, source: str, problem: str, shape: tuple[int, ...] = ()) -> None:
        super().__init__(f"{op} gives {problem}")
        self.op, self.source, self.shape = op, source, shape


class Program:
    """A built schedule. ``run`` may be called from several threads at once.

    Attributes:
        regions: number of regions that run as one kernel each.
        fallbacks: regions that run op by op, and why.
        kernels: the distinct generated kernels, in order of first use.
        workspace_bytes: memory for intermediate values.
        draws: whether an operator advances torch's random generator.
        confirm: called with the values, if it is set, before anything is written to an input; it may raise.
    """

    confirm: Confirm | None = None

    def __init__(self, plan: Schedule, functions: dict[str, int] | None = None) -> None:
        self.regions = plan.regions
        self.fallbacks: tuple[Fallback, ...] = plan.fallbacks
        self.kernels: dict[str, Kernel] = {kernel.name: kernel for kernel in kernels_of(plan)}
        if functions is None:
            functions = addresses_of(self.kernels.values())
        loops = {id(s): Program(s.body, functions) for s in plan.steps if isinstance(s, LoopStep)}
        self.draws = any(isinstance(s, CallStep) and _is_random(s.function) for s in plan.steps)
        self.draws |= any(body.draws for body in loops.values())
        fresh = fresh_results(plan)
        self._fresh = tuple((tuple(v.shape), v.stride(), v.dtype) for v in fresh.values())
        self._results = tuple(fresh)
        self._result_parts = _reshaped_results(plan, fresh)
        self._returned = tuple(r.buffer if r else None for r in plan.results)
        self._slots = len(plan.buffers) + len(plan.views)
        scratch = scratch_bytes(plan.steps)
        homes, arena = arranged(plan, set(self._results), scratch)
        self.workspace_bytes = arena.size
        self._held = tuple((b, arena.offsets[homes[b]], plan.buffers[b].value) for b in called_upon(plan) if b in homes)
        inputs = sum(b.origin == "input" for b in plan.buffers)
        bases = {b: b for b in range(inputs)}
        bases.update({b: inputs + i for i, b in enumerate(self._results)})
        self._workspace_base = inputs + len(self._results)
        called = [b for b, buffer in enumerate(plan.buffers) if buffer.origin == "called"]
        bases.update({b: self._workspace_base + 1 + i for i, b in enumerate(called)})
        self._called_bases = [0] * len(called)
        self._read_by_calls = frozenset(called_upon(plan))

        tables = Tables(self._workspace_base, functions)
        for step in plan.steps:
            if not isinstance(step, PythonStep):
                tables.add(step, lambda place: address(place, bases, homes, arena, self._workspace_base))
        self._tables = tables.freeze()
        self._titles = tuple(title(step) for step in plan.steps if not isinstance(step, PythonStep))
        self._computing = len(tables) - plan.writing
        self._stretches = _stretches(plan, bases, loops)
        native = all(isinstance(stretch, _Native) for stretch in self._stretches)
        self._whole = len(tables) if native else None
        order = {b: i for i, b in enumerate(self._results)}
        self._picked = tuple(None if b is None else order.get(b) for b in self._returned) if native else ()
        self._due = _due(plan, fresh)
        self._pool: list[_Workspace] = []
        self._run = runner()

    def run(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor | None], Launches | int]:
        """Run on the placeholders' tensors, which must have the layouts that the graph was captured with.

        Returns the value of every position of the graph's output tuple (None where the caller receives none), and
        what was launched: :class:`Launches`, packed as ``kernels + (libraries << 32)`` when no ATen call was made.

        Raises:
            PositionOutOfRange: a look-up (embedding, gather) reads outside of its table.
            Mispredicted: an ATen operator did not return what capture expected.
        """
        try:
            workspace = self._pool.pop()
        except IndexError:
            workspace = self._new_workspace()
        bases = array("q", map(Tensor.data_ptr, tensors))
        try:
            if self._whole is not None:
                made = [empty(size, stride, dtype) for size, stride, dtype in self._fresh]
                bases.extend(map(Tensor.data_ptr, made))
                bases.append(workspace.address)
                launches = (self._recorded if _profiled() else self._run)(
                    self._tables.address, 0, self._computing, bases.buffer_info()[0]
                )
                if launches < 0:
                    raise PositionOutOfRange
                values = [None if i is None else made[i] for i in self._picked]
                if self.confirm is not None:
                    self.confirm(values)
                if self._computing < self._whole:
                    launches += (self._recorded if _profiled() else self._run)(
                        self._tables.address, self._computing, self._whole, bases.buffer_info()[0]
                    )
                return values, launches
            with torch.no_grad():  # what a call returns may be returned, of parameters too
                return self._run_parts(tensors, workspace, bases)
        finally:
            self._pool.append(workspace)

    def _recorded(self, tables: int, first: int, last: int, bases: int) -> int:
        """As ``_run``, step by step, each an event of the profiler that runs."""
        launches = 0
        for number in range(first, last):
            with _RecordFunctionFast(self._titles[number]):
                made: int = self._run(tables, number, number + 1, bases)
            if made < 0:
                return made
            launches += made
        return launches

    def forget_workspaces(self) -> None:
        """Free the memory that calls leave for later ones, so that the next call allocates all that it needs."""
        self._pool.clear()
        for stretch in self._stretches:
            if isinstance(stretch, _Call) and stretch.loop is not None:
                stretch.loop.forget_workspaces()

    def _run_parts(
        self, tensors: Sequence[Tensor], workspace: _Workspace, bases: array[int]
    ) -> tuple[list[Tensor | None], Launches]:
        bases.extend([0] * len(self._results))
        bases.append(workspace.address)
        bases.extend(self._called_bases)
        slots = self._filled(tensors, workspace)
        received: dict[int, Tensor] = {}

        def values() -> list[Tensor | None]:
            return [None if b is None else received.get(b, slots[b]) for b in self._returned]

        native, aten = self._walk(slots, bases, received, values)
        return values(), Launches(native & 0xFFFFFFFF, native >> 32, aten)

    def _filled(self, tensors: Sequence[Tensor | None], workspace: _Workspace) -> list[Any]:
        """The tensors that Python calls take, those of inputs and intermediate values filled in."""
        slots: list[Any] = [None] * self._slots
        slots[: len(tensors)] = tensors
        for slot, tensor in workspace.tensors:
            slots[slot] = tensor
        return slots

    def _make(self, number: int, slots: list[Any], bases: array[int]) -> Tensor:
        """The tensor of a result, where Python calls and native steps find it."""
        size, stride, dtype = self._fresh[number]
        buffer, made = self._results[number], empty(size, stride, dtype)
        slots[buffer] = part(made, *self._result_parts[buffer]) if buffer in self._result_parts else made
        bases[self._workspace_base - len(self._results) + number] = made.data_ptr()
        return made

    def _walk(
        self,
        slots: list[Any],
        bases: array[int],
        received: dict[int, Tensor] | None = None,
        values: Callable[[], list[Tensor | None]] | None = None,
    ) -> tuple[int, int]:
        """Run all stretches; launches in native code, packed, and those of ATen calls.

        Results are put into ``received`` when the first stretch needs them, so that what calls allocate before is
        gone; without it they are there already. ``values`` of the results are confirmed before inputs are written.
        """
        native = aten = 0
        unconfirmed = self.confirm if values is not None else None
        for due, stretch in enumerate(self._stretches):
            if unconfirmed is not None and isinstance(stretch, _Native) and self._writes(stretch):
                assert values is not None
                unconfirmed(values())
                unconfirmed = None
            if received is not None:
                for result_number in self._due.get(due, ()):
                    received[self._results[result_number]] = self._make(result_number, slots, bases)
            if isinstance(stretch, _Native):
                launches = (self._recorded if _profiled() else self._run)(
                    self._tables.address, stretch.first, stretch.last, bases.buffer_info()[0]
                )
                if launches < 0:
                    raise PositionOutOfRange
                native += launches
                continue
            step = stretch.step
            if isinstance(step, LoopStep):
                assert stretch.loop is not None
                result: Any
                result, launched = stretch.loop.run_steps(step, stretch.run(slots))
                native += launched.kernels + (launched.libraries << 32)
                aten += launched.aten
            else:
                if _profiled():
                    with _RecordFunctionFast(title(step)):
                        result = stretch.run(slots)
                else:
                    result = stretch.run(slots)
                aten += step.launches
            for position, slot, base, predicted in stretch.results:
                tensor = result if position is None else result[position]
                if predicted is not None:
                    if tensor is None:  # what an operator makes for a gradient only
                        raise Mispredicted(_name(step), step.source, "no tensor, where one was predicted")
                    if tensor.stride() != predicted[1] or tensor.shape != predicted[0] or tensor.dtype != predicted[2]:
                        tensor = _fitted(step, tensor, *predicted)
                    bases[base] = tensor.data_ptr()
                slots[slot] = tensor
            result = tensor = None  # what nobody reads goes before the next call
            for slot in stretch.dead:
                slots[slot] = None
        if unconfirmed is not None:
            assert values is not None
            unconfirmed(values())
        return native, aten

    def _writes(self, stretch: _Native) -> bool:
        """Whether a stretch of native steps is the one that writes to inputs."""
        return stretch.first == self._computing < stretch.last

    def run_steps(self, loop: LoopStep, operands: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Launches]:
        """Run as the body of ``loop``: its last states and what it keeps, and what was launched in all steps."""
        try:
            workspace = self._pool.pop()
        except IndexError:
            workspace = self._new_workspace()
        bases = array("q", map(Tensor.data_ptr, operands))
        bases.extend([0] * len(self._results))
        bases.append(workspace.address)
        bases.extend(self._called_bases)
        begun = self._filled(operands, workspace)
        drive = Drive(loop, operands, self._results, self._read_by_calls, bases)
        native = aten = 0
        try:
            for t in range(loop.spec.trip_count):
                slots = begun.copy()
                drive.begin(t, slots)
                if self._whole is None:
                    launches, calls = self._walk(slots, bases)
                    aten += calls
                else:
                    launches = (self._recorded if _profiled() else self._run)(
                        self._tables.address, 0, self._whole, bases.buffer_info()[0]
                    )
                    if launches < 0:
                        raise PositionOutOfRange
                native += launches
                drive.end(t, slots)
            results, gathered = drive.results()
            return results, Launches(native & 0xFFFFFFFF, native >> 32, aten + gathered)
        finally:
            self._pool.append(workspace)

    def _new_workspace(self) -> _Workspace:
        memory = torch.empty(self.workspace_bytes, dtype=torch.uint8)
        tensors = []
        for buffer, offset, value in self._held:
            typed = torch.empty(0, dtype=value.dtype)
            # A storage of its own: some operators copy the whole storage of what they are given.
            own = memory.untyped_storage()[offset : offset + extent(value)]
            tensors.append((buffer, typed.set_(own, 0, value.shape, value.stride())))
        return _Workspace(memory, memory.data_ptr(), tuple(tensors))


def _due(plan: Schedule, fresh: dict[int, Tensor]) -> dict[int, list[int]]:
    """The stretches that are the first to touch results, whose numbers these are; the first for what none touches."""
    calls = [isinstance(step, PythonStep) for step in plan.steps]
    begins = [is_call or before for is_call, before in zip(calls, [True, *calls], strict=False)]
    if plan.writing:
        begins[-plan.writing] = True
    stretch_of = [number - 1 for number in accumulate(begins)]
    first = first_touched(plan)
    found: dict[int, list[int]] = {}
    for number, buffer in enumerate(fresh):
        found.setdefault(stretch_of[first[buffer]] if buffer in first else 0, []).append(number)
    return found


def _reshaped_results(plan: Schedule, fresh: dict[int, Tensor]) -> dict[int, tuple[Any, ...]]:
    """Buffers whose tensor the caller receives in another layout than Python calls need, with the latter."""
    needed = set(called_upon(plan))
    found: dict[int, tuple[Any, ...]] = {}
    for buffer, value in fresh.items():
        own = plan.buffers[buffer].value
        if buffer in needed and not same_layout(own, value):
            found[buffer] = tuple(own.shape), own.stride(), 0
    return found


def _stretches(plan: Schedule, bases: dict[int, int], loops: dict[int, Program]) -> tuple[_Native | _Call, ...]:
    """The steps as native stretches and Python calls in turn."""
    last_use = {}
    for number, step in enumerate(plan.steps):
        if isinstance(step, PythonStep):
            for ref in (*refs_in(step.args), *refs_in(step.kwargs), *(ref for _, ref in step.results)):
                last_use[_slot(ref, plan)] = number
        for buffer in touched(step, plan):
            last_use[buffer] = number
    kept = {result.buffer for result in plan.results if result}
    parts: list[_Native | _Call] = []
    native = 0
    for number, step in enumerate(plan.steps):
        if not isinstance(step, PythonStep):
            begins = plan.writing and number == len(plan.steps) - plan.writing
            if parts and isinstance(before := parts[-1], _Native) and not begins:
                parts[-1] = _Native(before.first, native + 1)
            else:
                parts.append(_Native(native, native + 1))
            native += 1
            continue
        results: list[tuple[int | None, int, int, Layout | None]] = []
        for position, ref in step.results:
            if ref.view:
                results.append((position, _slot(ref, plan), -1, None))
            else:
                value = plan.buffers[ref.index].value
                predicted = (tuple(value.shape), value.stride(), value.dtype)
                results.append((position, _slot(ref, plan), bases[ref.index], predicted))
        used = {_slot(r, plan) for r in (*refs_in(step.args), *refs_in(step.kwargs), *(ref for _, ref in step.results))}
        dead = tuple(s for s in used if last_use[s] == number and s not in kept)
        loop = loops.get(id(step))
        args, kwargs = _numbered(step.args, plan), _numbered(step.kwargs, plan)
        run = calling(step.function, args, kwargs) if isinstance(step, CallStep) else gathering(args)
        parts.append(_Call(step, run, tuple(results), dead, loop))
    return tuple(parts)


def _slot(ref: Ref, plan: Schedule) -> int:
    return len(plan.buffers) + ref.index if ref.view else ref.index


def _numbered(argument: Any, plan: Schedule) -> Any:
    """The same arguments with every reference a slot number."""
    if isinstance(argument, Ref):
        return Ref(_slot(argument, plan))
    if isinstance(argument, dict):
        return {name: _numbered(item, plan) for name, item in argument.items()}
    if isinstance(argument, tuple | list):
        return tuple(_numbered(item, plan) for item in argument)
    return argument


def _name(step: PythonStep) -> str:
    return "a loop" if isinstance(step, LoopStep) else str(step.function)


def _fitted(
    step: PythonStep, tensor: Tensor, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """The result of a call with the layout that was predicted for it."""
    same_size = tensor.shape == size and tensor.dtype == dtype
    tells = [n > 1 and mine != own for n, mine, own in zip(size, stride, tensor.stride(), strict=False)]
    if same_size and (not any(tells) or tensor.numel() == 0):
        return tensor
    if same_size and not (
        isinstance(step, CallStep) and isinstance(step.function, OpOverload)
    ):  # what runs op by op here may lie otherwise
        return torch.empty_strided(size, stride, dtype=dtype).copy_(tensor)
    problem = f"{_described(tensor.shape, tensor.stride(), tensor.dtype)}, not {_described(size, stride, dtype)}"
    raise Mispredicted(_name(step), step.source, f"{problem} as predicted", tuple(tensor.shape))


def _described(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(size)} with strides {tuple(stride)}"


def _is_random(function: Any) -> bool:
    parts = function.modules() if isinstance(function, torch.nn.Module) else ()
    nodes = (node for part in parts if isinstance(part, GraphModule) for node in part.graph.nodes)
    namespace = getattr(function, "namespace", "aten")  # a custom operator may draw: nothing is known of it
    return namespace != "aten" or ops.is_random(function) or any(ops.is_random(node.target) for node in nodes)
