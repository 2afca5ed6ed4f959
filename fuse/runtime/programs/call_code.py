"""Generated Python functions that run programs with operator calls, as straight-line code.

    kernel, kernel, sort(b, -1), kernel              held, bases, address = a workspace of the pool
                                             ->      bases[0] = s0.data_ptr()
                                                     made = run(tables, 0, 2, address)
                                                     s5 = call(s3, -1)[0]
                                                     bases[7] = s5.data_ptr()
                                                     made = run(tables, 2, 3, address)

    a loop of such steps                     ->      for t in range(8): the same, with addresses that move

In a loop, only the body launches anything. States are passed to the next step without a copy, addresses of step inputs
advance by a constant, and collected outputs are written into the tensor of all steps. States that are not collected are
in a ring of tensors, so that no step overwrites a state that is still read.

Names: ``s5`` is the tensor of buffer or view 5; ``r5`` the same in the layout that the caller receives, and ``l5`` this
layout; ``x5`` operand 5 of a loop; ``w5`` a list of the parts of a tensor by step; ``k2`` collected output 2 with all
steps; ``m5`` an address that advances with the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from keyword import iskeyword
from types import CodeType
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast
from torch._ops import OpOverload

from fuse.runtime.programs.bindings import fastest
from fuse.runtime.programs.layout import part, same_layout
from fuse.runtime.programs.live_ranges import refs_in
from fuse.runtime.programs.steps import CallStep, Layout, LoopStep, ProgramResult, PythonStep, Ref, Schedule, title
from fuse.runtime.programs.stretches import Native, PythonCall, Stretch, slot_of, slots_read
from fuse.runtime.programs.wiring import Wiring

_BEGIN = (
    "    try:",
    "        workspace = pool.pop()",
    "    except IndexError:",
    "        workspace = new()",
    "    try:",
    "        _, held, bases, address = workspace",
)
_END = ("    finally:", "        pool.append(workspace)")
_INDENT = 8 * " "
"""Indentation of the lines between ``_BEGIN`` and ``_END``."""


@dataclass(frozen=True)
class ProgramMemory:
    """The memory of a program's values.

    Attributes:
        bases: index of each buffer in the array of base addresses.
        fresh: results that are allocated in each call: their layout, and the layout that Python calls take, if another.
        held: buffers in the workspace that Python calls take as tensors, in order.
        due: results to allocate before a stretch, by its index.
        confirmed: number of native steps after which results are confirmed; None if they are not.
        saved: fresh results in reused memory, by their index in the result of ``take``.
    """

    bases: Mapping[int, int]
    fresh: Mapping[int, tuple[Layout, tuple[Any, ...] | None]]
    held: Sequence[int]
    due: Mapping[int, Sequence[int]]
    confirmed: int | None
    saved: Mapping[int, int] = field(default_factory=dict)

    def layouts(self) -> dict[str, Layout]:
        """The layouts of ``fresh`` results by their names in a function."""
        return {f"l{buffer}": layout for buffer, (layout, _) in self.fresh.items()}


class Writer:
    """Generator of the function of one program.

    ``names`` are globals of the function: ``run``, ``tables``, ``fitted`` and ``KernelFailed``, the ``pool`` of
    workspaces, ``new`` for a new workspace, and ``take`` for reused memory of saved results. ``loops`` are functions
    that run the loops in the program. With ``profiled``, every step is a profiler event; ``run`` records the events of
    native steps.

    ``code`` is that of the function, once it has been generated.
    """

    code: CodeType

    def __init__(
        self,
        plan: Schedule,
        wiring: Wiring,
        memory: ProgramMemory,
        names: Mapping[str, Any],
        loops: Mapping[int, Callable[..., Any]],
        profiled: bool = False,
    ) -> None:
        self.plan, self.wiring, self.memory, self.loops, self.profiled = plan, wiring, memory, loops, profiled
        self.native, self.called, self.stretches = wiring.native_buffers, wiring.called_slots, wiring.stretches
        self.names = {**names, **memory.layouts(), "part": part, "stack": torch.stack, "record": _RecordFunctionFast}
        self.lines: list[str] = []
        self.indent = _INDENT
        self.known: set[int] = set()
        self.looped = False
        self.lasting: set[int] = set()  # slots that are the same in all steps of a loop

    # ---- a program -------------------------------------------------------------------------------------------------

    def program(self) -> Callable[..., Any]:
        """The function ``(tensors, confirm)``.

        It returns the values of the graph's outputs, the launches of native steps (packed), and those of ATen calls.
        ``confirm``, if not None, is called with the values before inputs are written.
        """
        read = self.called | {result.buffer for result in self.plan.results if result}
        inputs = [i for i, buffer in enumerate(self.plan.buffers) if buffer.origin == "input"]
        if inputs:
            self._add(f"{_tuple(f's{i}' for i in inputs)} = tensors")
        self._add(*(f"bases[{self.memory.bases[i]}] = s{i}.data_ptr()" for i in inputs if i in self.native))
        self.known.update(read.intersection(inputs))
        self._name(self.memory.held, (f"held[{i}]" for i in range(len(self.memory.held))))
        if self.memory.saved:
            self._add("saved = take()")
        self._add("native = aten = 0")
        for number, stretch in enumerate(self.stretches):
            for buffer in self.memory.due.get(number, ()):
                self._make(buffer)
            if isinstance(stretch, Native) and stretch.first == self.memory.confirmed:
                self._confirm()
            self._stretch(stretch)
        self._confirm()
        self._add(f"return {self._values()}, native, aten")
        return self._function("tensors, confirm")

    def _confirm(self) -> None:
        self._add("if confirm is not None:", f"    confirm({self._values()})", "    confirm = None")

    def _values(self) -> str:
        return f"[{', '.join(map(self._value, self.plan.results))}]"

    def _value(self, result: ProgramResult | None) -> str:
        """A result as the caller receives it: the tensor of a Python call is viewed in the layout of the result."""
        if result is None or result.buffer not in self.known:
            return "None"
        if result.buffer in self.memory.fresh:
            return f"r{result.buffer}"
        given, value = self.plan.buffers[result.buffer], result.value
        if given.origin != "called" or same_layout(value, given.value):
            return f"s{result.buffer}"
        return f"part(s{result.buffer}, {self._constant(tuple(value.shape))}, {self._constant(value.stride())}, 0)"

    def _make(self, buffer: int) -> None:
        """Allocate a result that the caller receives, and declare it for Python calls and native steps."""
        _, taken = self.memory.fresh[buffer]
        made = f"saved[{self.memory.saved[buffer]}]" if buffer in self.memory.saved else f"empty(*l{buffer})"
        self._add(f"r{buffer} = {made}", f"bases[{self.memory.bases[buffer]}] = r{buffer}.data_ptr()")
        if buffer in self.called:
            self._add(f"s{buffer} = part(r{buffer}, *{self._constant(taken)})" if taken else f"s{buffer} = r{buffer}")
        self.known.add(buffer)

    # ---- a loop ----------------------------------------------------------------------------------------------------

    def loop(self, loop: LoopStep) -> Callable[..., Any]:
        """The function ``(operands)`` of a loop.

        It returns the last states and collected outputs, the launches of native steps (packed), and of ATen calls.
        """
        spec = loop.spec
        handed = [result.buffer for result in self.plan.results if result]
        states, collected = handed[: spec.carries], handed[spec.carries :]
        operands, begin = range(len(loop.args)), []
        self._add(*(f"x{i} = operands[{i}]" for i in operands))
        for i in range(spec.carries):
            self._name([i], [f"x{i}"])
            if i in self.native:
                begin.append(f"bases[{i}] = s{i}.data_ptr()")
        for i, how in enumerate(spec.step_inputs, start=spec.carries):
            step = f"x{i}.stride({how.dim}) * {self.plan.buffers[i].value.itemsize}"
            if i in self.native:
                self._add(f"d{i} = {step}", f"m{i} = x{i}.data_ptr() + {how.start} * d{i}")
                begin += self._moved(i, i, f"{how.step} * d{i}")
            if i in self.called:
                self._add(f"w{i} = x{i}.unbind({how.dim})")
                begin.append(f"s{i} = w{i}[{how.start} + {how.step} * t]")
                self.known.add(i)
        invariants = operands[spec.carries + len(spec.step_inputs) :]
        self._name(invariants, (f"x{i}" for i in invariants))
        self._add(*(f"bases[{self.memory.bases[i]}] = s{i}.data_ptr()" for i in invariants if i in self.native))
        self._name(self.memory.held, (f"held[{i}]" for i in range(len(self.memory.held))))
        self.lasting = {*invariants, *self.memory.held}
        self._add(*(f"k{n} = {self._empty(layout)}" for n, layout in enumerate(loop.layouts[spec.carries :])))
        for buffer, (layout, _) in self.memory.fresh.items():
            base = self.memory.bases[buffer]
            if buffer not in collected:
                count = 2 + _handed_on(handed, buffer, spec.carries)
                self._add(f"w{buffer} = [{', '.join([self._empty(layout)] * count)}]")
                begin.append(f"s{buffer} = w{buffer}[t % {count}]")
                begin += [f"bases[{base}] = s{buffer}.data_ptr()"] if buffer in self.native else []
                self.known.add(buffer)
                continue
            n = collected.index(buffer)
            self._add(f"m{buffer} = k{n}.data_ptr()", f"d{buffer} = k{n}.stride(0) * k{n}.itemsize")
            begin += self._moved(buffer, base, f"d{buffer}")
            if buffer in self.called or buffer in states or collected.count(buffer) > 1:
                self._add(f"w{buffer} = k{n}.unbind(0)")
                begin.append(f"s{buffer} = w{buffer}[t]")
                self.known.add(buffer)
        gathered = [n for n, b in enumerate(collected) if b not in self.memory.fresh or collected.index(b) != n]
        self._add(*(f"g{n} = []" for n in gathered))
        hoisted = self._hoisted()
        for call in hoisted:
            self._stretch(call)
        self._add("native = aten = 0", f"for t in range({spec.trip_count}):")
        self.indent = _INDENT + 4 * " "
        self.looped = True
        self._add(*begin)
        before = set(self.known)
        for stretch in self.stretches:
            if stretch not in hoisted:
                self._stretch(stretch)
        self._add(*(f"g{n}.append(s{collected[n]})" for n in gathered))
        if states:
            self._add(f"{_tuple(f's{i}' for i in range(spec.carries))} = {_tuple(f's{b}' for b in states)}")
        if passing := sorted(self.known - before):
            self._add(f"del {', '.join(f's{slot}' for slot in passing)}")
        self.indent, self.looped = _INDENT, False
        self._add(*(f"stack(g{n}, out=k{n})" for n in gathered), f"aten += {len(gathered)}")
        results = [*(f"s{i}" for i in range(spec.carries)), *(f"k{n}" for n in range(len(collected)))]
        self._add(f"return {_tuple(results)}, native, aten")
        return self._function("operands")

    def _moved(self, buffer: int, base: int, step: str) -> list[str]:
        return [f"bases[{base}] = m{buffer}", f"m{buffer} += {step}"]

    def _hoisted(self) -> list[PythonCall]:
        """Views of values that are the same in all steps, which are taken once before the loop."""
        found = []
        for stretch in self.stretches:
            if not isinstance(stretch, PythonCall):
                continue
            step = self.plan.steps[stretch.number]
            if not isinstance(step, CallStep) or step.launches:
                continue
            if self.lasting.issuperset(slots_read((step.args, step.kwargs), self.plan)):
                self.lasting.update(slot_of(ref, self.plan) for _, ref in step.results)
                found.append(stretch)
        return found

    # ---- stretches -------------------------------------------------------------------------------------------------

    def _stretch(self, stretch: Stretch) -> None:
        if isinstance(stretch, Native):
            self._add(
                f"made = run(tables, {stretch.first}, {stretch.last}, address)",
                "if made < 0:",
                "    raise KernelFailed",
                "native += made",
            )
            return
        step = self.plan.steps[stretch.number]
        assert isinstance(step, PythonStep)
        if isinstance(step, LoopStep):
            steps = self._constant(self.loops[stretch.number])
            lines = [f"result, launched, calls = {steps}({self._argument(step.args)})"]
            lines += ["native += launched", "aten += calls", *self._given(step, "result"), "del result"]
        elif len(step.results) == 1:
            lines = [*self._given(step, self._called(stretch.number, step))]
        else:
            lines = [f"result = {self._called(stretch.number, step)}", *self._given(step, "result"), "del result"]
        if isinstance(step, CallStep) and step.launches:
            lines.append(f"aten += {step.launches}")
        if self.profiled and isinstance(step, CallStep) and step.launches:
            self._add(f"with record({title(step)!r}):")
            lines = [f"    {line}" for line in lines]
        self._add(*lines)
        dead = [s for s in stretch.dead if s in self.known and s not in self.lasting]
        if dead:
            self._add(f"del {', '.join(f's{slot}' for slot in dead)}")
            self.known.difference_update(dead)

    def _called(self, number: int, step: CallStep) -> str:
        """The expression that calls an operator, which is step ``number``."""
        function: Callable[..., Any] = step.function
        if isinstance(function, OpOverload):
            known = self.wiring.functions
            if number not in known:
                known[number] = fastest(function, self._values_of(step.args), self._values_of(step.kwargs))
            function = known[number]
        given = [self._argument(one) for one in step.args]
        for name, one in step.kwargs.items():
            plain = name.isidentifier() and not iskeyword(name)
            given.append(f"{name}={self._argument(one)}" if plain else f"**{{{name!r}: {self._argument(one)}}}")
        return f"{self._constant(function)}({', '.join(given)})"

    def _given(self, step: PythonStep, result: str) -> list[str]:
        """Lines that bind the results of a call, and check that their layouts are as predicted."""
        lines = []
        for position, ref in step.results:
            slot = slot_of(ref, self.plan)
            self.known.add(slot)
            lines.append(f"s{slot} = {result}" if position is None else f"s{slot} = {result}[{position}]")
            if ref.view:
                continue
            value = self.plan.buffers[ref.index].value
            size, stride, dtype = map(self._constant, (tuple(value.shape), value.stride(), value.dtype))
            missing = "" if position is None else f"s{slot} is None or "  # some results exist for gradients only
            differs = (
                f"{missing}s{slot}.stride() != {stride} or s{slot}.shape != {size} or s{slot}.dtype is not {dtype}"
            )
            lines.append(f"if not t and ({differs}):" if self.looped and _is_regular(step) else f"if {differs}:")
            lines.append(f"    s{slot} = fitted({self._constant(step)}, s{slot}, {size}, {stride}, {dtype})")
            if ref.index in self.native:
                lines.append(f"bases[{self.memory.bases[ref.index]}] = s{slot}.data_ptr()")
        return lines

    # ---- text ------------------------------------------------------------------------------------------------------

    def _add(self, *lines: str) -> None:
        self.lines += [self.indent + line for line in lines]

    def _name(self, slots: Iterable[int], expressions: Iterable[str]) -> None:
        for slot, expression in zip(slots, expressions, strict=True):
            self._add(f"s{slot} = {expression}")
            self.known.add(slot)

    def _empty(self, layout: Layout) -> str:
        return f"empty({', '.join(map(self._constant, layout))})"

    def _constant(self, value: Any) -> str:
        """An expression for ``value``: a literal if possible, else a new global name."""
        if value is None or type(value) in (int, bool, str):
            return repr(value)
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def _argument(self, argument: Any) -> str:
        """An argument with references as local names; tuples become lists."""
        if isinstance(argument, Ref):
            return f"s{slot_of(argument, self.plan)}"
        if not isinstance(argument, (tuple, list, dict)):
            return self._constant(argument)
        if not refs_in(argument):
            return self._constant(replaced(argument, {}))
        if isinstance(argument, dict):
            return f"{{{', '.join(f'{name!r}: {self._argument(item)}' for name, item in argument.items())}}}"
        return f"[{', '.join(map(self._argument, argument))}]"

    def _values_of(self, argument: Any) -> Any:
        """An argument with references replaced by fake tensors of the same layouts."""
        values = {
            ref: (self.plan.views if ref.view else self.plan.buffers)[ref.index].value for ref in refs_in(argument)
        }
        return replaced(argument, values)

    def _function(self, parameters: str) -> Callable[..., Any]:
        """The function of these lines; each call takes a workspace from the pool, and returns it."""
        source = "\n".join([f"def called({parameters}):", *_BEGIN, *self.lines, *_END])
        self.code = _code(source)
        return function_of(self.code, self.names)


@lru_cache(maxsize=256)
def _code(source: str) -> CodeType:
    """The code of a function. Programs that differ in sizes only have the same text."""
    return compile(source, "<fuse calls>", "exec")


def function_of(code: CodeType, names: dict[str, Any]) -> Callable[..., Any]:
    """The function of generated code, with ``names`` as its globals."""
    exec(code, names)
    function: Callable[..., Any] = names["called"]
    return function


def replaced(argument: Any, values: Mapping[Ref, Any]) -> Any:
    """An argument with references replaced by ``values``; tuples become lists.

    >>> replaced((Ref(1), 2, (Ref(0), 3)), {Ref(0): "a", Ref(1): "b"})
    ['b', 2, ['a', 3]]
    """
    if isinstance(argument, Ref):
        return values[argument]
    if isinstance(argument, dict):
        return {name: replaced(item, values) for name, item in argument.items()}
    if isinstance(argument, (tuple, list)):
        return [replaced(item, values) for item in argument]
    return argument


def _is_regular(step: PythonStep) -> bool:
    """Whether an operator's results have the same layout in all steps of a loop, whatever the values are."""
    function = step.function if isinstance(step, CallStep) else None
    if not isinstance(function, OpOverload) or function.namespace != "aten":
        return False
    return torch.Tag.dynamic_output_shape not in function.tags


def _tuple(names: Iterable[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"


def _handed_on(handed: Sequence[int], buffer: int, carries: int) -> int:
    """Number of further steps that a value of ``buffer`` stays a state, passed from one carry to the next."""
    held, longer = {i for i in range(carries) if handed[i] == buffer}, 0
    while (held := {i for i in range(carries) if handed[i] in held}) and longer < carries:
        longer += 1
    return longer
