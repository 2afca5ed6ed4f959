"""Values: the definition of a tensor's element, given its index. The form between ATen operators and loops.

    softmax(x, -1)   ->   m = Reduce(max, x);  e = Map(exp, x - m);  s = Reduce(sum, e);  Map(div, e, s)
    x.transpose(0, 1) ->  Reindex(x, swap the two indices)
    cat([a, b], 1)   ->   Concat((a, b), 1)

Values are immutable and shared: a value used twice is one object. All arguments of a ``Map`` have its shape (broadcasts
are explicit ``Reindex``), a ``Reduce`` keeps reduced dimensions with extent 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from fuse.kernel.expressions import Expression, Parameter, cost
from fuse.kernel.extents import alike, is_one
from fuse.kernel.index import ZERO, Affine, Index, Stride, reshape

Shape = tuple[int, ...]
ReduceOp = Literal["sum", "prod", "max", "min", "largest", "any", "all", "argmax", "argmin"]
"""``largest`` is the maximum of what is not NaN."""


@dataclass(frozen=True, eq=False)
class Value:
    """An element type and a shape; subclasses say what the elements are."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Input(Value):
    """Argument ``position`` of the kernel, read with these strides (elements)."""

    position: int
    strides: tuple[Stride, ...]


@dataclass(frozen=True, eq=False)
class Constant(Value):
    """The same number everywhere."""

    number: bool | int | float


@dataclass(frozen=True, eq=False)
class Iota(Value):
    """``start + step * index[dim]``."""

    dim: int
    start: bool | int | float
    step: bool | int | float


@dataclass(frozen=True, eq=False)
class Map(Value):
    """``formula`` of the arguments at the same index, which are its parameters."""

    formula: Expression
    args: tuple[Value, ...]

    @cached_property
    def cost(self) -> int:
        """The cost of one element, the arguments given."""
        return cost(self.formula)

    @property
    def is_copy(self) -> bool:
        """Whether the elements are those of the argument."""
        return isinstance(self.formula, Parameter)


@dataclass(frozen=True, eq=False)
class Reindex(Value):
    """The element of ``source`` at ``where(index, extents of the loop variables)``."""

    source: Value
    where: Callable[[Index, Mapping[str, int]], Index]


@dataclass(frozen=True, eq=False)
class Reshaped(Reindex):
    """The same elements in row-major order under another shape."""


@dataclass(frozen=True, eq=False)
class Concat(Value):
    """``pieces`` one after another along ``dim``."""

    pieces: tuple[Value, ...]
    dim: int


@dataclass(frozen=True, eq=False)
class Pad(Value):
    """``source`` moved by ``before`` (one number a dimension), ``fill`` outside of it."""

    source: Value
    before: tuple[int, ...]
    fill: bool | int | float


@dataclass(frozen=True, eq=False)
class Gather(Value):
    """``table`` with the index of ``dim`` looked up in ``positions``: an indirect load.

    ``position_index`` and ``rest`` take this value's index to that of ``positions`` and to the table's other
    dimensions. A negative position counts from the end where ``wraps`` (``x[i]``), else it is out of range (embedding).
    """

    table: Input
    positions: Value
    dim: int
    position_index: Callable[[Index], Index]
    rest: Callable[[Index], Index]
    wraps: bool


@dataclass(frozen=True, eq=False)
class Reduce(Value):
    """``op`` over ``dims`` of ``source``, which stay with extent 1."""

    source: Value
    dims: tuple[int, ...]
    op: ReduceOp


@dataclass(frozen=True, eq=False)
class Scan(Value):
    """``op`` over the elements of ``source`` along ``dim``, up to each: a kernel stores it, and reads it no further."""

    source: Value
    dim: int
    op: ReduceOp


@dataclass(frozen=True, eq=False)
class Patches(Value):
    """Patches of a convolution: ``[batch, channels * taps, places]`` of images ``[batch, channels, y, x]``.

    ``taps``, ``places``, ``stride``, ``padding`` and ``dilation`` are of ``y`` and ``x``; it is zero in the padding.
    """

    source: Value
    taps: tuple[int, int]
    places: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


@dataclass(frozen=True, eq=False)
class PatchRows(Patches):
    """The same, a patch a row, for weights on the right: ``[batch, places, taps * channels]``, the channels of a tap
    side by side."""


@dataclass(frozen=True, eq=False)
class Product(Value):
    """``left @ right`` of matrices, one of them or both a batch: computed a tile at a time, and read only there."""

    left: Value
    right: Value


@dataclass(frozen=True, eq=False)
class Correlation(Value):
    """Sums over images and places, ``[groups, outputs, channels * taps]``: ``left`` ``[images, outputs, places]`` times
    the patches ``right`` of the same images, turned over. Image ``i`` belongs to group ``i % groups``."""

    left: Value
    right: Patches


@dataclass(frozen=True)
class Output:
    """Store ``value`` with these strides (elements)."""

    value: Value
    strides: tuple[Stride, ...]


@dataclass(frozen=True)
class Computation:
    """A region as values: what to read, what to store, names for the source, and the user's lines for its comments.

    ``names`` are those of the inputs by position, ``value_names`` those of values by ``id``.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    names: Mapping[int, str] = field(default_factory=dict)
    value_names: Mapping[int, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


def expand(value: Value, shape: Sequence[int]) -> Value:
    """Broadcast to ``shape`` by NumPy's rule."""
    shape = tuple(shape)
    if alike(value.shape, shape):
        return value
    if isinstance(value, Constant):
        return Constant(shape, value.dtype, value.number)
    own = value.shape
    missing = len(shape) - len(own)

    def where(index: Index, extents: Mapping[str, int]) -> Index:
        return tuple(ZERO if is_one(own[d]) else index[missing + d] for d in range(len(own)))

    return Reindex(shape, value.dtype, value, where)


def view(value: Value, shape: Sequence[int]) -> Value:
    """The same elements in row-major order under another shape."""
    shape = tuple(shape)
    if alike(value.shape, shape):
        return value
    if isinstance(value, Reshaped):  # of two views only the last shape matters
        return view(value.source, shape)
    own = value.shape
    return Reshaped(shape, value.dtype, value, lambda index, extents: reshape(index, shape, own, extents))


def permute(value: Value, order: Sequence[int]) -> Value:
    """Dimension ``d`` of the result is dimension ``order[d]`` of ``value``."""
    order = [d % len(value.shape) for d in order]
    inverse = [order.index(d) for d in range(len(order))]
    shape = tuple(value.shape[d] for d in order)
    return Reindex(shape, value.dtype, value, lambda index, extents: tuple(index[d] for d in inverse))


def affine(value: Value, shape: Sequence[int], terms: Sequence[tuple[int | None, int, int]]) -> Value:
    """Read dimension ``d`` of ``value`` at ``index[source] * step + start``, where ``terms[d]`` is those three.

    A ``source`` of None reads at ``start`` whatever the index.
    """

    def where(index: Index, extents: Mapping[str, int]) -> Index:
        return tuple(
            Affine((), start) if source is None else index[source] * step + start for source, step, start in terms
        )

    return Reindex(tuple(shape), value.dtype, value, where)
