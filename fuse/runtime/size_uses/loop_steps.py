"""Loops whose steps differ in Python: how many steps they take is noted, since it may be a size.

    for row in x:                     n is another number after each step: a size that no comparison records
        h, n = cell(row, h), f(n)
    for t in range(T):                steps take two paths, first one, then the other: the graphs show which
        y = a(x[t]) if t < 9 else b(x[t])
    for t in range(T):                one step takes another path than those around it: what it leaves in ``before`` is
        h, before = before, h if t != 23 else -h      used at one length alone

At a size, Python's values after a step of a loop are those after the last step of a shorter loop. If they are the same
after all steps, or change once, all lengths between two that have the same graph have it, too. Otherwise the number of
steps is noted, and has to be the same at all sizes at which ``forward`` is followed. The first step may differ: with a
single step, the graph is another one. The last step knows that it is the last, and records that: it counts only where
it is like steps before it.

``forward`` is followed at few steps. So captures are watched as well (:mod:`fuse.runtime.size_uses.watched_loops`).

Calls by functions of C (``map``, ``reduce``), and of a function by itself, count as steps. The instructions of the code
tell the paths (:mod:`fuse.graph.recording.code_events`).
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FrameType, ModuleType
from typing import Any, Protocol

from fuse.graph.state.object_contents import attributes_of
from fuse.runtime.size_uses.bytecode_uses import constant_indices, instructions
from fuse.runtime.size_uses.hand_counters import counters
from fuse.runtime.size_uses.inlined_displays import Display, displays_of
from fuse.runtime.size_uses.loop_variables import CodeLoop, loops_of
from fuse.runtime.size_uses.python_values import is_recorded, look

STEP, CALL = 20, 10
"""About how many microseconds a step of a loop, and a call, take."""
_DISPLAYS = ("<listcomp>", "<setcomp>", "<dictcomp>")


Place = tuple[Hashable, ...]
"""Where a loop is: the name and the first line of its code, and the offset of its first instruction."""
PATH, RESULT = "its path", "a result"
"""Names of differences that are none of variables."""


class Note(Protocol):
    """Gets the place of a loop whose steps differ, what differs (a variable, a path or a result), the number of steps,
    and whether symbolic sizes tell it anyway."""

    def __call__(self, place: Place, what: str, count: int, recorded: bool, /) -> None: ...


@dataclass
class _History:
    """How often a value changed from step to step."""

    changes: int = -1
    last: Any = None
    before: Any = None

    def add(self, value: Any) -> None:
        if self.changes < 0 or value != self.last:
            self.changes += 1
            self.last, self.before = value, self.last

    def with_last(self, value: Any) -> int:
        """The changes, of which the last step's is one if it returns to the value before."""
        return self.changes + (self.changes > 0 and value == self.before)


@dataclass
class _Steps:
    """The steps of a loop so far: the paths that they took, and what they left.

    Attributes:
        place: where the loop is.
        start: the offset of its first instruction.
        body: the offsets of its instructions.
        after: the variables that are used behind the loop only.
        left: their values behind the loop.
        display: the list that the loop makes, if it is an inlined comprehension.
        differ: whether something else tells that steps differ.
    """

    place: Place
    start: int = -1
    body: frozenset[int] = frozenset()
    after: tuple[str, ...] = ()
    display: Display | None = None
    left: Mapping[str, Any] = field(default_factory=dict)
    count: int = 0
    path: int = 0
    differ: bool = False
    _all: int = 0
    _paths: _History = field(default_factory=_History)
    _values: dict[str, _History] = field(default_factory=dict)
    _latest: tuple[int, dict[str, Any]] = (0, {})

    def begin(self, looks: dict[str, Any]) -> None:
        """A step begins, with these values."""
        path, before = self._latest
        if self.count > 1:
            for name, one in before.items():
                self._values.setdefault(name, _History()).add(one)
        if self.count > 2:
            self._paths.add(path)
        self._latest = self.path, looks
        self._all = hash((self._all, self.path))
        self.path = 0
        self.count += 1

    def summary(self) -> int:
        """A number that tells all paths."""
        return hash((self._all, self.path))

    def differences(self) -> Iterator[tuple[str, bool]]:
        """The names of differences between steps, and whether symbolic sizes tell each of them."""
        path, values = self._latest
        if self.differ:
            yield RESULT, False
        if self._paths.with_last(path) > 1:
            yield PATH, False
        for name, one in self._values.items():
            if one.with_last(values.get(name)) > 1:
                yield name, name in self.after and is_recorded(self.left.get(name))


@dataclass(eq=False)
class _Running:
    """A function that runs, the loops that it is in, the steps that its call and its calls are, its last
    instruction that is ``looked_at``, and the comprehension whose list comes into a variable next."""

    frame: FrameType
    loops: Mapping[int, CodeLoop]
    indices: Mapping[int, tuple[str, tuple[int, ...]]]
    looked_at: frozenset[int]
    inside: list[_Steps] = field(default_factory=list)
    path: int = 0
    calls: dict[CodeType, _Steps] = field(default_factory=dict)
    called: _Steps | None = None
    last: int = -1
    stored: _Steps | None = None

    def go(self, number: int) -> None:
        """Go on along the path."""
        if self.inside:
            self.inside[-1].path = hash((self.inside[-1].path, number))
        else:
            self.path = hash((self.path, number))


