"""Python's garbage collector, paused while graphs grow."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """A large graph and the tables about it only grow: the collector would walk them again and again, find nothing, and
    take a third of the time.

    What is there afterwards counts as old, so that it is not walked at once, either.

    >>> import gc
    >>> with without_collecting():
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
        # What the caller has frozen stays so; to ask for that takes as long as walking over it.
        if gc.get_count()[0] > MANY and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if enabled:
            _PAUSING.discard(threading.get_ident())
            gc.enable()


def _go_on() -> None:
    """In a forked child, the thread that would let the collector go on may be missing."""
    if _PAUSING and threading.get_ident() not in _PAUSING:
        gc.enable()


MANY = 10_000
"""Young objects that are worth moving among the old ones; a collection of fewer takes less than a millisecond."""

_PAUSING: set[int] = set()
"""Threads that paused it."""
os.register_at_fork(after_in_child=_go_on)
