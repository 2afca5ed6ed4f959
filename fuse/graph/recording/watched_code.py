"""The user's code, watched while it is recorded.

    with watched(make):                      make() gives a WatchedCode for each recording
        capture(model, args)                 forward runs, and its events are told
    graph.meta["signature"].watched          what was found

Whoever captures a call decides what is watched (:mod:`fuse.runtime.size_uses.watched_loops`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fuse.graph.recording.code_events import Events, telling


@dataclass(eq=False)
class WatchedCode:
    """The code of one recording: who is told of it, and a function for what was found once it has ended. ``runs``:
    whether it is running now."""

    events: Events
    found: Callable[[], Any]
    runs: bool = False

    def asleep(self, run: Callable[..., Any], *args: Any) -> Any:
        """``run(*args)``, which nothing watches."""
        return self.events.asleep(run, *args) if self.runs else run(*args)


_MAKE: ContextVar[Callable[[], WatchedCode] | None] = ContextVar("watched code", default=None)


@contextlib.contextmanager
def watched(make: Callable[[], WatchedCode]) -> Iterator[None]:
    """A context in which the code of each recording of this thread is watched."""
    token = _MAKE.set(make)
    try:
        yield
    finally:
        _MAKE.reset(token)


@contextlib.contextmanager
def watching() -> Iterator[WatchedCode | None]:
    """A context in which the user's code is watched; None if nobody wants that, or a debugger is active."""
    make = _MAKE.get()
    if make is None:
        yield None
        return
    code = make()
    with telling(code.events) as events:
        code.runs = events is not None
        try:
            yield code if code.runs else None
        finally:
            code.runs = False
