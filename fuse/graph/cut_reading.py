"""What the rest of a model reads of a submodule that stays Python: nothing, or it is not cut out.

    y = self.odd(x)
    return y * self.odd.count      a number in the graph, and another one in each call of odd

While a call is recorded, the submodule and those in it have a class that notices, in this thread, the names that are
asked for. Calling it, its hooks and the modules in it are nothing that it changes.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fuse.graph.contents import is_special
from fuse.graph.mutated_attributes import asked_by_torch, custom_method

_UNTOLD = frozenset(nn.Module.__dict__) | (frozenset(nn.Module().__dict__) - {"training"})
"""Names that every module has."""


@contextlib.contextmanager
def untouched(module: nn.Module, refuse: Callable[[str], None]) -> Iterator[None]:
    """Call ``refuse`` with what is done, as long as this lasts, where this thread reads or assigns an attribute of
    ``module`` or of a module in it.

    >>> odd, found = nn.Sequential(nn.Linear(2, 3)), []
    >>> with untouched(odd, found.append):
    ...     features = odd[0].out_features
    >>> features, found, type(odd[0]) is nn.Linear
    (3, ['reads its attribute out_features'], True)
    """
    inside = list(module.modules())
    for one in inside:
        if custom := custom_method(type(one)):
            refuse(f"reads what has a {custom} of its own")
            yield
            return
    before = [type(one) for one in inside]
    made = [_noticing(one, refuse) for one in inside]
    for one, cls in zip(inside, made, strict=True):
        one.__class__ = cls
    try:
        yield
    finally:
        for one, cls, was in zip(inside, made, before, strict=True):
            if type(one) is cls:
                one.__class__ = was


def _noticing(module: nn.Module, refuse: Callable[[str], None]) -> type:
    cls: Any = type(module)
    thread = threading.get_ident()

    def look(self: Any, name: str, what: str) -> None:
        if self is module and threading.get_ident() == thread and not (is_special(name) or name in _UNTOLD):
            refuse(f"{what} its attribute {name}")

    def __getattribute__(self: Any, name: str) -> Any:
        if name == "__class__":
            return cls
        if name == "__dict__" and self is module and threading.get_ident() == thread and not asked_by_torch():
            refuse("reads its __dict__")
        found = cls.__getattribute__(self, name)
        if not (isinstance(found, types.MethodType) and found.__self__ is self):  # what a method reads is noticed, too
            look(self, name, "reads")
        return found

    def __getattr__(self: Any, name: str) -> Any:
        found = cls.__getattr__(self, name)
        if not isinstance(found, nn.Module):
            look(self, name, "reads")
        return found

    def __setattr__(self: Any, name: str, value: Any) -> None:
        look(self, name, "assigns")
        cls.__setattr__(self, name, value)

    def __delattr__(self: Any, name: str) -> None:
        look(self, name, "deletes")
        cls.__delattr__(self, name)

    members = {f.__name__: f for f in (__getattribute__, __getattr__, __setattr__, __delattr__)}
    described = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made: type = type(cls)(cls.__name__, (cls,), {**members, **described, "__slots__": ()})
    return made
