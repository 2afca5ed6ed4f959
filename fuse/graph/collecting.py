"""Python's garbage collector, paused while graphs grow."""

from __future__ import annotations

import gc
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
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # what the caller has frozen stays so
            gc.freeze()
            gc.unfreeze()
        if enabled:
            gc.enable()
