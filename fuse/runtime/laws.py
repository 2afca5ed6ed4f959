"""How a value follows from a length, learned from the same value at a few lengths.

    length    11               13               17                t
    value     (88, "a", 10)    (104, "a", 12)   (136, "a", 16)    (8 * t, "a", t - 1)

Values may be nested; whole numbers follow from the first two lengths and must be right at all others, everything else
must be equal. At a length for which a number would not be whole there is no value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fuse.runtime.guards import same_value
from fuse.runtime.layout import is_lazy

Law = Callable[[int], Any]


class NoLaw(Exception):
    """Values are not one function of the length; the message is a reason."""


@dataclass(frozen=True)
class Fixed:
    """The same value at every length."""

    value: Any

    def __call__(self, length: int) -> Any:
        return self.value


@dataclass(frozen=True)
class Linear:
    """``value + (t - length) * rise / run``."""

    length: int
    value: int
    rise: int
    run: int

    def __call__(self, length: int) -> int:
        steps, rest = divmod((length - self.length) * self.rise, self.run)
        if rest:
            raise NoLaw(f"a size would not be whole at length {length}")
        return self.value + steps


def law_of(lengths: Sequence[int], values: Sequence[Any]) -> Law:
    """The law that gives each of ``values`` at its length; tensors come out without data.

    Raises:
        NoLaw: there is none; the law itself raises it for lengths at which it has no value.

    >>> law = law_of((4, 6, 9), [(8, "a"), (12, "a"), (18, "a")])
    >>> law(100)
    (200, 'a')
    >>> law_of((4, 6, 9), [2, 3, 4])
    Traceback (most recent call last):
    fuse.runtime.laws.NoLaw: 4 at length 9 does not follow from 2 and 3 at lengths 4 and 6
    """
    first = values[0]
    if isinstance(first, Tensor) and all(isinstance(value, Tensor) for value in values):
        return _tensor(lengths, values)
    if any(type(value) is not type(first) for value in values):
        raise NoLaw(f"{_said(first)} becomes {_said(values[-1])}")
    if type(first) is int:
        return _number(lengths, values)
    if isinstance(first, (tuple, list)):
        kind = list if isinstance(first, list) else tuple
        return _together(lengths, values, kind)
    if isinstance(first, dict):
        if any(value.keys() != first.keys() for value in values):
            raise NoLaw("arguments have other names at other lengths")
        parts = [tuple(value[key] for key in first) for value in values]
        return _together(lengths, parts, lambda found: dict(zip(first, found, strict=True)))
    if isinstance(first, Node):
        return Fixed(None)  # of the graph, which programs do not read
    if is_dataclass(first) and not callable(first):
        names = [field.name for field in fields(first)]
        parts = [tuple(getattr(value, name) for name in names) for value in values]
        return _together(lengths, parts, lambda found: type(first)(*found))
    if not all(same_value(first, value) for value in values):
        raise NoLaw(f"{_said(first)} becomes {_said(next(v for v in values if not same_value(first, v)))}")
    return Fixed(first)


def _number(lengths: Sequence[int], values: Sequence[int]) -> Law:
    if len(set(values)) == 1:
        return Fixed(values[0])
    law = Linear(lengths[0], values[0], values[1] - values[0], lengths[1] - lengths[0])
    for length, value in zip(lengths[2:], values[2:], strict=True):
        try:
            right = law(length) == value
        except NoLaw:
            right = False
        if not right:
            known = f"{values[0]} and {values[1]} at lengths {lengths[0]} and {lengths[1]}"
            raise NoLaw(f"{value} at length {length} does not follow from {known}")
    return law


def _together(lengths: Sequence[int], values: Sequence[Sequence[Any]], build: Callable[[list[Any]], Any]) -> Law:
    """The law of values that are built from parts."""
    if len({len(value) for value in values}) > 1:
        raise NoLaw(f"{len(values[0])} parts become {len(values[-1])}")
    laws = [law_of(lengths, parts) for parts in zip(*values, strict=True)]
    if all(isinstance(law, Fixed) for law in laws):
        return Fixed(build([law(0) for law in laws]))
    return lambda length: build([law(length) for law in laws])


def _tensor(lengths: Sequence[int], values: Sequence[Tensor]) -> Law:
    """The law of layouts: what a schedule reads of a tensor."""
    if any(map(is_lazy, values)) or len({(v.dtype, v.device.type, v.layout) for v in values}) > 1:
        raise NoLaw("a tensor is of another kind at other lengths")
    layouts = _together(lengths, [(tuple(v.shape), v.stride()) for v in values], tuple)
    dtype = values[0].dtype

    def made(length: int) -> Tensor:
        return torch.empty_strided(*layouts(length), dtype=dtype, device="meta")

    return Fixed(made(0)) if isinstance(layouts, Fixed) else made


def _said(value: object) -> str:
    """A value in a reason: short."""
    if isinstance(value, (int, float, str, torch.dtype, torch._ops.OpOverload)):
        return repr(value)
    return f"a {type(value).__name__}"
