"""Take a model's result apart into leaves and structure, dataclasses included.

    Answer(scores=t, ids=[u, v])   ->   leaves [t, u, v], and a structure that makes an Answer of three leaves

``torch.utils._pytree`` sees a dataclass as one leaf unless its class is registered, and registering a user's class
would change what it is to everyone else. So a dataclass travels as a node of our own that remembers the class.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclasses.dataclass(frozen=True)
class _Fields:
    """A dataclass taken apart: its class, and its fields in order."""

    cls: type
    values: dict[str, Any]


def flatten_result(result: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """``torch.utils._pytree.tree_flatten``, taught dataclasses that hold tensors; a ``torch.Size`` is one leaf.

    >>> Pair = dataclasses.make_dataclass("Pair", ["a", "b"])
    >>> leaves, spec = flatten_result({"pair": Pair(torch.zeros(1), 2)})
    >>> leaves, pytree.tree_unflatten([10, 20], spec)
    ([tensor([0.]), 2], {'pair': Pair(a=10, b=20)})
    """
    return pytree.tree_flatten(_opened(result), is_leaf=_is_size)


def _opened(result: Any) -> Any:
    """The same structure with every dataclass that holds a tensor as :class:`_Fields`."""
    leaves, spec = pytree.tree_flatten(result, is_leaf=_is_size)
    return pytree.tree_unflatten([_fields(leaf) if _is_dataclass(leaf) else leaf for leaf in leaves], spec)


def _fields(value: Any) -> Any:
    fields = _Fields(type(value), {f.name: _opened(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return fields if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(fields)) else value


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
