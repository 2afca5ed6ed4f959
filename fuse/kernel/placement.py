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
from fuse.kernel.values import Input, Reindex, Value


@dataclass(frozen=True)
class Placement:
    """Element ``index`` lies at ``start + sum(index * strides)`` of ``source``: numbers, sizes among them."""

    source: Input
    start: Affine
    strides: tuple[Affine, ...]


def placement(value: Value) -> Placement | None:
    """Where the elements of ``value`` lie; None where it is computed, or lies in no such order.

    >>> import torch
    >>> from fuse.kernel.values import permute, view
    >>> found = placement(permute(view(Input((24,), torch.float32, 0, (1,)), (4, 6)), (1, 0)))
    >>> [str(s) for s in found.strides]
    ['1', '6']
    """
    dimensions = [Dimension((f"d{d}",), (extent,)) for d, extent in enumerate(value.shape)]
    for _ in range(MAX_SPLITS):
        try:
            source, where = _place(value, dimensions)
        except SplitNeeded as need:
            dimensions = [d.split(need.atom, need.inner) if need.atom in d.atoms else d for d in dimensions]
        except NotAffine:
            return None
        else:
            strides = [d.step_of(where) for d in dimensions]
            if not isinstance(source, Input) or None in strides:
                return None
            return Placement(source, where.start(), tuple(s for s in strides if s is not None))
    return None


def as_memory(value: Value) -> Input | None:
    """``value`` as an input with strides of its own, where it begins at an input's first element."""
    if isinstance(value, Input):
        return value
    found = placement(value)
    if found is None or found.start != ZERO or any(s.sized for s in found.strides):
        return None
    strides = tuple(s.constant for s in found.strides)
    return Input(value.shape, value.dtype, found.source.position, strides)


def _place(value: Value, dimensions: Sequence[Dimension]) -> tuple[Value, Affine]:
    """What ``value`` is a view of, and the place of its element at the dimensions' index."""
    index: Index = tuple(d.index() for d in dimensions)
    extents = {a: e for d in dimensions for a, e in zip(d.atoms, d.extents, strict=True)}
    while isinstance(value, Reindex):
        index = value.where(index, extents)
        value = value.source
    return value, offset(index, value.strides) if isinstance(value, Input) else ZERO
