"""Events of the Python code that a thread runs, told as ``sys.settrace`` and ``sys.setprofile`` tell them.

    with telling(Events(trace, looked_at, is_own)) as events:
        forward(x)                       trace(frame, "call", None), then what it returns for "opcode" and "return"
        events.asleep(operator, x)       nothing is told of what runs inside, nor of imports

Python 3.12 and later have ``sys.monitoring``, which tells only of code that somebody wants to know about. Turning a
trace function off and on again takes a tenth of a millisecond there: it changes all code that runs. Instructions are
told for the user's code only, and only those that are looked at.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType, MethodDescriptorType
from typing import Any

from fuse.graph.patches.patched import in_this_thread, patched

Trace = Callable[[FrameType, str, Any], Any]
"""A function as ``sys.settrace`` takes it."""

_MONITORING: Any = getattr(sys, "monitoring", None)
_TOOLS = (4, 3, 5, 2)
"""Numbers of tools that debuggers and coverage do not use."""
_QUIET = ("fuse.", "torch.utils.", "torch._ops", "torch._subclasses.", "torch._library.", "torch.fx.")
"""Nobody is told of calls by code of these modules; most of it runs within operators only."""


@dataclass(eq=False)
class Events:
    """Who is told of code.

    Attributes:
        trace: told of all calls, or only of those of the user's functions. Its result is told of the instructions that
            are ``looked_at`` in this call, and of its return.
        looked_at: the offsets of these instructions; others may be told, too.
        is_own: whether the code of a frame is the user's.
        watch: told of all calls and returns, and of the functions of C that are called; may leave out code that only
            operators run.
    """

    trace: Trace
    looked_at: Callable[[CodeType], frozenset[int]]
    is_own: Callable[[FrameType], bool]
    watch: Trace | None = None
    _sleeping: int = 0

    def asleep(self, run: Callable[..., Any], *args: Any) -> Any:
        """``run(*args)``, of which nothing is told."""
        if _MONITORING is not None:
            self._sleeping += 1
            try:
                return run(*args)
            finally:
                self._sleeping -= 1
        trace, watch = sys.gettrace(), sys.getprofile()  # the code may have begun a debugger
        sys.settrace(None)
        sys.setprofile(None)
        try:
            return run(*args)
        finally:
            sys.setprofile(watch)
            sys.settrace(trace)


@contextlib.contextmanager
def telling(events: Events) -> Iterator[Events | None]:
    """A context in which events of this thread are told; None if a debugger or a profiler is active."""
    tool = next((one for one in _TOOLS if _MONITORING is not None and _MONITORING.get_tool(one) is None), None)
    if sys.gettrace() is not None or sys.getprofile() is not None or (tool is None and _MONITORING is not None):
        yield None
    elif tool is None:
        with _imports(events.asleep):
            sys.setprofile(events.watch)
            sys.settrace(events.trace)
            try:
                yield events
            finally:
                if sys.gettrace() == events.trace:
                    sys.settrace(None)
                if sys.getprofile() == events.watch:
                    sys.setprofile(None)
    else:
        monitor = _Monitor(events, tool)
        with _imports(monitor.off):
            monitor.begin()
            try:
                yield events
            finally:
                monitor.end()


@contextlib.contextmanager
def _imports(asleep: Callable[..., Any]) -> Iterator[None]:
    """A context in which modules are imported ``asleep``: there is much code in them, which knows nothing of calls."""

    def sleeping(own: Callable[..., Any]) -> Callable[..., Any]:
        def imported(name: str, *args: Any, **kwargs: Any) -> Any:
            is_new = name not in sys.modules
            return asleep(lambda: own(name, *args, **kwargs)) if is_new else own(name, *args, **kwargs)

        return in_this_thread(imported, own)

    statement, function = sleeping(builtins.__import__), sleeping(importlib.import_module)
    with patched(builtins, {"__import__": statement}), patched(importlib, {"import_module": function}):
        yield


@dataclass(eq=False)
class _Monitor:
    """Tells events by ``sys.monitoring``. Its events are those of all threads; others than this one's are left out."""

    events: Events
    tool: int
    _thread: int = field(default_factory=threading.get_ident)
    _own: dict[CodeType, frozenset[int]] = field(default_factory=dict)
    _others: set[CodeType] = field(default_factory=set)
    _calls: dict[FrameType, Trace] = field(default_factory=dict)

    def off(self, run: Callable[..., Any]) -> Any:
        """``run()``, without a look at the functions that it calls."""
        if self.events._sleeping:
            return run()
        _MONITORING.set_events(self.tool, 0)
        try:
            return self.events.asleep(run)
        finally:
            _MONITORING.set_events(self.tool, _begun())

    def _callbacks(self) -> dict[int, Callable[..., Any]]:
        """The methods that are called for events."""
        names = _MONITORING.events
        of_calls = {names.CALL: self._call, names.C_RETURN: self._called, names.C_RAISE: self._called}
        return {
            names.PY_START: self._start,
            names.PY_RESUME: self._start,
            names.PY_THROW: self._throw,
            names.INSTRUCTION: self._instruction,
            names.PY_RETURN: self._return,
            names.PY_YIELD: self._return,
            names.PY_UNWIND: self._unwind,
            **(of_calls if self.events.watch is not None else {}),
        }

    def begin(self) -> None:
        _MONITORING.use_tool_id(self.tool, "fuse")
        for event, function in self._callbacks().items():
            _MONITORING.register_callback(self.tool, event, function)
        _MONITORING.restart_events()  # earlier contexts turned some off; other tools turn theirs off again
        _MONITORING.set_events(self.tool, _begun())

    def end(self) -> None:
        _MONITORING.set_events(self.tool, 0)
        for code in (*self._own, *self._others):
            _MONITORING.set_local_events(self.tool, code, 0)
        for event in self._callbacks():
            _MONITORING.register_callback(self.tool, event, None)
        _MONITORING.free_tool_id(self.tool)
        self._calls.clear()

    def _silent(self) -> bool:
        return bool(self.events._sleeping) or threading.get_ident() != self._thread

    def _start(self, code: CodeType, offset: int) -> Any:
        """A function begins, or a generator goes on."""
        if code not in self._own and code not in self._others:
            frame = sys._getframe(1)
            if str(frame.f_globals.get("__name__", "")).startswith(_QUIET):
                return _MONITORING.DISABLE
            if self._silent():
                return None
            if not self._know(code, frame):
                return _MONITORING.DISABLE
        if not self._silent() and not self._begin(code, sys._getframe(1)):
            return _MONITORING.DISABLE
        return None

    def _know(self, code: CodeType, frame: FrameType) -> bool:
        """Ask for the events of code that is called for the first time; False if there are none."""
        names = _MONITORING.events
        calls = names.CALL | names.C_RETURN | names.C_RAISE if self.events.watch is not None else 0
        if self.events.is_own(frame):
            self._own[code] = self.events.looked_at(code)
            inside = names.INSTRUCTION | names.PY_RETURN | names.PY_YIELD | calls
            _MONITORING.set_local_events(self.tool, code, inside)
        elif calls:
            self._others.add(code)
            _MONITORING.set_local_events(self.tool, code, calls)
        else:
            return False
        return True

    def _begin(self, code: CodeType, frame: FrameType) -> bool:
        """Tell a call; False if nobody wants to know of such calls."""
        local = self.events.trace(frame, "call", None) if code in self._own else None
        if local is not None:
            self._calls[frame] = local
        if self.events.watch is not None:
            self.events.watch(frame, "call", None)
        return local is not None or self.events.watch is not None

    def _throw(self, code: CodeType, offset: int, error: BaseException) -> None:
        if not self._silent() and (code in self._own or code in self._others):
            self._begin(code, sys._getframe(1))

    def _instruction(self, code: CodeType, offset: int) -> Any:
        if offset not in self._own.get(code, ()):
            return _MONITORING.DISABLE
        if not self._silent():
            frame = sys._getframe(1)
            if (local := self._calls.get(frame)) is not None and local(frame, "opcode", None) is None:
                return _MONITORING.DISABLE  # it wants to know nothing more
        return None

    def _return(self, code: CodeType, offset: int, value: Any) -> None:
        if not self._silent():
            self._end(code, sys._getframe(1), value)

    def _unwind(self, code: CodeType, offset: int, error: BaseException) -> None:
        if code in self._own and not self._silent():
            self._end(code, sys._getframe(1), None)

    def _end(self, code: CodeType, frame: FrameType, value: Any) -> None:
        if (local := self._calls.pop(frame, None)) is not None:
            local(frame, "return", value)
        if self.events.watch is not None:
            self.events.watch(frame, "return", value)

    def _call(self, code: CodeType, offset: int, function: Any, first: Any) -> None:
        """A function is called; those of C are told."""
        watch = self.events.watch
        if watch is None or self._silent():
            return
        if type(function) is MethodDescriptorType and first is not _MONITORING.MISSING:
            function = function.__get__(first, type(first))
        if isinstance(function, _OF_C):
            watch(sys._getframe(1), "c_call", function)

    def _called(self, code: CodeType, offset: int, function: Any, first: Any) -> None:
        if self.events.watch is not None and not self._silent():
            self.events.watch(sys._getframe(1), "c_return", function)


def _begun() -> int:
    """The events of all code."""
    names = _MONITORING.events
    found: int = names.PY_START | names.PY_RESUME | names.PY_THROW | names.PY_UNWIND
    return found


_OF_C = type(len)
"""The class of functions of C."""
