"""Stand-ins that a model does not notice: it does what it does in eager mode, not what it does for an exporter.

    isinstance(mask, torch._subclasses.FakeTensor)      in code of the model, while it is captured: False
                                                        in torch's own code, and in other threads: as ever

Libraries ask this to leave out checks of values, or to build a mask that is applied where eager applies none. Here
values can be read (:mod:`fuse.graph.value_reads`), so that nothing need be left out. Who imported the class by its name
before the capture still has it.
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
"""Packages whose code works on the stand-ins themselves."""


class NoInstances:
    """A class without instances."""


class _PatchedModule(ModuleType):
    """A module that says what a fake tensor is by who asks; as a global of its own code, the name is what it was."""

    @property
    def FakeTensor(self) -> Any:  # torch's name
        caller = sys._getframe(1)
        asks_later = caller.f_code.co_name == "<module>"  # an import, which keeps what it is told
        package = str(caller.f_globals.get("__name__", "")).partition(".")[0]
        if threading.get_ident() not in _capturing or asks_later or package in (*_TRUSTED, "importlib"):
            return FakeTensor
        return NoInstances


_capturing: dict[int, int] = {}  # threads, and how many captures they are in
_LOCK = threading.Lock()


@contextlib.contextmanager
def fakes_hidden() -> Iterator[None]:
    """As long as this lasts, code of models in this thread takes fake tensors for tensors.

    >>> with fakes_hidden():
    ...     eval("lambda: torch._subclasses.FakeTensor", {"torch": torch, "__name__": "model"})()
    <class 'fuse.graph.hidden_fakes.NoInstances'>
    """
    thread = threading.get_ident()
    with _LOCK:
        _capturing[thread] = _capturing.get(thread, 0) + 1
        for place in _PLACES:
            place.__class__ = _PatchedModule
    try:
        yield
    finally:
        with _LOCK:
            _capturing[thread] -= 1
            if not _capturing[thread]:
                del _capturing[thread]
            if not _capturing:
                for place in _PLACES:
                    place.__class__ = ModuleType
