"""A trace function that watches the user's code while it is recorded, and sleeps while operators are.

    with watched(make):                      make() gives a watch for each recording
        capture(model, args)                 forward runs, and the watch sees each instruction
    graph.meta["watched"]                    what the watch found

Whoever captures a call decides what is watched (:mod:`fuse.runtime.size_uses.watched_loops`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any, Protocol


class Watch(Protocol):
    """Watches one recording."""

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """The trace function, as ``sys.settrace`` wants it."""

    def found(self) -> Any:
        """What was seen, after the code has ended."""


_WATCHES: ContextVar[Callable[[], Watch] | None] = ContextVar("watches", default=None)


@contextlib.contextmanager
def watched(make: Callable[[], Watch]) -> Iterator[None]:
    """A context in which each recording of this thread is watched by a watch of its own."""
    token = _WATCHES.set(make)
    try:
        yield
    finally:
        _WATCHES.reset(token)


@contextlib.contextmanager
def watching() -> Iterator[Watch | None]:
    """A context in which the user's code is watched; None if nobody wants that, or a debugger is active."""
    make = _WATCHES.get()
    if make is None or sys.gettrace() is not None or sys.getprofile() is not None:
        yield None
        return
    watch = make()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces instructions only if it was set before
    sys.settrace(watch.trace)
    try:
        yield watch
    finally:
        sys.settrace(None)


def asleep(watch: Watch, run: Callable[..., Any], *args: Any) -> Any:
    """``run(*args)``, which nothing watches."""
    sys.settrace(None)
    try:
        return run(*args)
    finally:
        sys.settrace(watch.trace)