class LoopSteps:
    """Watches the loops of one thread; ``trace`` is told of its code.

    Args:
        is_own: whether the code of a frame is the user's.
        note: called for whatever differs between the steps of a loop.
        reaches: gets the length of a list and a number: code finds out whether the list has so many elements.
        most: about how many microseconds it may take; beyond, it gives up.
        largest: of lists and dictionaries with more entries, only the number of these is looked at.
    """

    def __init__(
        self,
        is_own: Callable[[FrameType], bool],
        note: Note,
        reaches: Callable[[int, int], None],
        most: int,
        largest: int | None = None,
    ) -> None:
        self._is_own, self._note, self._reaches = is_own, note, reaches
        self._running: list[_Running] = []
        self._suspended: dict[FrameType, _Running] = {}
        self._nested: dict[CodeType, list[_Steps]] = {}
        self._left, self._largest = most, largest

    @property
    def gave_up(self) -> bool:
        """Whether not all is known, because there was too much to look at, or because of a fault."""
        return self._left < 0

    def _spend(self, count: int) -> None:
        self._left -= count

    def _look(self, value: Any) -> Any:
        return look(value, self._spend, self._largest)

    def _give_up(self) -> None:
        """Look at nothing more."""
        self._left = -1

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A function begins, or a generator goes on."""
        if event != "call" or self.gave_up or not self._is_own(frame):
            return None
        try:
            self._begin(frame)
        except Exception:  # a fault in fuse must not reach the user
            self._give_up()
            return None
        if sys.gettrace() is not None:  # from Python 3.12 on, nobody but debuggers needs that
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._go_on

    def _begin(self, frame: FrameType) -> None:
        running = self._suspended.pop(frame, None)
        if running is None:
            code = frame.f_code
            running = _Running(frame, loops_of(code), constant_indices(code), looked_at(code))
            self._note_call(running)
        self._running.append(running)

    def end(self) -> None:
        """The code that was watched has ended."""
        try:
            for running in (*reversed(self._running), *self._suspended.values()):
                self._leave_loops(running)
        except Exception:  # as above
            self._give_up()
        self._running.clear()
        self._suspended.clear()

    def _note_call(self, running: _Running) -> None:
        """Note a call as a step: of a function of C that calls again, and of a function that runs already."""
        code, frame = running.frame.f_code, running.frame
        place = code.co_name, code.co_firstlineno
        caller = self._running[-1] if self._running else None
        self._spend(CALL)
        arguments = dict(frame.f_locals)
        looks = {name: self._look(one) for name, one in arguments.items()}
        if caller is not None and frame.f_back is caller.frame:
            steps = caller.calls.setdefault(code, _Steps((*place, "called"), after=tuple(arguments)))
            steps.left = arguments
            shared = _shared(caller.frame)
            around = {f"{name} of the caller": self._look(one) for name, one in shared.items()}
            steps.begin({**looks, **around})
            running.called = steps
        nested = self._nested.setdefault(code, [])
        nested.append(nested[-1] if nested else _Steps((*place, "within itself")))
        nested[-1].begin(looks)

    def _go_on(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self._left < 0:
            frame.f_trace_opcodes = False
            return None
        running = self._running[-1] if self._running else None
        if running is None or running.frame is not frame:
            return self._go_on
        try:
            if event == "opcode":
                self._left -= 1
                if (offset := frame.f_lasti) in running.looked_at:
                    self._arrive(running, offset)
            elif event == "return":
                self._running.pop()
                self._return(running, arg)
        except Exception:  # as above
            self._give_up()
        return self._go_on

    def _arrive(self, running: _Running, offset: int) -> None:
        """An instruction is about to run."""
        if running.calls:
            self._end_calls(running)
        if running.stored is not None:
            self._look_at_list(running, running.stored)
        before, running.last = running.last, offset
        while running.inside and offset not in running.inside[-1].body:
            self._leave(running, running.inside.pop(), before)
        if (loop := running.loops.get(offset)) is not None:
            if not running.inside or running.inside[-1].body is not loop.body:
                place = running.frame.f_code.co_name, running.frame.f_code.co_firstlineno, offset
                running.inside.append(_Steps(place, offset, loop.body, loop.after, loop.display))
            running.inside[-1].begin(self._looks(running.frame, loop))
        if (index := running.indices.get(offset)) is not None:
            of = running.frame.f_locals.get(index[0])
            if isinstance(of, (list, tuple)):
                for number in index[1]:
                    self._reaches(len(of), number)
        running.go(offset)

    def _return(self, running: _Running, result: Any) -> None:
        frame, code = running.frame, running.frame.f_code
        caller = self._running[-1] if self._running else None
        if frame.f_lasti in _offsets(code, "YIELD_VALUE"):
            self._suspended[frame] = running
            user = caller.frame if caller is not None and caller.frame is frame.f_back else None
            in_loop = user is not None and user.f_lasti in _offsets(user.f_code, "FOR_ITER")
            if running.inside and not in_loop:  # in a loop of Python, it becomes a variable, which is looked at
                running.inside[-1].differ |= not is_recorded(result)
            path = running.inside[-1].path if running.inside else running.path
            if caller is not None:
                caller.go(hash((id(code), frame.f_lasti, path)))
            return
        self._leave_loops(running)
        if code.co_name in _DISPLAYS and not is_recorded(result):
            self._note((code.co_name, code.co_firstlineno), RESULT, len(result), False)
        if nested := self._nested.get(code):
            steps = nested.pop()
            if nested:
                steps.differ |= not is_recorded(result)
            else:
                self._judge(steps)
        if running.called is not None:
            running.called.path = running.path
            running.called.differ |= not is_recorded(result)
        if caller is not None:
            caller.go(hash((id(code), running.path, self._look_at_owner(frame))))

    def _leave_loops(self, running: _Running) -> None:
        self._end_calls(running)
        while running.inside:
            self._leave(running, running.inside.pop(), running.last)

    def _leave(self, running: _Running, steps: _Steps, last: int) -> None:
        """A loop has ended, with the ``last`` instruction."""
        if last != steps.start:  # within a step
            steps.begin(self._looks(running.frame, running.loops[steps.start]))
        steps.left = running.frame.f_locals
        self._judge(steps)
        running.go(steps.summary())
        if steps.display is not None and steps.display.variable:
            running.stored = steps
        elif steps.display is not None and not steps.display.is_of_tensors:
            self._note(steps.place, RESULT, steps.count, False)

    def _look_at_list(self, running: _Running, steps: _Steps) -> None:
        """Note the steps of a comprehension if its list, once it is in a variable, is not recorded."""
        if steps.display is not None and running.last == steps.display.stored:
            running.stored = None
            if not is_recorded(running.frame.f_locals.get(steps.display.variable)):
                self._note(steps.place, RESULT, steps.count, False)

    def _looks(self, frame: FrameType, loop: CodeLoop) -> dict[str, Any]:
        """The values that a step of a loop may receive, as they are now."""
        self._spend(STEP)
        values, known = frame.f_locals, counters(frame.f_code)
        names = (name for name in (*loop.within, *loop.after) if name not in known)
        found = {name: self._look(values.get(name)) for name in names}
        return {**found, **{name: self._look(one) for name, one in _shared(frame).items()}}

    def _look_at_owner(self, frame: FrameType) -> Hashable:
        """The first argument as it is now, if it is an object that may have changed; numbers of steps never do."""
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        return self._look(owner) if attributes_of(owner) is not None and not isinstance(owner, int) else None

    def _end_calls(self, running: _Running) -> None:
        """The function of C has ended that called."""
        for steps in running.calls.values():
            if steps.count > 1:
                self._judge(steps)
        running.calls.clear()

    def _judge(self, steps: _Steps) -> None:
        for what, recorded in steps.differences():
            self._note(steps.place, what, steps.count, recorded)


def _shared(frame: FrameType) -> dict[str, Any]:
    """The values that code shares with other code: variables of closures, and globals."""
    code, values = frame.f_code, frame.f_locals
    found = {name: values.get(name) for name in (*code.co_cellvars, *code.co_freevars)}
    for name in _globals(code):
        value = frame.f_globals.get(name)
        if not isinstance(value, (type, ModuleType, BuiltinFunctionType)):
            found[name] = value
    return found


@functools.lru_cache(maxsize=4096)
def _globals(code: CodeType) -> frozenset[str]:
    return frozenset(one.argval for one in instructions(code) if one.opname in ("LOAD_GLOBAL", "STORE_GLOBAL"))


@functools.lru_cache(maxsize=4096)
def looked_at(code: CodeType) -> frozenset[int]:
    """The offsets of the instructions that are looked at: those that begin a block, come after a call, index by
    constants, or store the list of a comprehension, and the next one. Others follow the one before them.

    >>> def rows(x):
    ...     for row in x:
    ...         y = row
    >>> names = [one.opname for one in instructions(rows.__code__) if one.offset in looked_at(rows.__code__)]
    >>> "FOR_ITER" in names, "JUMP_BACKWARD" in names
    (True, False)
    """
    found = [one for one in dis.get_instructions(code) if one.opname != "CACHE"]
    stored = {one.stored for one in displays_of(code).values()}
    made = {found[0].offset, *constant_indices(code), *stored}
    for one, after in itertools.pairwise(found):
        jumps = one.opcode in dis.hasjrel or one.opcode in dis.hasjabs
        if jumps:
            made.add(one.argval)
        if jumps or one.opname.startswith("CALL") or one.offset in stored:
            made.add(after.offset)
        if one.opname == "EXTENDED_ARG" and one.offset in made:
            made.add(after.offset)
    made.update(entry.target for entry in getattr(dis.Bytecode(code), "exception_entries", ()))
    return frozenset(made)


@functools.lru_cache(maxsize=4096)
def _offsets(code: CodeType, name: str) -> frozenset[int]:
    """The offsets of the instructions with a name."""
    return frozenset(one.offset for one in instructions(code) if one.opname == name)
