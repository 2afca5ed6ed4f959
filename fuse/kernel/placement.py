"""Placement: the start and strides of a value that is a view of an input.

    w.t()[:, 2:]  of w [4, 8]   ->   element 16 + i + 8 * j of w

Code that needs an operand in memory, such as a packed product, reads such a value in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuse.kernel.arithmetic.index import ZERO, Affine, Index, NotAffine, SplitNeeded, offset
from fuse.kernel.nest import MAX_SPLITS, Dimension
from fuse.kernel.values import Input, Map, Reindex, Value


@dataclass(frozen=True)
class StridedPlace:
    """Element ``index`` of a value is element ``start + sum(index * strides)`` of ``source``; sizes may be factors."""

    source: Input
    start: Affine
    strides: tuple[Affine, ...]


def placement(value: Value) -> StridedPlace | None:
    """The placement of ``value`` in an input; None if it is computed, or has no strides.

    >>> import torch
    >>> from fuse.kernel.values import permute, view
    >>> found = placement(permute(view(Input((24,), torch.float32, 0, (1,)), (4, 6)), (1, 0)))
    >>> [str(s) for s in found.strides]
    ['1', '6']
    """
    found = _source_index(value)
    if found is None:
        return None
    strides = [d.step_of(found.where) for d in found.dimensions]
    if None in strides:
        return None
    return StridedPlace(found.source, found.where.start(), tuple(s for s in strides if s is not None))


@dataclass(frozen=True)
class Matrices:
    """A batch of matrices in the memory of ``source``.

    ``start`` is the offset of a matrix, affine in the loop variables ``images`` (outermost first, with their extents).
    ``strides`` are those of rows and columns.
    """

    source: Input
    start: Affine
    images: tuple[tuple[str, int], ...]
    strides: tuple[int, int]


def matrices(value: Value) -> Matrices | None:
    """The placement of ``value`` ``[images, rows, columns]`` as a batch of matrices; None if there is none.

    >>> import torch
    >>> from fuse.kernel.values import permute, view
    >>> rows = view(Input((2, 5, 12), torch.float32, 0, (60, 12, 1)), (2, 5, 3, 4))
    >>> found = matrices(view(permute(rows, (0, 2, 1, 3)), (6, 5, 4)))
    >>> str(found.start), found.images, found.strides
    ('60 * i0o + 4 * i0i', (('i0o', 2), ('i0i', 3)), (12, 1))
    """
    found = _source_index(value)
    if found is None or found.where.sized:
        return None
    where, (images, *within) = found.where, found.dimensions
    strides = [d.step_of(where) for d in within]
    if None in strides:
        return None
    rows, columns = (s.constant for s in strides if s is not None)
    for atom in (a for d in within for a in d.atoms):
        where = where.without(atom)
    return Matrices(found.source, where, tuple(zip(images.atoms, images.extents, strict=True)), (rows, columns))


@dataclass(frozen=True)
class Blocks:
    """A matrix ``[rows, columns]`` that ``source`` stores in blocks of ``width`` columns, one after another."""

    source: Input
    width: int


def blocks(value: Value) -> Blocks | None:
    """The column blocks in which an input stores the matrix ``value``; None if it does not.

    >>> import torch
    >>> from fuse.kernel.values import permute, view
    >>> packed = Input((3, 5, 16), torch.float32, 0, (80, 16, 1))
    >>> blocks(view(permute(packed, (1, 0, 2)), (5, 48))).width
    16
    """
    found = _source_index(value)
    if found is None or found.where.sized or found.where.constant or len(found.dimensions) != 2:
        return None
    rows, columns = found.dimensions
    if len(columns.atoms) != 2:
        return None
    width, (outer, inner) = columns.extents[1], columns.atoms
    apart = found.where.coefficient(outer), found.where.coefficient(inner)
    step = rows.step_of(found.where)
    lies = apart == (value.shape[0] * width, 1) and step is not None and step.constant == width
    return Blocks(found.source, width) if lies else None


def as_memory(value: Value) -> Input | None:
    """``value`` as an input with other strides; None if it is computed or does not begin at an input's first
    element."""
    if isinstance(value, Input):
        return value
    found = placement(value)
    if found is None or found.start != ZERO or any(s.sized for s in found.strides):
        return None
    strides = tuple(s.constant for s in found.strides)
    return Input(value.shape, value.dtype, found.source.position, strides)


@dataclass(frozen=True)
class _SourceIndex:
    """The offset ``where`` in ``source`` of an element, affine in the loop variables of ``dimensions``."""

    source: Input
    where: Affine
    dimensions: list[Dimension]


def _source_index(value: Value) -> _SourceIndex | None:
    """The offset of an element of ``value``, its dimensions split as reshapes require; None if it is computed."""
    dimensions = [Dimension((f"i{d}",), (extent,)) for d, extent in enumerate(value.shape)]
    for _ in range(MAX_SPLITS):
        try:
            source, where = _below(value, dimensions)
        except SplitNeeded as need:
            dimensions = [d.split(need.atom, need.inner) if need.atom in d.atoms else d for d in dimensions]
        except NotAffine:
            return None
        else:
            return _SourceIndex(source, where, dimensions) if isinstance(source, Input) else None
    return None


def _is_same(value: Map) -> bool:
    """Whether ``value`` is its argument in memory; a copy to another dtype is not."""
    return value.is_copy and value.args[0].dtype == value.dtype


def _below(value: Value, dimensions: Sequence[Dimension]) -> tuple[Value, Affine]:
    """The value that ``value`` is a view of, and the offset in it of the element at the dimensions' index."""
    index: Index = tuple(d.index() for d in dimensions)
    extents = {a: e for d in dimensions for a, e in zip(d.atoms, d.extents, strict=True)}
    while True:
        if isinstance(value, Reindex):
            index, value = value.where(index, extents), value.source
        elif isinstance(value, Map) and _is_same(value):
            (value,) = value.args
        else:
            break
    return value, offset(index, value.strides) if isinstance(value, Input) else ZERO
