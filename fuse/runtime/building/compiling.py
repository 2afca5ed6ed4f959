"""Whether the compiler may run for the program that is made: a context, which the compiler asks.

with compiling(how): make(...)      how.allowed: kernels that are in no library are compiled, and how.ran is set
                                    otherwise: NotYet is raised, and the call runs eager
                                    (fuse/runtime/sizes/patience.py)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass


class NotYet(Exception):
    """Kernels are in no library, and are not to be compiled."""


@dataclass
class Compiling:
    """Whether kernels of a program may be compiled, and whether some were."""

    allowed: bool = True
    ran: bool = False


_COMPILING: ContextVar[Compiling | None] = ContextVar("compiling", default=None)


@contextlib.contextmanager
def compiling(how: Compiling) -> Iterator[None]:
    """Programs that are made inside may be compiled, or not."""
    token = _COMPILING.set(how)
    try:
        yield
    finally:
        _COMPILING.reset(token)


def check_allowed() -> None:
    """Raise ``NotYet`` unless the compiler may run for the program that is made, or be waited for."""
    how = _COMPILING.get()
    if how is not None and not how.allowed:
        raise NotYet


def begin_compiling() -> None:
    """The compiler is about to run for the program that is made, if there is one.

    Raises:
        NotYet: it must not.
    """
    check_allowed()
    if (how := _COMPILING.get()) is not None:
        how.ran = True
