"""Hide fake tensors from the model's code, so that it does what it does in eager mode, not what it does for an
exporter.

    isinstance(mask, torch._subclasses.FakeTensor)      in code of the model, during its capture: False
                                                        in torch's own code, and in other threads: unchanged

Libraries ask this question to skip checks of values, or to build a mask that eager does not build. fuse can read values
(:mod:`fuse.graph.values.value_reads`), so that nothing need be skipped. A module that imported the class by name before
the capture still sees it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch._subclasses
import torch._subclasses.fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

_PLACES: tuple[ModuleType, ...] = (torch._subclasses, torch._subclasses.fake_tensor)
_TRUSTED = ("torch", "fuse")
"""Packages that work on fake tensors themselves."""


class NoInstances:
    """A class without instances."""


class _PatchedModule(ModuleType):
    """A module whose attribute ``FakeTensor`` depends on the code that reads it."""

    @property
    def FakeTensor(self) -> Any:  # torch's name
        caller = sys._getframe(1)
        asks_later = caller.f_code.co_name == "<module>"  # an import, which keeps the value that it reads
        package = str(caller.f_globals.get("__name__", "")).partition(".")[0]
        if threading.get_ident() not in _capturing or asks_later or package in (*_TRUSTED, "importlib"):
            return FakeTensor
        return NoInstances


_capturing: dict[int, int] = {}  # id of a thread -> the number of its captures
_LOCK = threading.Lock()


@contextlib.contextmanager
def fakes_hidden() -> Iterator[None]:
    """A context in which model code of this thread takes fake tensors for ordinary tensors.

    >>> with fakes_hidden():
    ...     eval("lambda: torch._subclasses.FakeTensor", {"torch": torch, "__name__": "model"})()
    <class 'fuse.graph.fakes.hidden_fakes.NoInstances'>
    """
    thread = threading.get_ident()
    with _LOCK:
        _capturing[thread] = _capturing.get(thread, 0) + 1
        for module in _PLACES:
            module.__class__ = _PatchedModule
    try:
        yield
    finally:
        with _LOCK:
            _capturing[thread] -= 1
            if not _capturing[thread]:
                del _capturing[thread]
            if not _capturing:
                for module in _PLACES:
                    module.__class__ = ModuleType
