"""Stopping of compilers on Ctrl-C, whichever thread waits for them.

A compiler has its own process group, which Ctrl-C does not reach. The thread that waits for it is often not the main
thread, which is interrupted. So an interruption within :func:`stopped_on_interrupt` stops all compilers that were
started for the caller, also by threads that run in a copy of its context.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextvars import ContextVar
from typing import TypeVar

from fuse.errors import CompileFailed

Result = TypeVar("Result")

ALERT = 0.2
"""Seconds between checks for an interruption in a waiting thread: a user does not notice the delay."""


class _Compilers:
    """The running compilers of one caller."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._lock = threading.Lock()
        self.stopped = False

    def add(self, process: int) -> None:
        with self._lock:
            self._running.add(process)
            if self.stopped:
                kill_group(process)

    def discard(self, process: int) -> None:
        with self._lock:
            self._running.discard(process)

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            for process in self._running:
                kill_group(process)


_FOR: ContextVar[tuple[_Compilers, ...]] = ContextVar("_FOR", default=())


@contextlib.contextmanager
def stopped_on_interrupt() -> Iterator[None]:
    """A context in which an interruption of the caller stops its running compilers and prevents new ones.

    >>> with stopped_on_interrupt():
    ...     are_stopped()
    False
    """
    compilers = _Compilers()
    token = _FOR.set((*_FOR.get(), compilers))
    try:
        yield
    except Exception:
        raise
    except BaseException:
        compilers.stop()
        raise
    finally:
        _FOR.reset(token)


def awaited(future: Future[Result]) -> Result:
    """The result of ``future``, waiting with a timeout: Python misses a Ctrl-C just before a wait without one.

    Raises:
        CompileFailed: the caller of this thread was interrupted.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> with ThreadPoolExecutor() as pool:
    ...     awaited(pool.submit(sum, [1, 2]))
    3
    """
    while not future.done():
        if are_stopped():
            raise CompileFailed("a compiler was not waited for: the call was interrupted")
        wait([future], timeout=ALERT)
    return future.result()


def are_stopped() -> bool:
    """Whether the caller of this thread was interrupted."""
    return any(compilers.stopped for compilers in _FOR.get())


@contextlib.contextmanager
def running(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A context in which ``process`` counts as a compiler of this thread's callers."""
    callers = _FOR.get()
    for compilers in callers:
        compilers.add(process.pid)
    try:
        yield
    finally:
        for compilers in callers:
            compilers.discard(process.pid)


def kill_group(process: int) -> None:
    """Kill a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
