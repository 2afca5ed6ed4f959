"""Pause Python's garbage collector while graphs grow."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector.

    A large graph and its tables only grow. The collector would traverse them again and again, find nothing, and take a
    third of the time. Afterwards, the new objects count as old, so that they are not traversed at once. The collector
    has not counted them, and may never traverse the old objects. So that is done here, once there are half as many more
    objects as before.

    >>> import gc
    >>> with without_garbage_collection():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    enabled = gc.isenabled()
    gc.disable()
    if enabled:
        _PAUSING.add(threading.get_ident())
    try:
        yield
    finally:
        _COLLECTOR.take_new()
        if enabled:
            _PAUSING.discard(threading.get_ident())
            gc.enable()
            _COLLECTOR.collect_all_in_time()


@dataclass
class _Collector:
    """Collects all objects: how many came uncounted since it looked, and how many there were after it collected."""

    uncounted: int = 0
    before: int = 0

    def take_new(self) -> None:
        """Let the new objects count as old, if that is worth it."""
        new = gc.get_count()[0]
        self.uncounted += new
        # Objects that the caller froze stay frozen; asking whether there are any takes as long as traversing them.
        if new > MANY and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()

    def collect_all_in_time(self) -> None:
        """Collect all objects if there are many more than before."""
        if self.uncounted > FEWEST:
            self.uncounted = 0
            if len(gc.get_objects()) > self.before + max(self.before // 2, FEWEST):
                gc.collect()
                self.before = len(gc.get_objects())


def collect_new() -> None:
    """Collect garbage among objects that were made while the collector pauses, before they count as old; nothing if
    it was disabled before that."""
    if threading.get_ident() in _PAUSING:
        gc.collect(1)


def _go_on() -> None:
    """Resume collection in a forked child, where the thread that would resume it may be missing."""
    if _PAUSING and threading.get_ident() not in _PAUSING:
        gc.enable()


MANY = 10_000
"""The fewest young objects worth moving among the old ones: collecting fewer takes less than a millisecond."""

FEWEST = 500_000
"""The fewest further objects that have all collected, which takes half a second or more."""

_COLLECTOR = _Collector()

_PAUSING: set[int] = set()
"""Threads that have paused the collector."""
os.register_at_fork(after_in_child=_go_on)
