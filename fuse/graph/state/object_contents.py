"""Read and restore the contents of Python objects without running code of their classes.

    table = Lazy(relu=nn.ReLU)     its __getitem__ makes a module, its keys() counts, its __eq__ raises
    contents(table)                the result of dict.keys and dict.values, whatever the class overrides
    put_back(table, before)        the same objects as before, in their order

A class may compute values on access, count accesses, or raise. So each object is read and written by the methods of the
built-in type that its class derives from.
"""

from __future__ import annotations

import array
import gc
import operator
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_BASES: tuple[type, ...] = (OrderedDict, dict, list, deque, set, tuple, frozenset, types.MappingProxyType, type)
_BY_ID = {id(base): base for base in _BASES}  # asking a class for its hash asks its metaclass
_IMMUTABLE = (tuple, frozenset, types.MappingProxyType)
_DICTS = (dict, OrderedDict)
_LARGEST_MEMORY = 1 << 24
"""The most bytes of an array whose contents are compared."""
_UNSET = object()

mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
"""The bases of a class, without asking its metaclass."""

class_dict: Callable[[type], types.MappingProxyType[str, Any]] = type.__dict__["__dict__"].__get__
"""The attributes that a class itself defines, without asking its metaclass."""

module_of: Callable[[type], Any] = type.__dict__["__module__"].__get__
"""The ``__module__`` of a class, without asking its metaclass."""


@dataclass(frozen=True)
class Contents:
    """The contents of an object.

    ``base``: the built-in type whose methods read it. ``keys``: the keys of a dictionary or the names of attributes;
    None for a sequence or set. ``values``: the objects inside; for an array, its bytes.
    """

    base: type
    keys: list[Any] | None
    values: list[Any]

    def is_of(self, value: Any) -> bool:
        """Whether ``value`` still holds the same objects in the same order."""
        if self.base in memory_kinds():
            return contents(value, self.base).values == self.values
        if not self.values and self.base is not type and self.base is not object:
            return not self.base.__len__(value)  # type: ignore[attr-defined]  # all containers have it
        now = contents(value, self.base)
        return _identical(now.values, self.values) and (self.keys is None or _identical(now.keys or [], self.keys))


def base_of(value: Any) -> type:
    """The built-in container or array type of an object; ``type`` for a class, ``object`` for anything else.

    >>> class Table(dict): pass
    >>> base_of(Table()), base_of(Table), base_of(3)
    (<class 'dict'>, <class 'type'>, <class 'object'>)
    """
    kind = type(value)
    found = _BY_ID.get(id(kind))
    if found is None:
        found = next((base for base in (*_BASES, *memory_kinds()) if issubclass(kind, base)), object)
        if found in memory_kinds() and not _is_plain_memory(value):
            found = object
    return found


def is_iterator(kind: type) -> bool:
    """Whether objects of this class are iterators of Python's own, whose position cannot be read.

    >>> is_iterator(type(iter([]))), is_iterator(list)
    (True, False)
    """
    return module_of(kind) in ("builtins", "itertools") and "__next__" in class_dict(kind)


def memory_kinds() -> tuple[type, ...]:
    """The classes of arrays: ``bytearray``, ``array.array``, and ``numpy.ndarray`` if numpy is loaded."""
    numpy = getattr(sys.modules.get("numpy"), "ndarray", None)
    return (bytearray, array.array) if numpy is None else (bytearray, array.array, numpy)


def _is_plain_memory(value: Any) -> bool:
    """Whether the bytes of an array can be read and restored: it contains no objects, and is not too large."""
    dtype = getattr(value, "dtype", None)
    size = memoryview(value).nbytes if dtype is None else value.nbytes
    return size <= _LARGEST_MEMORY and not (dtype is not None and dtype.hasobject)


def is_mutable(base: type) -> bool:
    """Whether containers of this type can be changed in place."""
    return base not in _IMMUTABLE


