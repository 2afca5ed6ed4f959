"""Refuse a ``forward`` that seeds torch's random number generator: a graph that draws from it would not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from fuse.errors import CaptureError


@contextlib.contextmanager
def unseeded() -> Iterator[None]:
    """Raise at the end if, meanwhile, this thread seeded the generator or set its state; what was set stays set.

    >>> with unseeded():
    ...     _ = torch.manual_seed(3)
    Traceback (most recent call last):
    fuse.errors.CaptureError: forward seeds the random number generator; a graph cannot hold that
    """
    home: Any = torch.random
    watched = _WatchedGenerator(home.default_generator)
    home.default_generator = watched
    try:
        yield
    finally:
        home.default_generator = watched.generator
    if watched.was_set:
        raise CaptureError("forward seeds the random number generator; a graph cannot hold that")


class _WatchedGenerator:
    """Stands in for torch's generator where ``torch.manual_seed`` and its kin look for it."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.thread = threading.get_ident()
        self.was_set = False

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "seed", "set_state") and threading.get_ident() == self.thread:
            self.was_set = True
        return getattr(self.generator, name)
