"""Split a model's result into leaves and structure, dataclasses included.

    Answer(scores=t, ids=[u, v])   ->   leaves [t, u, v], and a structure that makes an Answer of three leaves

``torch.utils._pytree`` takes a dataclass for one leaf unless its class is registered, and registering a user's class
would change it for all other code. So a dataclass becomes a node type of fuse's that remembers the class.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence, Set, ValuesView
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fuse.graph.numbers.read_numbers import is_number
from fuse.graph.structure.opened_objects import OpenedObject, can_be_opened

_CONSTANTS = (
    bool, int, float, complex, str, bytes, type, enum.Enum, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GivenContainer:
    """A container of the caller's, in a result: number ``index`` of the call's containers, counted from the end."""

    index: int


@dataclasses.dataclass(frozen=True)
class _Fields:
    """A dataclass as its class, and its fields in order."""

    cls: type
    values: dict[str, Any]


def flatten_result(result: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """``torch.utils._pytree.tree_flatten``, also for dataclasses with tensors; a ``torch.Size`` is one leaf.

    >>> Pair = dataclasses.make_dataclass("Pair", ["a", "b"])
    >>> leaves, spec = flatten_result({"pair": Pair(torch.zeros(1), 2)})
    >>> leaves, pytree.tree_unflatten([10, 20], spec)
    ([tensor([0.]), 2], {'pair': Pair(a=10, b=20)})
    """
    return pytree.tree_flatten(_opened(result), is_leaf=_is_size)


def with_replaced(result: Any, replacement: Callable[[Any], Any]) -> Any:
    """A result for :func:`flatten_result`, with ``replacement(part)`` in place of the parts for which it is not None.

    >>> cache = [1]
    >>> with_replaced((2, cache), lambda part: "the cache" if part is cache else None)
    (2, 'the cache')
    """
    return _opened(result, replacement)


def named_parts(result: Any, name: str = "result") -> dict[str, Any]:
    """All parts of a result by the path to them, for any class of container; those of an object once.

    >>> Pair = dataclasses.make_dataclass("Pair", ["a", "b"])
    >>> named_parts((Pair(1, {"x": 2}), [3]))
    {'result[0].a': 1, "result[0].b['x']": 2, 'result[1][0]': 3}
    """
    found: dict[str, Any] = {}
    _collect(result, name, found, set())
    return found


def _collect(value: Any, name: str, found: dict[str, Any], seen: set[int]) -> None:
    """Add the parts of ``value`` to ``found``; objects in ``seen`` stay whole: objects may refer to one another."""
    inside = {} if id(value) in seen else parts_of(value)
    if not inside:
        found[name] = value
        return
    seen.add(id(value))
    for key, part in inside.items():
        _collect(part, name + key, found, seen)
    if isinstance(value, (Mapping, Sequence, Set, ValuesView)):
        seen.remove(id(value))  # a container that is held twice has its parts twice


def parts_of(value: Any) -> dict[str, Any]:
    """The direct parts of a container or data object, by the user's spelling; empty for anything else.

    >>> parts_of([4, 5])
    {'[0]': 4, '[1]': 5}
    """
    if isinstance(value, (Tensor, torch.Size, str, bytes, type, nn.Module)):
        return {}
    if isinstance(value, Mapping):
        return {f"[{key!r}]": part for key, part in value.items()}
    if isinstance(value, (Sequence, Set, ValuesView)):
        return {f"[{i}]": part for i, part in enumerate(value)}
    if _is_dataclass(value):
        return {f".{f.name}": getattr(value, f.name) for f in dataclasses.fields(value)}
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict) and not callable(value):
        return {f".{key}": part for key, part in held.items()}
    return {}


def given_host_values(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an argument of a call contains text, which only Python can process.

    >>> given_host_values((["a b", "c"],), {}), given_host_values((torch.ones(2), 3), {})
    (True, False)
    """
    return any(isinstance(leaf, (str, bytes)) for leaf in pytree.tree_leaves((tuple(args), dict(kwargs))))


def is_constant(leaf: Any) -> bool:
    """Whether a leaf of a result can be the same object in every call: it is immutable, and contains no tensor.

    >>> is_constant(3), is_constant(torch.float32), is_constant(object()), is_constant({1, 2})
    (True, True, False, False)
    """
    if is_number(leaf):
        return False
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        frozen = bool(type(leaf).__dataclass_params__.frozen)  # type: ignore[attr-defined]  # every dataclass has them
        return frozen and all(is_constant(getattr(leaf, f.name)) for f in dataclasses.fields(leaf))
    if isinstance(leaf, (tuple, frozenset)):
        return all(map(is_constant, leaf))
    if isinstance(leaf, slice):
        return all(map(is_constant, (leaf.start, leaf.stop, leaf.step)))
    return leaf is None or leaf is Ellipsis or isinstance(leaf, _CONSTANTS)


def _opened(result: Any, replacement: Callable[[Any], Any] = lambda part: None) -> Any:
    """The same structure, with :class:`_Fields` or :class:`OpenedObject` in place of every dataclass and object that
    contains a tensor or a part that is replaced. An object that occurs again stays one leaf."""
    return _opened_part(result, replacement, set())


def _opened_part(result: Any, replacement: Callable[[Any], Any], seen: set[int]) -> Any:
    def is_leaf(part: Any) -> bool:
        return isinstance(part, (torch.Size, _Fields, OpenedObject)) or replacement(part) is not None

    leaves, spec = pytree.tree_flatten(result, is_leaf=is_leaf)
    return pytree.tree_unflatten([_opened_leaf(leaf, replacement, seen) for leaf in leaves], spec)


def _opened_leaf(leaf: Any, replacement: Callable[[Any], Any], seen: set[int]) -> Any:
    if (replaced := replacement(leaf)) is not None:
        return replaced
    if isinstance(leaf, (Tensor, _Fields, OpenedObject, GivenContainer)):
        return leaf
    opened: _Fields | OpenedObject
    if _is_dataclass(leaf):
        fields = {f.name: _opened_part(getattr(leaf, f.name), replacement, seen) for f in dataclasses.fields(leaf)}
        opened = _Fields(type(leaf), fields)
    elif can_be_opened(leaf) and id(leaf) not in seen:
        seen.add(id(leaf))
        attributes = {name: _opened_part(value, replacement, seen) for name, value in vars(leaf).items()}
        opened = OpenedObject(type(leaf), attributes)
    else:
        return leaf
    return opened if any(isinstance(part, (Tensor, GivenContainer)) for part in pytree.tree_leaves(opened)) else leaf


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)


def _closed(values: Any, context: tuple[type, tuple[str, ...]]) -> Any:
    cls, names = context
    given = dict(zip(names, values, strict=True))
    accepted = {f.name for f in dataclasses.fields(cls) if f.init}
    made = cls(**{name: value for name, value in given.items() if name in accepted})
    for name in given.keys() - accepted:
        object.__setattr__(made, name, given[name])
    return made


pytree.register_pytree_node(
    _Fields, lambda fields: (list(fields.values.values()), (fields.cls, tuple(fields.values))), _closed
)
