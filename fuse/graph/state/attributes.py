"""Find and undo what ``forward`` changes without an operator: attributes of modules, and Python containers in them.

    before = snapshots_of(model)     every container and object that the model reaches, with its contents
    model(...)
    restore(before, same)            puts the same objects back, in their order, and lists the changes that matter

Capture runs ``forward`` with fake tensors, so everything that it stores in the model has to be removed afterwards. A
stored value that eager would have kept for the next call is an effect. If it is the value of an attribute, the runtime
can assign it after each call (:mod:`fuse.graph.recording.mutated_attributes`); a graph cannot represent any other. An
entry that exists only because fake tensors were seen (in a table keyed by tensor classes) is no effect.
"""

from __future__ import annotations

import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fuse.graph.signature import Attribute
from fuse.graph.state.object_contents import (
    Contents,
    attributes_of,
    base_of,
    contents,
    is_iterator,
    is_mutable,
    module_of,
    put_back,
)
from fuse.graph.state.python_generators import is_generator

_PLAIN = (int, float, complex, bool, str, bytes, types.NoneType, torch.dtype, torch.device, torch.layout)
_PLAIN_IDS = frozenset(map(id, _PLAIN))
_ATOM_IDS = _PLAIN_IDS | frozenset(map(id, (Tensor, nn.Parameter, FakeTensor, slice, torch.Generator)))
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, ContextVar)
_OPAQUE = frozenset(sys.stdlib_module_names) - {"__main__"} | {"torch", "fuse"}
_TRANSPARENT = ("collections", "functools", "types", "weakref", "_thread", "torch.utils.weak")
_CONCURRENT = ("_thread", "threading", "queue", "_queue", "multiprocessing.queues", "concurrent.futures._base")
"""Modules of objects that several threads share: locks, queues, events."""
_REGISTRIES = ("_parameters", "_buffers", "_modules")
INTERNAL = frozenset(nn.Module().__dict__) - {"training"}
"""Attributes of ``nn.Module`` itself."""

Path = str | tuple[Any, Any]
"""The way to an object: the name of a start, or (path of the container, key in it)."""


@dataclass(frozen=True)
class ObjectSnapshot:
    """The ``contents`` of the object ``live`` at one time.

    ``root``: the module attribute that leads to the object; its name is empty if ``live`` is the attribute dictionary
    of a module.
    """

    path: Path
    live: Any
    contents: Contents
    root: Attribute

    @property
    def name(self) -> str:
        """The path of the object, as the user would write it."""
        return spelled(self.path)


@dataclass(frozen=True)
class HeldIterator:
    """An iterator of Python's own in the model: its ``name`` as the user would write it, and the ``attribute`` that
    leads to it."""

    name: str
    attribute: str


@dataclass(frozen=True)
class Change:
    """A difference between an object and its snapshot.

    ``name``: the changed part, as the user would write it. ``attribute``: the attribute that leads to it. ``whole``:
    the attribute itself was assigned, instead of something inside its value. ``replaced``: the dictionary or
    list in which values of existing keys or items were replaced; None for any other change.
    """

    name: str
    attribute: Attribute
    whole: bool
    replaced: dict[Any, Any] | list[Any] | None = None


def snapshots_of(model: nn.Module) -> list[ObjectSnapshot]:
    """Snapshots of every mutable object that the model's attributes lead to.

    >>> [held.name for held in snapshots_of(nn.Linear(2, 2)) if held.contents.values][:2]
    ['Linear', 'Linear']
    """
    found: list[ObjectSnapshot] = []
    collect_modules(model, found, set())
    return found


def collect_modules(
    model: nn.Module,
    found: list[ObjectSnapshot],
    seen: set[int],
    code: list[Any] | None = None,
) -> None:
    """:func:`collect` for the attributes of all modules of ``model``."""
    seen.update(map(id, model.modules()))
    for path, module in model.named_modules():
        collect(type(module).__name__, attributes_of(module), found, seen, Attribute(path, ""), code)


