"""What ``forward`` can change without any operator: attributes of modules, and what containers in them hold.

    before = held_by(model)          every dictionary, list and set that the model reaches, with a copy of its contents
    model(...)
    restore(before, same)            contents put back; the changes that matter are listed

Capture runs ``forward`` with stand-ins for tensors. Whatever it stores in the model has to be taken out again. A value
that eager would have kept for the next call is an effect: of an attribute, one that the runtime can play back
(:mod:`fuse.graph.kept`), of anything else, one that a graph cannot hold.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from fuse.graph.signature import Attribute

_PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device)
_REGISTRIES = ("_parameters", "_buffers", "_modules")
INTERNAL = frozenset(nn.Module().__dict__) - {"training"}
"""What ``nn.Module`` itself keeps in the dictionary of a module."""


@dataclass(frozen=True)
class Held:
    """One container (``live``) and what was in it; ``name`` is how the user would spell it, ``root`` the attribute that
    leads to it. Its name is empty where it is all of a module's."""

    name: str
    live: Any
    contents: Any
    root: Attribute


@dataclass(frozen=True)
class Change:
    """Something that is not what it was: ``name`` as the user would spell it, ``attribute`` that leads to it, and
    whether the attribute itself was assigned (``whole``) and not something that it holds."""

    name: str
    attribute: Attribute
    whole: bool


def held_by(model: nn.Module) -> list[Held]:
    """Every mutable container that the model's attributes lead to, with its present contents.

    >>> [held.name for held in held_by(nn.Linear(2, 2)) if held.contents][:2]
    ['Linear', 'Linear']
    """
    found: list[Held] = []
    seen: set[int] = set()
    for path, module in model.named_modules():
        collect(type(module).__name__, module.__dict__, found, seen, Attribute(path, ""))
    return found


def collect(name: str, value: Any, found: list[Held], seen: set[int], root: Attribute) -> None:
    """Add every mutable container that ``value`` leads to to ``found``, but for those whose ``id`` was ``seen``."""
    if id(value) in seen or isinstance(value, (Tensor, *_PLAIN)):
        return
    children: Iterable[tuple[str, Any]]
    if isinstance(value, dict):
        children = [(name if key in _REGISTRIES else f"{name}.{key}", item) for key, item in dict.items(value)]
    elif isinstance(value, (list, tuple)):
        children = [(f"{name}[{i}]", item) for i, item in enumerate(value)]
    elif isinstance(value, set):
        children = ()
    elif _is_plain_object(value):
        seen.add(id(value))
        return collect(name, vars(value), found, seen, root)
    else:
        return
    seen.add(id(value))
    if not isinstance(value, tuple):
        contents = dict(value) if isinstance(value, dict) else value.copy()  # a class may make its values when asked
        found.append(Held(name, value, contents, root))
    for (label, item), key in zip(children, value if isinstance(value, dict) else repeat(""), strict=False):
        collect(label, item, found, seen, root if root.name else Attribute(root.owner, str(key)))


def _is_plain_object(value: Any) -> bool:
    """An instance of a Python class that holds data, such as a configuration or a cache; not a module or function.

    Nor anything of fuse's own, as a fused part of the model holds: another thread may be compiling it.
    """
    kinds = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, torch.Generator)
    own = type(value).__module__.startswith("fuse.")
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, kinds) and not own


def restore(before: list[Held], is_twin: Callable[[Any, Any], bool]) -> list[Change]:
    """Put everything back as it was. Returns what had changed.

    ``is_twin(now, then)`` says that a tensor is the stand-in of another: storing it changes nothing. Neither does
    storing an equal number again.
    """
    found: list[Change] = []
    for held in before:
        if _identical(held.live, held.contents):
            continue
        found += changes(held, is_twin)
        if isinstance(held.live, list):
            held.live[:] = held.contents
        else:
            held.live.clear()
            held.live.update(held.contents)
    return found


def _identical(live: Any, contents: Any) -> bool:
    if len(live) != len(contents):
        return False
    if isinstance(live, dict):
        return all(key in live and dict.__getitem__(live, key) is value for key, value in contents.items())
    if isinstance(live, list):
        return all(a is b for a, b in zip(live, contents, strict=True))
    return bool(live == contents)


def changes(held: Held, is_twin: Callable[[Any, Any], bool]) -> Iterator[Change]:
    """What in a container is not what it was; see :func:`restore`."""
    live, contents = held.live, held.contents
    if not isinstance(live, dict):
        if not _same(live, contents, is_twin):
            yield Change(held.name, held.root, whole=False)
        return
    for key in [*contents, *(key for key in live if key not in contents)]:
        if key not in live or key not in contents or not _same(live[key], contents[key], is_twin):
            is_module = not held.root.name
            attribute = Attribute(held.root.owner, str(key)) if is_module else held.root
            yield Change(f"{held.name}.{key}", attribute, is_module and key in live and key not in INTERNAL)


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
