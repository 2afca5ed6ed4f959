"""Split the arguments of a call into leaves and structure, and build arguments of other leaves.

    model(x, cache=Cache(keys=[k0, k1], length=3))     leaves (x, k0, k1, 3), and a structure with the class and names
    leaves (y, q0, q1, 3)                              ->   (y,), {"cache": Cache(keys=[q0, q1], length=3)}

``torch.utils._pytree`` takes an object for one leaf unless its class is registered. An object is opened if its class is
plain (:mod:`fuse.graph.structure.opened_objects`), and if its attributes lead only to tensors, plain values, lists,
dictionaries and other such objects. Any other object stays one leaf. If one object occurs twice, no object is opened,
because a copy of the call would have two objects.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fuse.errors import FuseError
from fuse.graph.state.object_contents import attributes_of
from fuse.graph.structure.opened_objects import OpenedObject, can_be_opened
from fuse.graph.structure.result_structure import is_constant

DICTIONARIES = (dict, OrderedDict, defaultdict)
MOST_PARTS = 4096
"""Most objects and containers in an object that is opened, and most entries of each."""


class _Opaque(Exception):
    """An object leads to something that is no leaf and no container, or to one container twice."""


def flatten_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of a call's arguments and their structure.

    >>> class Cache:
    ...     __module__ = "user"
    ...     def __init__(self, *keys): self.keys = list(keys)
    >>> leaves, spec = flatten_arguments((1, Cache(2, 3)), {"scale": 4})
    >>> leaves, pytree.tree_unflatten([5, 6, 7, 8], spec)[0][1].keys
    ([1, 2, 3, 4], [6, 7])
    """
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    if not any(map(can_be_opened, leaves)):
        return leaves, spec
    return pytree.tree_flatten(pytree.tree_unflatten(_opened(leaves)[0], spec))


def named_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[tuple[Any, Any]], pytree.TreeSpec]:
    """As :func:`flatten_arguments`, with the path of each leaf.

    >>> named_leaves(3, {})
    Traceback (most recent call last):
    fuse.errors.FuseError: the arguments of a call are of type int; give a tuple, such as (x,) for one argument
    """
    if not isinstance(args, (tuple, list)):
        kind = "Tensor" if isinstance(args, Tensor) else type(args).__name__  # it may be fake
        raise FuseError(f"the arguments of a call are of type {kind}; give a tuple, such as (x,) for one argument")
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    return pytree.tree_flatten_with_path(pytree.tree_unflatten(_opened(leaves)[0], spec))


def with_tensors(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Callable[[Tensor], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with ``made(tensor)`` in place of each tensor, in new containers and objects."""
    leaves, spec = flatten_arguments(args, kwargs)
    found: tuple[tuple[Any, ...], dict[str, Any]]
    found = pytree.tree_unflatten([made(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
    return found


def containers_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The lists, dictionaries and opened objects of a call, in an order that follows from its structure.

    >>> containers_of(([1, [2]], ({"a": 3},)), {"more": []})
    [[1, [2]], [2], {'a': 3}, []]
    """
    opened = _opened(pytree.tree_leaves((args, dict(kwargs))))[1]
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        _collect(value, opened, found)
    return found


def spelled_containers(named: Mapping[str, Any], containers: Sequence[Any]) -> list[str]:
    """The names of the ``containers`` of a call, as the user would write them; ``named``: its arguments by name.

    >>> past = [[1], [2]]
    >>> spelled_containers({"past": past}, containers_of((past,), {}))
    ['past', 'past[0]', 'past[1]']
    """
    names: dict[int, str] = {}
    known = set(map(id, containers))
    left = list(named.items())
    while left:
        name, value = left.pop()
        if isinstance(value, Tensor) or not (isinstance(value, tuple) or id(value) in known - names.keys()):
            continue
        names[id(value)] = name
        if isinstance(value, dict):
            left += [(f"{name}[{_key(key)}]", part) for key, part in value.items()]
        elif isinstance(value, (list, tuple)):
            left += [(f"{name}[{number}]", part) for number, part in enumerate(value)]
        else:
            left += [(f"{name}.{key}", part) for key, part in entries_of(value).items()]
    return [names.get(id(container), "?") for container in containers]


def _key(key: Any) -> str:
    return repr(key) if is_constant(key) else "..."


def entries_of(container: Any) -> Any:
    """The attribute dictionary of an opened object; a list or a dictionary itself."""
    held: Any = container if isinstance(container, (list, dict)) else attributes_of(container)
    return held


def _opened(leaves: Sequence[Any]) -> tuple[list[Any], frozenset[int]]:
    """The leaves with :class:`OpenedObject` in place of objects, and the ``id`` of all objects in these."""
    opened: set[int] = set()
    found = []
    for leaf in leaves:
        seen: set[int] = set()
        try:
            found.append(_part(leaf, seen) if can_be_opened(leaf) else leaf)
        except _Opaque:
            found.append(leaf)
            continue
        if not opened.isdisjoint(seen):
            return list(leaves), frozenset()
        opened |= seen
    return found, frozenset(opened)


def _part(value: Any, seen: set[int]) -> Any:
    kind = type(value)
    if isinstance(value, Tensor) or is_constant(value):
        return value
    attributes = attributes_of(value) if can_be_opened(value) else None
    entries = value if kind in (list, tuple, dict, OrderedDict) else attributes
    if entries is None or id(value) in seen or max(len(seen), len(entries)) > MOST_PARTS:
        raise _Opaque
    seen.add(id(value))
    if kind is list:
        return [_part(item, seen) for item in value]
    if kind is tuple:
        return tuple(_part(item, seen) for item in value)
    if kind is dict or kind is OrderedDict:
        return kind((key, _part(item, seen)) for key, item in value.items())
    return OpenedObject(kind, {name: _part(item, seen) for name, item in entries.items()})


def _collect(value: Any, opened: frozenset[int], found: list[Any]) -> None:
    kind = type(value)
    if kind is list or kind in DICTIONARIES or (id(value) in opened and kind is not tuple):
        found.append(value)
        inside: Iterable[Any] = value if kind is list else entries_of(value).values()
    elif kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        inside = value
    else:
        return
    for item in inside:
        if not isinstance(item, Tensor):
            _collect(item, opened, found)