def contents(value: Any, base: type | None = None) -> Contents:
    """The present contents of an object: items of a container, attributes of a class, slots of any other object.

    >>> class Makes(dict):
    ...     def __getitem__(self, key):
    ...         raise AssertionError("asked")
    >>> contents(Makes(a=1)).keys, contents(Makes(a=1)).values
    (['a'], [1])
    """
    base = base_of(value) if base is None else base
    if base is dict or base is OrderedDict:
        return Contents(base, list(base.keys(value)), list(base.values(value)))
    if base is types.MappingProxyType:
        return Contents(base, None, gc.get_referents(value))
    if base is type:
        named = [(name, item) for name, item in class_dict(value).items() if not is_special(name)]
        return Contents(base, [name for name, _ in named], [item for _, item in named])
    if base is object:
        slots = [(name, slot.__get__(value)) for name, slot in _slots(type(value)).items() if _is_set(slot, value)]
        return Contents(base, [name for name, _ in slots], [item for _, item in slots])
    if base in memory_kinds():
        return Contents(
            base, None, [bytes(base.tobytes(value)) if hasattr(base, "tobytes") else bytes(memoryview(value))]
        )
    return Contents(base, None, list(base.__iter__(value)))  # type: ignore[attr-defined]  # sequences and sets have it


def put_back(value: Any, before: Contents) -> None:
    """Restore the earlier contents of an object. Weak references that are dead by now are left out."""
    if before.base in _DICTS:
        _put_back_items(value, before)
    elif before.base is list:
        list.__setitem__(value, slice(None), before.values)
    elif before.base is set:
        set.clear(value)
        set.update(value, [item for item in before.values if not _is_dead(item)])
    elif before.base in memory_kinds():
        _put_back_memory(value, before.values[0])
    elif before.base is deque:
        deque.clear(value)
        deque.extend(value, before.values)
    elif before.base is type:
        _put_back_attributes(value, before, type.__setattr__, type.__delattr__)
    elif before.base is object:
        slots = _slots(type(value))
        _put_back_attributes(
            value, before, lambda v, name, item: slots[name].__set__(v, item), lambda v, name: slots[name].__delete__(v)
        )


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attribute dictionary of an object; None if it has none.

    >>> attributes_of(types.SimpleNamespace(a=1)), attributes_of(3)
    ({'a': 1}, None)
    """
    held: dict[str, Any]
    kind = type(value)
    if kind is threading.local:  # another dictionary in each thread
        held = threading.local.__getattribute__(value, "__dict__")
        return held
    for base in mro(kind):
        found = class_dict(base).get("__dict__")
        if type(found) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            held = found.__get__(value)  # type: ignore[union-attr]  # it is a descriptor, by its type
            return held
    return None


def is_special(name: Any) -> bool:
    """Whether Python itself uses this class attribute.

    >>> is_special("__annotations__"), is_special("registry")
    (True, False)
    """
    return type(name) is str and ((name.startswith("__") and name.endswith("__")) or name == "_abc_impl")


def _slots(kind: type) -> dict[str, types.MemberDescriptorType]:
    return {
        name: member
        for base in mro(kind)
        if base is not object and "__slots__" in class_dict(base)
        for name, member in class_dict(base).items()
        if type(member) is types.MemberDescriptorType
    }


def _is_set(slot: types.MemberDescriptorType, value: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def _identical(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))


def _is_dead(value: Any) -> bool:
    return issubclass(type(value), weakref.ref) and weakref.ref.__call__(value) is None


def _put_back_items(value: Any, before: Contents) -> None:
    base: Any = before.base
    entries = zip(before.keys or (), before.values, strict=True)
    pairs = [(key, item) for key, item in entries if not (_is_dead(key) or _is_dead(item))]
    keys = list(base.keys(value))
    if len(keys) >= len(pairs) and all(key is then for key, (then, _) in zip(keys, pairs, strict=False)):
        for key in keys[len(pairs) :]:
            base.__delitem__(value, key)
    else:
        base.clear(value)
    for key, item in pairs:
        if dict.get(value, key, _UNSET) is not item:
            base.__setitem__(value, key, item)


def _put_back_memory(value: Any, held: bytes) -> None:
    if isinstance(value, bytearray):
        bytearray.__setitem__(value, slice(None), held)
    elif isinstance(value, array.array):
        array.array.__delitem__(value, slice(None))
        array.array.frombytes(value, held)
    else:
        numpy = sys.modules["numpy"]
        if numpy.ndarray.tobytes(value) != held:  # a read-only array cannot have changed
            value[...] = numpy.frombuffer(held, value.dtype).reshape(value.shape)


def _put_back_attributes(
    value: Any, before: Contents, assign: Callable[[Any, str, Any], None], delete: Callable[[Any, str], None]
) -> None:
    now = contents(value, before.base)
    then = dict(zip(before.keys or (), before.values, strict=True))
    held = dict(zip(now.keys or (), now.values, strict=True))
    for name in held.keys() - then.keys():
        delete(value, name)
    for name, item in then.items():
        if held.get(name, _UNSET) is not item:
            assign(value, name, item)
