"""Pause Python's garbage collector while graphs grow."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector.

    A large graph and its tables only grow. The collector would traverse them again and again, find nothing, and take a
    third of the time. Afterwards, the new objects count as old, so that they are not traversed at once.

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
        # Objects that the caller froze stay frozen; asking whether there are any takes as long as traversing them.
        if gc.get_count()[0] > MANY and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if enabled:
            _PAUSING.discard(threading.get_ident())
            gc.enable()


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

_PAUSING: set[int] = set()
"""Threads that have paused the collector."""
os.register_at_fork(after_in_child=_go_on)
