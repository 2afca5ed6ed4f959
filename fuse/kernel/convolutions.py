"""Convolutions as matrix products, for the steps of a loop.

    conv2d(x, w)[b, o, y, x]   =   patches[b, y, x, (i, u, v)] @ w[o, (i, u, v)]

``patches`` reads the padded input once for every tap: a value like any other, so strides, dilation and padding are
index arithmetic. Groups multiply separately.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fuse.kernel.index import Index
from fuse.kernel.recipes import Unsupported
from fuse.kernel.values import Pad, Reindex, Value, permute, view


@dataclass(frozen=True)
class Window:
    """How a kernel moves over each spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @staticmethod
    def of(arguments: Mapping[str, object], dimensions: int) -> Window:
        """The window of a call of ``aten.convolution``; one number stands for all dimensions.

        Raises:
            Unsupported: a transposed convolution.
        """
        if arguments["transposed"]:
            raise Unsupported("a transposed convolution")

        def each(name: str) -> tuple[int, ...]:
            given: Sequence[int] = arguments[name]  # type: ignore[assignment]  # as the schema says
            return tuple(given) if len(given) == dimensions else (given[0],) * dimensions

        return Window(each("stride"), each("padding"), each("dilation"))


def patches(x: Value, window: Window, taps: Sequence[int], places: Sequence[int], groups: int) -> Value:
    """``[groups, batch * places, channels of a group * taps]`` of ``x`` ``[batch, channels, *space]``."""
    batch, channels, *space = x.shape
    around = (0, 0, *window.padding)
    size = (batch, channels, *(extent + 2 * p for extent, p in zip(space, window.padding, strict=True)))
    padded = Pad(size, x.dtype, x, around, 0) if any(around) else x
    each, rank = channels // groups, len(space)

    def where(index: Index, extents: Mapping[str, int]) -> Index:
        group, sample, *rest = index
        place, channel, tap = rest[:rank], rest[rank], rest[rank + 1 :]
        moved = (p * s + t * d for p, s, t, d in zip(place, window.stride, tap, window.dilation, strict=True))
        return (sample, group * each + channel, *moved)

    cut = Reindex((groups, batch, *places, each, *taps), x.dtype, padded, where)
    return view(cut, (groups, batch * math.prod(places), each * math.prod(taps)))


def weights(weight: Value, groups: int) -> Value:
    """``[groups, channels of a group * taps, outputs of a group]`` of ``[outputs, channels of a group, *taps]``."""
    outputs = weight.shape[0]
    return permute(view(weight, (groups, outputs // groups, math.prod(weight.shape[1:]))), (0, 2, 1))


def as_image(product: Value, batch: int, places: Sequence[int]) -> Value:
    """``[batch, outputs, *places]`` of ``[groups, batch * places, outputs of a group]``."""
    groups, _, outputs = product.shape
    rank = len(places)
    apart = view(product, (groups, batch, *places, outputs))
    in_order = permute(apart, (1, 0, rank + 2, *range(2, rank + 2)))
    return view(in_order, (batch, groups * outputs, *places))
