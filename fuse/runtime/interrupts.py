"""Ctrl-C while compilers run: they are stopped, whichever thread waits for them.

A compiler is a process group of its own, which Ctrl-C does not reach, and the thread that waits for it is often not the
main one, which is interrupted. An interruption within :func:`stopped_on_interrupt` therefore stops all compilers that
were started for the caller, by threads that run in a copy of its context.
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

Result = TypeVar("Result")

ALERT = 0.2
"""Seconds after which a thread that waits looks whether it was interrupted."""


class _Compilers:
    """The compilers that run for one caller."""

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
    """Stop the compilers that are started within, and let no other start, if the caller is interrupted.

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
    """The result of ``future``. Python misses a Ctrl-C that comes while a thread is about to wait without end.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> with ThreadPoolExecutor() as pool:
    ...     awaited(pool.submit(sum, [1, 2]))
    3
    """
    while not future.done():
        wait([future], timeout=ALERT)
    return future.result()


def are_stopped() -> bool:
    """Whether the caller for whom this thread works was interrupted."""
    return any(compilers.stopped for compilers in _FOR.get())


@contextlib.contextmanager
def running(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """``process`` runs for the callers of this thread, until it has ended."""
    callers = _FOR.get()
    for compilers in callers:
        compilers.add(process.pid)
    try:
        yield
    finally:
        for compilers in callers:
            compilers.discard(process.pid)


def kill_group(process: int) -> None:
    """Stop a process with all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
