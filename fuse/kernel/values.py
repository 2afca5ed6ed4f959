"""Values: definitions of a tensor's element by its index. The intermediate representation between ATen and loops.

    softmax(x, -1)   ->   m = Reduce(max, x);  e = Map(exp, x - m);  s = Reduce(sum, e);  Map(div, e, s)
    x.transpose(0, 1) ->  Reindex(x, swap the two indices)
    cat([a, b], 1)   ->   Concat((a, b), 1)

Values are immutable and shared: a value used twice is one object. All arguments of a ``Map`` have its shape; a
broadcast is an explicit ``Reindex``. A ``Reduce`` keeps reduced dimensions with extent 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from fuse.graph.strides import inverse
from fuse.kernel.arithmetic.expressions import Expression, Parameter, cost
from fuse.kernel.arithmetic.extents import alike, is_one
from fuse.kernel.arithmetic.index import ZERO, Affine, Index, Stride, reshape
from fuse.kernel.sizes.members import Members

Shape = tuple[int, ...]
ReduceOp = Literal["sum", "prod", "max", "min", "largest", "any", "all", "argmax", "argmin"]
RankOrder = Literal["topk", "any", "sort", "stable"]
"""The order of ranked elements, where some are equal: that of ``topk``, of unsorted ``topk``, of ``std::sort``, or as
they come."""
"""``max`` and ``min`` propagate NaN; ``largest`` is the maximum that ignores NaN."""
SolveKind = Literal[
    "inverse",
    "solution",
    "factors",
    "pivots",
    "cholesky",
    "lower",
    "unit_lower",
    "upper",
    "unit_upper",
    "with_factors",
    "with_factors_transposed",
]
"""Functions of small matrices: the inverse; ``X`` of ``A @ X = B``; the factors of ``A`` and its pivots, as LAPACK's
``getrf`` gives them; the lower Cholesky factor; ``X`` of ``A @ X = B`` for a triangular ``A``; and the same for factors
and pivots of ``A`` or of its transpose."""


@dataclass(frozen=True, eq=False)
class Value:
    """A shape and a dtype; subclasses define the elements."""

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
    """``formula`` applied to the elements of ``args`` at the same index."""

    formula: Expression
    args: tuple[Value, ...]

    @cached_property
    def cost(self) -> int:
        """The cost of one element, without the cost of the arguments."""
        return cost(self.formula)

    @property
    def is_copy(self) -> bool:
        """Whether the formula returns its argument unchanged."""
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
    """``source`` with ``before`` elements in front of it in each dimension; ``fill`` outside of ``source``."""

    source: Value
    before: tuple[int, ...]
    fill: bool | int | float


@dataclass(frozen=True, eq=False)
class Gather(Value):
    """Elements of ``table``, indexed along ``dim`` by ``positions``: an indirect load.

    ``position_index`` and ``rest`` map this value's index to the index into ``positions`` and to the index of the
    table's other dimensions. With ``wraps``, a negative position counts from the end (``x[i]``); otherwise it is out of
    range (embedding). Positions are checked even if the table is a constant.
    """

    table: Input | Constant
    positions: Value
    dim: int
    position_index: Callable[[Index], Index]
    rest: Callable[[Index], Index]
    wraps: bool


@dataclass(frozen=True, eq=False)
class Reduce(Value):
    """``op`` over ``dims`` of ``source``, which keep extent 1."""

    source: Value
    dims: tuple[int, ...]
    op: ReduceOp


@dataclass(frozen=True, eq=False)
class Scan(Value):
    """Inclusive scan of ``source`` along ``dim`` by ``op``. Kernels store a scan; no other value may read it."""

    source: Value
    dim: int
    op: ReduceOp


@dataclass(frozen=True, eq=False)
class Ranked(Value):
    """Positions along ``dim`` of the largest elements of ``source`` (or smallest), as ``topk`` or ``sort`` gives them.

    NaN is the largest. ``order`` is that of equal elements. Kernels store it; no other value may read it.
    """

    source: Value
    dim: int
    largest: bool
    order: RankOrder


@dataclass(frozen=True, eq=False)
class Solved(Value):
    """Matrices in the last two dimensions that are ``kind`` of the matrices ``sources``. Kernels store them; no other
    value may read them."""

    sources: tuple[Input, ...]
    kind: SolveKind


@dataclass(frozen=True, eq=False)
class Patches(Value):
    """The im2col matrix of a convolution: ``[batch, channels * taps, pixels]`` of images ``[batch, channels, y, x]``.

    ``taps``, ``output_size``, ``stride``, ``padding`` and ``dilation`` are pairs for ``y`` and ``x``. ``pixels`` is the
    product of ``output_size``. Elements in the padding are zero.
    """

    source: Value
    taps: tuple[int, int]
    output_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


@dataclass(frozen=True, eq=False)
class PatchRows(Patches):
    """The im2col matrix as a left operand: ``[batch, pixels, taps * channels]``, channels contiguous.

    ``by_channel``: ``[batch, pixels, channels * taps]`` instead, the taps of a row contiguous.
    """

    by_channel: bool = False


@dataclass(frozen=True, eq=False)
class SpreadPatches(Patches):
    """The same matrix of a transposed convolution: a tap reads the image with ``stride - 1`` zeros between its pixels.

    Element ``[batch, (channel, tap), pixel]`` is that of the image at ``(pixel + padding - tap * dilation) / stride``;
    zero where this is no whole number, or outside of the image.
    """


@dataclass(frozen=True, eq=False)
class Product(Value):
    """``left @ right``; either may be a matrix or a batch of matrices. Only the kernel that computes it reads it."""

    left: Value
    right: Value


@dataclass(frozen=True, eq=False)
class Correlation(Value):
    """The weight gradient of a convolution, ``[groups, outputs, channels * taps]``.

    The sum over images of ``left`` ``[images, outputs, pixels]`` times the transpose of the patches ``right``. Image
    ``i`` belongs to group ``i % groups``.
    """

    left: Value
    right: Patches


@dataclass(frozen=True)
class Output:
    """``value`` stored with these strides (elements)."""

    value: Value
    strides: tuple[Stride, ...]


@dataclass(frozen=True)
class Computation:
    """A region as values: inputs, outputs, names for the source, and the user's lines for its comments.

    ``names`` are names of inputs, by position; ``value_names`` are names of values, by ``id``. With ``members``, it is
    that of each of them.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    names: Mapping[int, str] = field(default_factory=dict)
    value_names: Mapping[int, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    members: Members | None = None


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
    if isinstance(value, Reshaped):  # a view of a view depends on the last shape only
        return view(value.source, shape)
    own = value.shape
    return Reshaped(shape, value.dtype, value, lambda index, extents: reshape(index, shape, own, extents))


def permute(value: Value, order: Sequence[int]) -> Value:
    """Dimension ``d`` of the result is dimension ``order[d]`` of ``value``."""
    order = [d % len(value.shape) for d in order]
    back = inverse(order)
    shape = tuple(value.shape[d] for d in order)
    return Reindex(shape, value.dtype, value, lambda index, extents: tuple(index[d] for d in back))


def affine(value: Value, shape: Sequence[int], terms: Sequence[tuple[int | None, int, int]]) -> Value:
    """A value of this shape that reads dimension ``d`` of ``value`` at ``index[source] * step + start``.

    ``terms[d]`` is ``(source, step, start)``; with ``source`` None, the dimension is read at ``start``.
    """

    def where(index: Index, extents: Mapping[str, int]) -> Index:
        return tuple(
            Affine((), start) if source is None else index[source] * step + start for source, step, start in terms
        )

    return Reindex(tuple(shape), value.dtype, value, where)
