"""Reads of an eager submodule by the rest of the model: settings only, or the submodule is not cut out.

    y = self.odd(x)
    return y * self.odd.count      a number in the graph, and another one in each call of odd
    return y.view(self.odd.heads)  a setting: a number, a text or the like that calls of odd leave as it is

While a call is recorded, the submodule and those in it have a class that notices, in this thread, the names that are
asked for. Calling it, its hooks and the modules in it are nothing that it changes.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fuse.graph.contents import attributes_of, is_special
from fuse.graph.learned import bits
from fuse.graph.mutated_attributes import asked_by_torch, custom_method

_UNTOLD = frozenset(nn.Module.__dict__) | (frozenset(nn.Module().__dict__) - {"training"})
"""Names that every module has."""

_SETTINGS = frozenset((bool, int, float, str, types.NoneType, torch.dtype, torch.device))


@dataclass(frozen=True, eq=False)
class Setting:
    """An attribute of a submodule that stays Python, or of one in it, which the rest of the model reads: ``path`` is
    that of its owner in the model. Its ``value`` is one that nothing can change."""

    path: str
    owner: nn.Module
    name: str
    value: Any

    def now(self) -> Any:
        """Its value; what equals none where it was deleted."""
        return (attributes_of(self.owner) or {}).get(self.name, Setting)

    def holds(self) -> bool:
        """Whether it is what it was."""
        now = self.now()
        return type(now) is type(self.value) and bool(bits(now) == bits(self.value))

    def assign(self, value: Any) -> None:
        """Let it be ``value``, or nothing where that is what :meth:`now` gave."""
        own = attributes_of(self.owner) or {}
        if value is Setting:
            own.pop(self.name, None)
        else:
            own[self.name] = value


def settings_of(module: nn.Module, path: str) -> list[Setting]:
    """The settings that ``module``, which lies at ``path``, and the modules in it have.

    >>> [(one.path, one.name, one.value) for one in settings_of(nn.Sequential(nn.ReLU(inplace=True)), "act")]
    [('act', 'training', True), ('act.0', 'training', True), ('act.0', 'inplace', True)]
    """
    found = []
    for inner, one in module.named_modules():
        place = f"{path}.{inner}" if inner else path
        own = attributes_of(one) or {}
        found += [Setting(place, one, name, value) for name, value in own.items() if is_setting(one, name, value)]
    return found


def is_setting(module: nn.Module, name: str, value: Any) -> bool:
    """Whether ``value`` is what the attribute of ``module`` holds, with no code in between, and cannot be changed."""
    own = attributes_of(module) or {}
    return type(value) in _SETTINGS and name not in _UNTOLD and own.get(name, Setting) is value


@contextlib.contextmanager
def untouched(
    module: nn.Module, refuse: Callable[[str], None], steady: Sequence[Setting], read: Callable[[Setting], None]
) -> Iterator[None]:
    """Call ``refuse`` with what is done, as long as this lasts, where this thread reads or assigns an attribute of
    ``module`` or of a module in it; ``read`` where it only reads one of the settings that are ``steady``.

    >>> odd, found = nn.Sequential(nn.Linear(2, 3)), []
    >>> with untouched(odd, found.append, settings_of(odd, "odd"), lambda one: found.append(one.name)):
    ...     result = odd[0].out_features, odd[0].bias is None
    >>> result, found, type(odd[0]) is nn.Linear
    ((3, False), ['out_features', 'reads its attribute bias'], True)
    """
    paths = {(id(one.owner), one.name): one.path for one in steady}
    inside = list(module.modules())
    for one in inside:
        if custom := custom_method(type(one)):
            refuse(f"reads what has a {custom} of its own")
            yield
            return
    before = [type(one) for one in inside]
    made = [_noticing(one, refuse, paths, read) for one in inside]
    for one, cls in zip(inside, made, strict=True):
        one.__class__ = cls
    try:
        yield
    finally:
        for one, cls, was in zip(inside, made, before, strict=True):
            if type(one) is cls:
                one.__class__ = was


def _noticing(
    module: nn.Module,
    refuse: Callable[[str], None],
    steady: Mapping[tuple[int, str], str],
    read: Callable[[Setting], None],
) -> type:
    cls: Any = type(module)
    thread = threading.get_ident()

    def look(self: Any, name: str, what: str, found: Any = None) -> None:
        if self is module and threading.get_ident() == thread and not (is_special(name) or name in _UNTOLD):
            path = steady.get((id(module), name)) if what == "reads" else None
            if path is not None and is_setting(module, name, found):
                read(Setting(path, module, name, found))
            else:
                refuse(f"{what} its attribute {name}")

    def __getattribute__(self: Any, name: str) -> Any:
        if name == "__class__":
            return cls
        if name == "__dict__" and self is module and threading.get_ident() == thread and not asked_by_torch():
            refuse("reads its __dict__")
        found = cls.__getattribute__(self, name)
        if not (isinstance(found, types.MethodType) and found.__self__ is self):  # what a method reads is noticed, too
            look(self, name, "reads", found)
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
