"""What ``forward`` and hooks can change outside of the model: closures and globals that their code names.

    features = {}
    model.layer.register_forward_hook(lambda module, args, result: features.update(layer=result))

Capture runs such code once, with stand-ins for tensors; later calls would not run it at all. So what it changes is put
back, and the call is left to eager.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules import module as _module

from fuse.graph.attributes import Change, Held, collect, restore
from fuse.graph.signature import Attribute

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (_module._global_forward_hooks, _module._global_forward_pre_hooks)
_LIBRARIES = ("torch.", "fuse.", "builtins")
_NOWHERE = Attribute("", "")
_UNBOUND = object()


@dataclass(frozen=True)
class Outside:
    """What code could reach before it ran: containers, cells of closures, and names in the globals of a module."""

    held: list[Held]
    cells: list[tuple[str, types.CellType, Any]]
    names: list[tuple[str, dict[str, Any], Any]]

    def restore(self) -> list[Change]:
        """Put everything back as it was. Returns what had changed."""
        found = restore(self.held, lambda now, then: now is then)
        for name, cell, value in self.cells:
            if _content(cell) is not value:
                found.append(Change(name, _NOWHERE, whole=False))
                cell.cell_contents = value
        for name, owner, value in self.names:
            if owner.get(name, _UNBOUND) is not value:
                found.append(Change(name, _NOWHERE, whole=False))
                owner[name] = value
        return found


def reached_by(model: nn.Module) -> Outside:
    """What the code of a model and its hooks names outside of it, as it is now.

    >>> seen = []
    >>> model = nn.Tanh()
    >>> hook = model.register_forward_hook(functools.partial(print, seen))
    >>> before = reached_by(model)
    >>> seen.append(1)
    >>> [change.name for change in before.restore()], seen
    (["a hook's argument"], [])
    """
    outside = Outside([], [], [])
    seen: set[int] = {id(module.__dict__) for module in model.modules()}
    for code in _code_of(model):
        _follow(code, outside, seen)
    return outside


def _code_of(model: nn.Module) -> Iterator[Any]:
    classes = {base for module in model.modules() for base in type(module).__mro__}
    for cls in classes:
        if not f"{cls.__module__}.".startswith(_LIBRARIES):
            yield from cls.__dict__.values()
    for module in model.modules():
        for registry in _HOOKS:
            yield from module.__dict__[registry].values()
        if "forward" in module.__dict__:  # put over the one of its class
            yield module.__dict__["forward"]
    for hooks in _GLOBAL_HOOKS:
        yield from hooks.values()


def _follow(code: Any, outside: Outside, seen: set[int]) -> None:
    """Note what a function reaches by its closure, globals and bound object."""
    if isinstance(code, (staticmethod, classmethod)):
        code = code.__func__
    if isinstance(code, functools.partial):
        for value in (code.func, *code.args, *code.keywords.values()):
            _follow(value, outside, seen)
            _note("a hook's argument", value, outside, seen)
        return
    if isinstance(code, types.MethodType):
        _note(type(code.__self__).__name__, code.__self__, outside, seen)
        code = code.__func__
    if not isinstance(code, types.FunctionType) or id(code) in seen or f"{code.__module__}.".startswith(_LIBRARIES):
        return
    seen.add(id(code))
    for name, cell in zip(code.__code__.co_freevars, code.__closure__ or (), strict=True):
        value = _content(cell)
        if name != "__class__" and value is not _UNBOUND:
            outside.cells.append((name, cell, value))
            _follow(value, outside, seen)
            _note(name, value, outside, seen)
    for name in _global_names(code.__code__):
        value = code.__globals__.get(name, _UNBOUND)
        if value is _UNBOUND or isinstance(value, (types.ModuleType, type)):
            continue
        outside.names.append((name, code.__globals__, value))
        if isinstance(value, types.FunctionType):
            _follow(value, outside, seen)
        elif isinstance(value, (list, dict, set)):  # objects, such as loggers, keep accounts of their own
            _note(name, value, outside, seen)


def _note(name: str, value: Any, outside: Outside, seen: set[int]) -> None:
    if isinstance(value, nn.Module):
        value = value.__dict__
    collect(name, value, outside.held, seen, Attribute("", name))


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _UNBOUND
