"""Keys of calls that are counted together: how often they could not be captured, how long they took."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor


class Key:
    """Parts that are compared as one value, whose hash is computed once: a structure of arguments takes long.

    >>> Key(1, "a") == Key(1, "a"), Key(1, "a") == Key(2, "a")
    (True, False)
    """

    __slots__ = ("_hash", "parts")

    def __init__(self, *parts: Hashable) -> None:
        self.parts: tuple[Any, ...] = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self._hash == other._hash and self.parts == other.parts


_PLAIN = frozenset((int, float, complex, bool, str, bytes, NoneType, torch.dtype, torch.device))


def key_of_call(leaves: Sequence[Any], spec: Any) -> Key:
    """A key that is equal for calls that differ in the contents of tensors and of objects only.

    >>> key_of_call((torch.ones(2), 3), None) == key_of_call((torch.zeros(2), 3), None)
    True
    >>> key_of_call((torch.ones(2), 3), None) == key_of_call((torch.ones(3), 3), None)
    False
    """
    return Key(dtypes_and_shapes(leaves), tuple(map(key_of_value, leaves)), spec)


def dtypes_and_shapes(leaves: Sequence[Any]) -> tuple[tuple[torch.dtype, torch.Size] | None, ...]:
    """The first part of a key of a call (:func:`key_of_call`)."""
    return tuple([(leaf.dtype, leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves])


def shapes_of(key: Key) -> list[torch.Size]:
    """The shapes of the tensors in a key of a call (:func:`key_of_call`).

    >>> shapes_of(key_of_call((torch.ones(2), 3), None))
    [torch.Size([2])]
    """
    return [tensor[1] for tensor in key.parts[0] if tensor is not None]


def differ_in_numbers(one: Key, other: Key) -> bool:
    """Whether two keys of calls (:func:`key_of_call`) differ in arguments that are numbers, and in nothing else.

    >>> x = torch.ones(2)
    >>> a, b, c = (key_of_call(leaves, None) for leaves in ((x, 3, "a"), (x, 4, "a"), (x, 4, "b")))
    >>> differ_in_numbers(a, b), differ_in_numbers(a, c), differ_in_numbers(a, a)
    (True, False, False)
    """
    (tensors, values, spec), (others, other_values, other_spec) = one.parts, other.parts
    if tensors != others or spec != other_spec or values == other_values:
        return False
    return all(a == b or (a[0] is b[0] and a[0] in (int, float)) for a, b in zip(values, other_values, strict=True))


def key_without_sizes(leaves: Sequence[Any], spec: Any) -> Hashable:
    """A key that is equal for calls that differ in the sizes and contents of tensors, and in numbers, only.

    >>> key_without_sizes((torch.ones(2), 3), None) == key_without_sizes((torch.ones(5), 4), None)
    True
    >>> key_without_sizes((torch.ones(2), True), None) == key_without_sizes((torch.ones(2), False), None)
    False
    """
    values = (type(leaf) if type(leaf) in (int, float) else key_of_value(leaf) for leaf in leaves)
    return kind_of_sizes(leaves, spec), tuple(values)


def kind_of_sizes(leaves: Sequence[Any], spec: Any) -> Key:
    """A key that is equal for calls that differ only in sizes and contents of tensors and in plain values."""
    return Key(spec, tuple((leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else None for leaf in leaves))


def key_of_value(leaf: Any) -> Hashable:
    """A key of an argument: the value of a plain one, the class of another. No code of that class runs for it.

    >>> key_of_value(2) == key_of_value(2.0), key_of_value(0.0) == key_of_value(-0.0)
    (False, False)
    """
    kind: type[Any] = type(leaf)
    return kind, repr(leaf) if kind in _PLAIN else ""
