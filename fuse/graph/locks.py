"""Locks that are free in a forked child, whichever thread of the parent held them.

A child of ``fork`` has one thread. A lock held by any other thread of the parent would stay locked in the child for
ever; the first call of a new size in a data loader's worker would never return.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class ForkedLock:
    """A ``threading.RLock`` that is free in a child of ``fork``, unless the forking thread holds it.

    >>> lock = ForkedLock()
    >>> with lock, lock:
    ...     lock.is_held()
    True
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _ALL.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    @contextmanager
    def without_waiting(self) -> Iterator[bool]:
        """A context that takes the lock if no thread holds it, not even this one. Yields whether it did.

        >>> lock = ForkedLock()
        >>> with lock.without_waiting() as first, lock.without_waiting() as second:
        ...     first, second
        (True, False)
        """
        lock = self._lock
        free = not self.is_held() and lock.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                lock.release()

    def is_held(self) -> bool:
        """Whether this thread holds it."""
        held: bool = self._lock._is_owned()  # type: ignore[attr-defined]  # missing in typeshed
        return held

    def renew(self) -> None:
        if not self.is_held():
            self._lock = threading.RLock()


_ALL: weakref.WeakSet[ForkedLock] = weakref.WeakSet()


def _renew() -> None:
    for lock in list(_ALL):
        lock.renew()


os.register_at_fork(after_in_child=_renew)
