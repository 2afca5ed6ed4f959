"""Tell a recording the values that ``forward`` reads, instead of computing them.

    if mask.all():                 learned when x was [50, 3]: True
    x [37, 4], without data        recorded as if it were True again, to see what ``forward`` does with these sizes

The values come from a captured call, in the order in which it read them. The recording fails if it reads others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from torch import nn

from fuse.errors import CaptureError
from fuse.graph.numbers.learned import Guard, Learned, Learning


class ToldValues:
    """The values of one recording that are not read yet.

    >>> values = ToldValues((Learned("model.py:3", "truth", 0, None, True),))
    >>> values.next("truth", "model.py:3")
    True
    >>> values.next("truth", "model.py:4")
    Traceback (most recent call last):
    fuse.errors.CaptureError: forward reads other values at model.py:4 than in earlier calls
    """

    def __init__(self, learned: tuple[Learned, ...]) -> None:
        self._left: dict[Guard, list[Learned]] = {}
        for one in reversed(learned):
            self._left.setdefault(one.guard, []).append(one)

    def next(self, guard: Guard, source: str) -> object:
        """The value that is read now at the user's line ``source``."""
        left = self._left.get(guard)
        if not left or left[-1].source != source:
            raise CaptureError(f"forward reads other values at {source} than in earlier calls")
        return left.pop().expected

    def check(self) -> None:
        """Raise ``CaptureError`` if a value was not read."""
        if left := [one for values in self._left.values() for one in values]:
            raise CaptureError(f"forward does not read the value at {left[-1].source}, as earlier calls did")


_TOLD: ContextVar[tuple[nn.Module, tuple[Learned, ...]] | None] = ContextVar("_TOLD", default=None)


@contextlib.contextmanager
def telling(model: nn.Module, learning: Learning | None) -> Iterator[None]:
    """A context in which recordings of a model are told the values that a captured call read; none if it read none."""
    token = _TOLD.set((model, learning.learned) if learning is not None else None)
    try:
        yield
    finally:
        _TOLD.reset(token)


def told_values(model: nn.Module) -> ToldValues | None:
    """The values for a recording of a model that begins; None if it computes them, as those of patterns do."""
    told = _TOLD.get()
    return ToldValues(told[1]) if told is not None and told[0] is model else None
