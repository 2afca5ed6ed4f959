"""Python state that a call can change: the model's attributes, its arguments, and everything that its code reaches.

    features = {}
    model.layer.register_forward_hook(lambda module, args, result: features.update(layer=result))

Capture runs such code once, with fake tensors, and later calls would not run it at all. So its changes are undone, and
the call runs eager.

Code is followed without running it: from ``forward`` and hooks to the functions, classes, objects and modules that they
name, and so on. A method is followed once any followed code contains its name.
"""

from __future__ import annotations

import collections
import dis
import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as _module

from fuse.graph.signature import Attribute
from fuse.graph.state.attributes import (
    Change,
    HeldIterator,
    ObjectSnapshot,
    Path,
    collect,
    collect_modules,
    is_atom,
    restore,
    spelled,
)
from fuse.graph.state.object_contents import attributes_of, class_dict, contents, is_special, module_of, mro
from fuse.graph.state.python_generators import global_generators, is_generator, name_of, put_back_state, state_of

GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    _module._global_forward_hooks,
    _module._global_forward_pre_hooks,
    _module._global_backward_hooks,
    _module._global_backward_pre_hooks,
)
"""Hooks of all modules: two kinds that run in a call, and two in its backward pass."""
_LIBRARIES = frozenset(sys.stdlib_module_names) - {"__main__"} | {"torch", "fuse"}
_NOWHERE = Attribute("", "")
_UNBOUND = object()
_Cached = functools._lru_cache_wrapper
_BINDS = frozenset((dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_FACTORY: types.MemberDescriptorType = collections.defaultdict.__dict__["default_factory"]
_LARGEST_CACHE = 100_000
"""The most objects looked at in a function's cache, so that a huge one does not delay the first call."""
_IMPORTS = dis.opmap["IMPORT_NAME"]


@dataclass(frozen=True)
class ReachableState:
    """The state that code can reach, before it runs.

    ``held``: contents of objects; ``cells``: closures; ``names``: globals of modules; ``caches``: functions with
    ``functools.lru_cache`` and their number of misses; ``variables``: context variables; ``generators``: random
    generators and their states; ``iterators``: iterators in the model; ``functions``: functions of the user.
    """

    held: list[ObjectSnapshot] = field(default_factory=list)
    cells: list[tuple[str, types.CellType, Any]] = field(default_factory=list)
    names: list[tuple[str, dict[str, Any], Any]] = field(default_factory=list)
    caches: list[tuple[Any, int]] = field(default_factory=list)
    variables: dict[ContextVar[Any], Any] = field(default_factory=dict)
    generators: list[tuple[Any, Any]] = field(default_factory=list)
    iterators: list[HeldIterator] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)

    def restore(self, is_fake_of: Callable[[Any, Any], bool]) -> list[Change]:
        """Restore everything, and return what had changed; see :func:`fuse.graph.state.attributes.restore`."""
        found = restore(self.held, is_fake_of)
        for name, cell, value in self.cells:
            if _content(cell) is not value:
                found.append(Change(name, _NOWHERE, whole=False))
                cell.cell_contents = value
        for name, owner, value in self.names:
            if dict.get(owner, name, _UNBOUND) is not value:
                found.append(Change(name, _NOWHERE, whole=False))
                if value is _UNBOUND:
                    dict.__delitem__(owner, name)
                else:
                    dict.__setitem__(owner, name, value)
        for variable, value in self.variables.items():
            if value_of(variable) is not value:  # a capture runs in a copy of the context, so nothing need be restored
                found.append(Change(variable.name, _NOWHERE, whole=False))
        for generator, state in self.generators:
            if state_of(generator) != state:
                found.append(Change(name_of(generator), _NOWHERE, whole=False))
                put_back_state(generator, state)
        for cached, misses in self.caches:
            if _Cached.cache_info(cached).misses != misses and _caches_fakes(cached):
                _Cached.cache_clear(cached)
        return found


def reached_by(model: nn.Module, arguments: Mapping[str, Any] = types.MappingProxyType({})) -> ReachableState:
    """The present state that a call can reach from the model's attributes, its arguments and the code that it runs.

    ``arguments`` are those of the call, by the names that ``forward`` gives them.

    >>> seen = []
    >>> model = nn.Tanh()
    >>> hook = model.register_forward_hook(functools.partial(print, seen))
    >>> before = reached_by(model)
    >>> seen.append(1)
    >>> [change.name for change in before.restore(lambda now, then: False)], seen
    (['an argument of print[0]'], [])
    """
    walk = _CodeWalk()
    collect_modules(model, walk.outside.held, walk.seen, walk.left)
    named = {f"argument {name}": value for name, value in arguments.items()}
    for name, value in named.items():
        walk.note(name, value)
    held = list(walk.left)
    for hooks in GLOBAL_HOOKS[:2]:
        walk.note("a hook of all modules", hooks)
    walk.left.extend(set(map(type, model.modules())))
    walk.left.extend(global_generators())
    while walk.left:
        walk.follow(walk.left.pop())
    used = {*walk.named, *named}
    walk.outside.iterators.extend(one for one in held if type(one) is HeldIterator and one.attribute in used)
    return walk.outside


@dataclass
class _CodeWalk:
    """A traversal of code. ``left``: values still to be followed. ``waiting``: class members whose name did not occur
    yet."""

    outside: ReachableState = field(default_factory=ReachableState)
    seen: set[int] = field(default_factory=lambda: {id(sys.modules)})  # an imported module stays imported
    followed: set[int] = field(default_factory=set)
    bound: set[tuple[int, str]] = field(default_factory=set)
    left: list[Any] = field(default_factory=list)
    named: set[str] = field(default_factory=lambda: {"forward"})
    waiting: dict[str, list[tuple[type, str, Any]]] = field(default_factory=dict)

    def note(self, path: Path, value: Any) -> None:
        """Add the objects that ``value`` leads to; ``path`` says where it was found."""
        kind = type(value)
        if kind is types.FunctionType or kind is type:
            self.left.append(value)
        elif not is_atom(kind) and id(value) not in self.seen:
            collect(path, value, self.outside.held, self.seen, Attribute("", spelled(path)), self.left)

    def follow(self, value: Any) -> None:
        """Add everything that a function, a class or an object reaches when it, or one of its methods, is called."""
        if id(value) in self.followed:
            return
        self.followed.add(id(value))
        kind = type(value)
        if kind is types.FunctionType:
            self._function(value)
        elif kind is types.MethodType or kind is types.BuiltinFunctionType:
            self.note(type(value.__self__).__name__, value.__self__)
            if kind is types.MethodType:
                self.left.append(value.__func__)
        elif issubclass(kind, type):
            self._class(value)
        elif issubclass(kind, (staticmethod, classmethod)):
            self.left.append(value.__func__)
        elif issubclass(kind, property):
            self.left += [value.fget, value.fset, value.fdel]
        elif kind is ContextVar:
            self.outside.variables[value] = held = value_of(value)
            self.note(value.name, held)
        elif is_generator(kind):
            self.outside.generators.append((value, state_of(value)))
        elif issubclass(kind, functools.partial):
            self._partial(*functools.partial.__reduce__(value)[2][:3])
        elif issubclass(kind, _Cached):
            self.outside.caches.append((value, _Cached.cache_info(value).misses))
        elif not issubclass(kind, (types.ModuleType, HeldIterator)):
            self._class(kind)
            if issubclass(kind, collections.defaultdict):
                self.note("default_factory", _FACTORY.__get__(value))

    def _partial(self, function: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.note("a function", function)
        name = function.__name__ if issubclass(type(function), _FUNCTIONS) else type(function).__name__
        self.note(f"an argument of {name}", args)
        self.note(f"an argument of {name}", keywords)

    def _class(self, cls: type) -> None:
        for base in mro(cls):
            if id(base) in self.seen or _is_library(module_of(base)):
                continue
            self.seen.add(id(base))
            self.outside.held.append(
                ObjectSnapshot(base.__name__, base, contents(base, type), Attribute("", base.__name__))
            )
            for name, member in class_dict(base).items():
                if name in self.named or is_special(name):
                    self._member(base, name, member)
                else:
                    self.waiting.setdefault(name, []).append((base, name, member))

    def _member(self, cls: type, name: str, member: Any) -> None:
        if issubclass(type(member), (staticmethod, classmethod, property)):
            self.left.append(member)
        elif type(member) is types.FunctionType or not is_special(name):
            self.note((cls.__name__, name), member)

    def _function(self, function: types.FunctionType) -> None:
        code, space = function.__code__, function.__globals__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            value = _content(cell)
            if name != "__class__" and value is not _UNBOUND:
                self.outside.cells.append((name, cell, value))
                self.note(name, value)
        if _is_library(function.__module__):  # only its closure may be the user's
            return
        self.outside.functions.append(function)
        for held in (function.__defaults__, function.__kwdefaults__, function.__dict__):
            self.note(function.__name__, held)
        read = _read(code)
        for name in read.names:
            if name not in self.named:
                self.named.add(name)
                for member in self.waiting.pop(name, ()):
                    self._member(*member)
        modules = list(self._imported(space, read)) if read.imports else []
        modules += self._bound(space, read.names, read.binds or "__getattr__" in space)
        seen: set[int] = set()
        for module in modules:  # the list grows: a name in a module may be a module
            held = attributes_of(module) or {}
            if id(module) not in seen and not _is_library(held.get("__name__")):
                seen.add(id(module))
                modules += self._bound(held, read.names)

    def _bound(self, space: dict[str, Any], names: tuple[str, ...], makes: bool = False) -> list[types.ModuleType]:
        """Add the values of ``names`` in the globals ``space``; with ``makes``, also names without a value. Returns
        modules."""
        modules = []
        for name in names:
            value = space.get(name, _UNBOUND)
            if value is _UNBOUND and not makes:
                continue
            if (id(space), name) not in self.bound:
                self.bound.add((id(space), name))
                self.outside.names.append((name, space, value))
                self.note(name, value)
            if issubclass(type(value), types.ModuleType):
                modules.append(value)
        return modules

    def _imported(self, space: dict[str, Any], read: _CodeNames) -> Iterator[types.ModuleType]:
        for name in read.names:
            module = sys.modules.get(name) or sys.modules.get(f"{space.get('__package__')}.{name}")
            if module is not None:
                yield module


@dataclass(frozen=True)
class _CodeNames:
    """The names in a function's code, including strings that may be names; whether it binds globals; whether it
    imports."""

    names: tuple[str, ...]
    binds: bool
    imports: bool


@functools.lru_cache(maxsize=8192)
def _read(code: types.CodeType) -> _CodeNames:
    codes = [code]
    for one in codes:
        codes += [inner for inner in one.co_consts if type(inner) is types.CodeType]
    operations = {operation for one in codes for operation in one.co_code[::2]}
    strings = (text for one in codes for text in one.co_consts if type(text) is str and text.isidentifier())
    # A name that source code cannot contain belongs to a tool, such as pytest's in rewritten assertions.
    named = (name for one in codes for name in one.co_names if name.isidentifier())
    names = dict.fromkeys([*named, *strings])
    return _CodeNames(tuple(names), not _BINDS.isdisjoint(operations), _IMPORTS in operations)


def _is_library(module: Any) -> bool:
    return type(module) is str and module.partition(".")[0] in _LIBRARIES


def _caches_fakes(cached: Any) -> bool:
    """Whether the cache of a function contains a fake tensor, as a result or as an argument."""
    left, seen = gc.get_referents(cached), {id(cached)}
    for value in left:
        if id(value) in seen:
            continue
        seen.add(id(value))
        kind = type(value)
        if value is FakeTensor or issubclass(kind, FakeTensor):
            return True
        if not issubclass(kind, (type, types.ModuleType, types.FunctionType, nn.Module)) and len(seen) < _LARGEST_CACHE:
            left += gc.get_referents(value)
    return False


def value_of(variable: ContextVar[Any]) -> Any:
    """The value of a context variable in the present context; a special object if it has none.

    >>> level = ContextVar("level", default=3)
    >>> value_of(level)
    3
    """
    try:
        return variable.get()
    except LookupError:
        return _UNBOUND


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _UNBOUND