def collect(
    path: Path, value: Any, found: list[ObjectSnapshot], seen: set[int], root: Attribute, code: list[Any] | None = None
) -> None:
    """Add a snapshot of every mutable object that ``value`` leads to, except those whose ``id`` is in ``seen``.

    Everything whose code may run is added to ``code``: functions, classes, context variables, random generators,
    iterators, and objects of the user's classes.
    """
    left: list[tuple[Path, Any, Attribute]] = [(path, value, root)]
    while left:
        path, value, root = left.pop()
        kind = type(value)
        if is_atom(kind) or id(value) in seen:
            continue
        if code is not None and is_iterator(kind):
            code.append(HeldIterator(spelled(path), root.name))
            continue
        base = base_of(value)
        is_code = base is type or issubclass(kind, _CODE) or is_generator(kind)
        if base is object and not is_code and not holds_data(kind):
            continue
        if code is not None and (is_code or base is not kind):
            code.append(value)
        if is_code:
            continue
        seen.add(id(value))
        now = contents(value, base)
        attributes = attributes_of(value) if base is not kind and holds_data(kind) else None
        is_object = base is not kind and not issubclass(kind, nn.Module)
        if is_object and _is_shared((*now.values, *(attributes or {}).values())):
            continue
        if is_mutable(base) and (base is not object or now.keys):
            found.append(ObjectSnapshot(path, value, now, root))
        entries = list(zip(count() if now.keys is None else now.keys, now.values, strict=False))
        if attributes is not None:
            left.append((path, attributes, root))
        for key, item in reversed(entries):
            if not is_atom(type(item)):
                inner = path if type(key) is str and key in _REGISTRIES else (path, key)
                left.append((inner, item, root if root.name else Attribute(root.owner, _plainly(key))))


def is_atom(kind: type) -> bool:
    """Whether objects of this class are plain values or tensors, which contain no other object.

    >>> is_atom(int), is_atom(list)
    (True, False)
    """
    return id(kind) in _ATOM_IDS


def holds_data(kind: type) -> bool:
    """Whether ``forward`` may keep state in objects of this class, which is no container.

    Classes of Python and torch keep internal records (loggers, for example). So do classes of fuse, and another thread
    may be changing those.
    """
    if issubclass(kind, nn.Module):
        return not str(module_of(kind)).startswith("fuse.")
    module = module_of(kind)
    opaque = type(module) is not str or (module.partition(".")[0] in _OPAQUE and module not in _TRANSPARENT)
    return not (opaque or issubclass(kind, Tensor))


def _is_shared(attributes: Iterable[Any]) -> bool:
    """Whether an object with these attributes is meant for several threads: it holds a lock, an event or a queue.

    Another thread may change such an object during the capture, so it must not be restored.
    """
    return any(module_of(type(held)) in _CONCURRENT and type(held) is not threading.local for held in attributes)


def spelled(path: Path) -> str:
    """The path as the user would write it.

    >>> spelled((("model", "cache"), 0))
    'model.cache[0]'
    """
    parts = []
    while not isinstance(path, str):
        path, key = path
        parts.append(f"[{key}]" if type(key) is int else f".{_plainly(key)}")
    return "".join((path, *reversed(parts)))


def _plainly(key: Any) -> str:
    """The key as text, without running code of its class."""
    if id(type(key)) in _PLAIN_IDS:
        return str(key)
    return f"<{(key if issubclass(type(key), type) else type(key)).__name__}>"


def restore(before: list[ObjectSnapshot], is_fake_of: Callable[[Any, Any], bool]) -> list[Change]:
    """Restore all objects to their snapshots, and return what had changed.

    ``is_fake_of(now, then)``: whether the tensor ``now`` is the fake tensor of ``then``. Storing a tensor's fake in its
    place, or an equal number, is no change.
    """
    found: list[Change] = []
    for held in before:
        if not held.contents.is_of(held.live):
            found += changes(held, is_fake_of)
            put_back(held.live, held.contents)
    return found


