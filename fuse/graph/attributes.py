"""What ``forward`` can change without any operator: attributes of modules, and what containers in them hold.

    before = held_by(model)          every dictionary, list and set that the model reaches, with a copy of its contents
    model(...)
    restore(before, same)            contents put back; the first change that matters is named

Capture runs ``forward`` with stand-ins for tensors. Whatever it stores in the model has to be taken out again, and a
stored value that eager would have kept for the next call is an effect that a graph cannot hold.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device)
_REGISTRIES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class Held:
    """One container (``live``) and what was in it; ``name`` is how the user would spell it."""

    name: str
    live: Any
    contents: Any


def held_by(model: nn.Module) -> list[Held]:
    """Every mutable container that the model's attributes lead to, with its present contents.

    >>> [held.name for held in held_by(nn.Linear(2, 2)) if held.contents][:2]
    ['Linear', 'Linear']
    """
    found: list[Held] = []
    seen: set[int] = set()
    for module in model.modules():
        _collect(type(module).__name__, module.__dict__, found, seen)
    return found


def _collect(name: str, value: Any, found: list[Held], seen: set[int]) -> None:
    if id(value) in seen or isinstance(value, (Tensor, *_PLAIN)):
        return
    children: Iterable[tuple[str, Any]]
    if isinstance(value, dict):
        children = [(name if key in _REGISTRIES else f"{name}.{key}", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        children = [(f"{name}[{i}]", item) for i, item in enumerate(value)]
    elif isinstance(value, set):
        children = ()
    elif _is_plain_object(value):
        seen.add(id(value))
        return _collect(name, vars(value), found, seen)
    else:
        return
    seen.add(id(value))
    if not isinstance(value, tuple):
        found.append(Held(name, value, value.copy()))
    for label, item in children:
        _collect(label, item, found, seen)


def _is_plain_object(value: Any) -> bool:
    """An instance of a Python class that holds data, such as a configuration or a cache; not a module or function."""
    kinds = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, torch.Generator)
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, kinds)


def restore(before: list[Held], is_twin: Callable[[Any, Any], bool]) -> str:
    """Put everything back as it was. Returns the name of the first thing that had changed, or ``""``.

    ``is_twin(now, then)`` says that a tensor is the stand-in of another: storing it changes nothing. Neither does
    storing an equal number again.
    """
    changed = ""
    for held in before:
        if _identical(held.live, held.contents):
            continue
        changed = changed or first_change(held, is_twin)
        if isinstance(held.live, list):
            held.live[:] = held.contents
        else:
            held.live.clear()
            held.live.update(held.contents)
    return changed


def _identical(live: Any, contents: Any) -> bool:
    if len(live) != len(contents):
        return False
    if isinstance(live, dict):
        return all(key in live and live[key] is value for key, value in contents.items())
    if isinstance(live, list):
        return all(a is b for a, b in zip(live, contents, strict=True))
    return bool(live == contents)


def first_change(held: Held, is_twin: Callable[[Any, Any], bool]) -> str:
    """The first thing in a container that is not what it was, or ``""``; see :func:`restore`."""
    live, contents = held.live, held.contents
    if isinstance(live, dict):
        for key in [*contents, *(key for key in live if key not in contents)]:
            if key not in live or key not in contents or not _same(live[key], contents[key], is_twin):
                return f"{held.name}.{key}"
        return ""
    return "" if _same(live, contents, is_twin) else held.name


def _same(now: Any, then: Any, is_twin: Callable[[Any, Any], bool]) -> bool:
    """Whether storing ``now`` where ``then`` was would make no difference to the next call."""
    if now is then:
        return True
    if isinstance(now, Tensor) and isinstance(then, Tensor):
        return is_twin(now, then)
    if type(now) is not type(then):
        return False
    if isinstance(now, _PLAIN):
        return bool(now == then)
    if isinstance(now, weakref.ref):
        return _same(now(), then(), is_twin)
    if isinstance(now, (list, tuple)):
        return len(now) == len(then) and all(_same(a, b, is_twin) for a, b in zip(now, then, strict=True))
    if isinstance(now, dict):
        return now.keys() == then.keys() and all(_same(value, then[key], is_twin) for key, value in now.items())
    return False
