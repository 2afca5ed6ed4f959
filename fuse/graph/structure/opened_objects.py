"""Objects of plain classes as their attributes: they can be copied, and made anew in each call.

    Cache(keys=[k0, k1], length=3)   ->   OpenedObject(Cache, {"keys": [k0, k1], "length": 3})   ->   another Cache

A class is plain if its objects keep nothing but attributes: it is written in Python, has no slots, and leaves it to
Python how objects are made, copied and removed, and how attributes are read and assigned.
"""

from __future__ import annotations

import abc
import functools
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fuse.graph.state.attributes import holds_data
from fuse.graph.state.object_contents import class_dict, mro

_OWN_WAYS = (
    "__setattr__", "__delattr__", "__getattribute__", "__new__", "__del__", "__reduce__", "__reduce_ex__",
    "__getstate__", "__setstate__",
)  # fmt: skip
_NEUTRAL = (object, abc.ABC, typing.Generic, typing.Protocol)
_HEAP = 1 << 9
"""CPython's ``Py_TPFLAGS_HEAPTYPE``: set for classes that Python code has made, not for built-in ones."""


@dataclass(frozen=True)
class OpenedObject:
    """An object as its class, and its attributes in order."""

    cls: type
    attributes: dict[str, Any]


def can_be_opened(value: Any) -> bool:
    """Whether an object is of a plain class.

    >>> class Cache: __module__ = "user"
    >>> can_be_opened(Cache()), can_be_opened(nn.Linear(1, 1)), can_be_opened(3), can_be_opened({})
    (True, False, False, False)
    """
    return _is_plain(type(value))  # type: ignore[arg-type]  # mypy does not take all classes for hashable


@functools.lru_cache(maxsize=1024)
def _is_plain(kind: type) -> bool:
    """Whether copies of the attributes of such objects are copies of the objects."""
    if not isinstance(kind, type) or type(kind) not in (type, abc.ABCMeta) or not holds_data(kind):
        return False
    if issubclass(kind, (Tensor, nn.Module)):
        return False
    own = [base for base in mro(kind) if base not in _NEUTRAL]
    special = {"__slots__", *_OWN_WAYS}
    return bool(own) and all(base.__flags__ & _HEAP and special.isdisjoint(class_dict(base)) for base in own)


def _made(values: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    cls, names = context
    made: Any = object.__new__(cls)
    made.__dict__.update(zip(names, values, strict=True))
    return made


pytree.register_pytree_node(
    OpenedObject,
    lambda opened: (list(opened.attributes.values()), (opened.cls, tuple(opened.attributes))),
    _made,
    flatten_with_keys_fn=lambda opened: (
        [(pytree.GetAttrKey(name), value) for name, value in opened.attributes.items()],
        (opened.cls, tuple(opened.attributes)),
    ),
)