def changes(held: ObjectSnapshot, is_fake_of: Callable[[Any, Any], bool]) -> Iterator[Change]:
    """The differences between the object of a snapshot and its earlier contents; see :func:`restore`."""
    now = contents(held.live, held.contents.base)
    if held.contents.keys is None:
        if not _same_contents(now, held.contents, is_fake_of):
            items = held.live if type(held.live) is list and len(now.values) == len(held.contents.values) else None
            yield Change(held.name, held.root, whole=False, replaced=items)
        return
    then, live = _by_key(held.contents), _by_key(now)
    if [token for token in live if token in then] != [token for token in then if token in live]:
        yield Change(held.name, held.root, whole=False)  # the order may have a meaning, such as the least recent use
    for token, (key, value) in {**live, **then}.items():
        if token in live and token in then and _same(live[token][1], value, is_fake_of):
            continue
        if token not in then and _exists_for_fakes(key, then.values(), is_fake_of):
            continue
        is_module = not held.root.name
        attribute = Attribute(held.root.owner, _plainly(key)) if is_module else held.root
        whole = is_module and token in live and key not in INTERNAL
        replaced = held.live if type(held.live) is dict and live.keys() == then.keys() else None
        yield Change(spelled((held.path, key)), attribute, whole, replaced)


def _by_key(held: Contents) -> dict[Any, tuple[Any, Any]]:
    """The entries under tokens that need no code of the keys' classes: type and value of a plain key, ``id`` of any
    other."""
    pairs = zip(held.keys or (), held.values, strict=True)
    return {(type(k), k) if id(type(k)) in _PLAIN_IDS else id(k): (k, v) for k, v in pairs}


def _same_contents(now: Contents, then: Contents, is_fake_of: Callable[[Any, Any], bool]) -> bool:
    if then.base is not set:
        return _all_same(now.values, then.values, is_fake_of)
    known, live = set(map(id, then.values)), set(map(id, now.values))
    return known <= live and all(id(x) in known or _exists_for_fakes(x, (), is_fake_of) for x in now.values)


def _exists_for_fakes(key: Any, others: Any, is_fake_of: Callable[[Any, Any], bool]) -> bool:
    """Whether an entry under this key exists only because of fake tensors.

    The key is then their class, the fake tensor of an earlier key, a weak reference that is dead or leads to one of
    these, or a tuple with one of these.
    """
    kind = type(key)
    if issubclass(kind, type):
        return issubclass(key, FakeTensor)
    if issubclass(kind, weakref.ref):
        target = weakref.ref.__call__(key)
        return target is None or issubclass(type(target), FakeTensor) or _exists_for_fakes(target, (), is_fake_of)
    if issubclass(kind, FakeTensor):
        return any(is_fake_of(key, other) for other, _ in others)
    return issubclass(kind, tuple) and any(_exists_for_fakes(part, others, is_fake_of) for part in tuple.__iter__(key))


def _same(now: Any, then: Any, is_fake_of: Callable[[Any, Any], bool]) -> bool:
    """Whether storing ``now`` in place of ``then`` makes no difference to the next call."""
    if now is then:
        return True
    kind = type(now)
    if issubclass(kind, Tensor) and issubclass(type(then), Tensor):
        return is_fake_of(now, then)
    if kind is not type(then):
        return False
    if id(kind) in _PLAIN_IDS:
        return bool(now == then)
    if kind is weakref.ref:
        return _same(now(), then(), is_fake_of)
    base = base_of(now)
    if base in (list, tuple, dict):
        one, other = contents(now, base), contents(then, base)
        return _all_same(one.keys or [], other.keys or [], is_fake_of) and _all_same(
            one.values, other.values, is_fake_of
        )
    return False


def _all_same(now: list[Any], then: list[Any], is_fake_of: Callable[[Any, Any], bool]) -> bool:
    return len(now) == len(then) and all(_same(a, b, is_fake_of) for a, b in zip(now, then, strict=True))


def is_own(holder: object) -> bool:
    """Whether what holds an object of the model is a note of this module, and nothing that a model could read."""
    if isinstance(holder, list):
        return any(isinstance(one, Contents) for one in gc.get_referrers(holder))
    return isinstance(holder, (ObjectSnapshot, Contents))
