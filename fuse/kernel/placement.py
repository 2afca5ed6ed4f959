"""Where the elements of a view lie in the memory of what it is a view of.

    w.t()[:, 2:]  of w [4, 8]   ->   element 16 + i + 8 * j of w

A value that is nothing but views of an input can be read where it lies, by what needs memory and no arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuse.kernel.index import ZERO, Affine, Index, NotAffine, SplitNeeded, offset
from fuse.kernel.nest import Dimension
from fuse.kernel.schedule import MAX_SPLITS
from fuse.kernel.values import Input, Map, Reindex, Value


@dataclass(frozen=True)
class StridedPlace:
    """Element ``index`` lies at ``start + sum(index * strides)`` of ``source``: numbers, sizes among them."""

    source: Input
    start: Affine
    strides: tuple[Affine, ...]


def placement(value: Value) -> StridedPlace | None:
    """Where the elements of ``value`` lie; None where it is computed, or lies in no such order.

    >>> import torch
    >>> from fuse.kernel.values import permute, view
    >>> found = placement(permute(view(Input((24,), torch.float32, 0, (1,)), (4, 6)), (1, 0)))
    >>> [str(s) for s in found.strides]
    ['1', '6']
    """
    found = _place(value)
    if found is None:
        return None
    strides = [d.step_of(found.where) for d in found.dimensions]
    if None in strides:
        return None
    return StridedPlace(found.source, found.where.start(), tuple(s for s in strides if s is not None))


@dataclass(frozen=True)
class Matrices:
    """A batch of matrices in the memory of ``source``: one begins at ``start``, affine in the loop variables ``images``
    (outermost first, each with its extent), and element ``row, column`` lies ``strides`` further on."""

    source: Input
    start: Affine
    images: tuple[tuple[str, int], ...]
    strides: tuple[int, int]


def matrices(value: Value) -> Matrices | None:
    """Where the matrices of ``value`` lie, ``[images, rows, columns]``; None where they lie in no such order.

    >>> import torch
    >>> from fuse.kernel.values import permute, view
    >>> rows = view(Input((2, 5, 12), torch.float32, 0, (60, 12, 1)), (2, 5, 3, 4))
    >>> found = matrices(view(permute(rows, (0, 2, 1, 3)), (6, 5, 4)))
    >>> str(found.start), found.images, found.strides
    ('60 * i0o + 4 * i0i', (('i0o', 2), ('i0i', 3)), (12, 1))
    """
    found = _place(value)
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
    """A matrix [rows, columns] in the memory of ``source``, a block of ``width`` columns behind the other."""

    source: Input
    width: int


def blocks(value: Value) -> Blocks | None:
    """The blocks in which a matrix lies, one where its rows follow one another; None for any other.

    >>> import torch
    >>> from fuse.kernel.values import permute, view
    >>> packed = Input((3, 5, 16), torch.float32, 0, (80, 16, 1))
    >>> blocks(view(permute(packed, (1, 0, 2)), (5, 48))).width
    16
    """
    found = _place(value)
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
    """``value`` as an input with strides of its own, where it begins at an input's first element."""
    if isinstance(value, Input):
        return value
    found = placement(value)
    if found is None or found.start != ZERO or any(s.sized for s in found.strides):
        return None
    strides = tuple(s.constant for s in found.strides)
    return Input(value.shape, value.dtype, found.source.position, strides)


@dataclass(frozen=True)
class _Place:
    """Where in ``source`` the element lies that the loop variables of ``dimensions`` count."""

    source: Input
    where: Affine
    dimensions: list[Dimension]


def _place(value: Value) -> _Place | None:
    """Where the elements of ``value`` lie, its dimensions split where reshapes on the way ask for it; None where it is
    computed."""
    dimensions = [Dimension((f"i{d}",), (extent,)) for d, extent in enumerate(value.shape)]
    for _ in range(MAX_SPLITS):
        try:
            source, where = _below(value, dimensions)
        except SplitNeeded as need:
            dimensions = [d.split(need.atom, need.inner) if need.atom in d.atoms else d for d in dimensions]
        except NotAffine:
            return None
        else:
            return _Place(source, where, dimensions) if isinstance(source, Input) else None
    return None


def _is_same(value: Map) -> bool:
    """Whether ``value`` has the bits of its argument: halves are widened when they are read, and do not lie so."""
    return value.is_copy and value.args[0].dtype == value.dtype


def _below(value: Value, dimensions: Sequence[Dimension]) -> tuple[Value, Affine]:
    """The tensor that ``value`` is a view of, and the place of its element at the dimensions' index."""
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
