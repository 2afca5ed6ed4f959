"""The user's code, watched while it is recorded.

    with watched(make):                      make() gives a watch for each recording
        capture(model, args)                 forward runs, and the watch sees its loops
    graph.meta["signature"].watched          what the watch found

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
class Watch:
    """A watch of one recording: the events that it gets, and a function for what it found, once the code has ended."""

    events: Events
    found: Callable[[], Any]


_WATCHES: ContextVar[Callable[[], Watch] | None] = ContextVar("watches", default=None)


@contextlib.contextmanager
def watched(make: Callable[[], Watch]) -> Iterator[None]:
    """A context in which each recording of this thread is watched by a watch of its own."""
    token = _WATCHES.set(make)
    try:
        yield
    finally:
        _WATCHES.reset(token)


@dataclass(eq=False)
class WatchedCode:
    """Code that is watched, and was: afterwards, nothing is asleep."""

    watch: Watch
    runs: bool = True

    def asleep(self, run: Callable[..., Any], *args: Any) -> Any:
        """``run(*args)``, which nothing watches."""
        return self.watch.events.asleep(run, *args) if self.runs else run(*args)

    def found(self) -> Any:
        """What was found."""
        return self.watch.found()


@contextlib.contextmanager
def watching() -> Iterator[WatchedCode | None]:
    """A context in which the user's code is watched; None if nobody wants that, or a debugger is active."""
    make = _WATCHES.get()
    if make is None:
        yield None
        return
    watch = make()
    with telling(watch.events) as events:
        code = WatchedCode(watch) if events is not None else None
        try:
            yield code
        finally:
            if code is not None:
                code.runs = False
