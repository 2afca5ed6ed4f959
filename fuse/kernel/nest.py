"""Dimensions of a loop nest, and the values that it stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fuse.graph.strides import contiguous_strides
from fuse.kernel.arithmetic.extents import is_one
from fuse.kernel.arithmetic.index import ZERO, Affine, Index, Stride, offset
from fuse.kernel.elements import Builder
from fuse.kernel.ir import Buffer, Store
from fuse.kernel.values import Value

MAX_SPLITS = 32
"""Most attempts to build one nest, each with one loop split more."""


@dataclass(frozen=True)
class Dimension:
    """One dimension of an iteration space: its loop variables, outermost first, and their extents."""

    atoms: tuple[str, ...]
    extents: tuple[int, ...]

    @staticmethod
    def whole(position: int, extent: int) -> Dimension:
        """A dimension with one loop, ``i<position>``; without a loop if its extent is 1."""
        return Dimension((f"i{position}",), (extent,)) if not is_one(extent) else Dimension((), ())

    def index(self) -> Affine:
        total = ZERO
        for atom, stride in zip(self.atoms, contiguous_strides(self.extents), strict=True):
            total = total + Affine.of(atom) * stride
        return total

    def step_of(self, where: Affine) -> Affine | None:
        """The stride of offset ``where`` along this dimension; None if the split loops have no common stride."""
        steps = [where.step(atom) for atom in self.atoms]
        inner = zip(steps, steps[1:], self.extents[1:], strict=False)
        return steps[-1] if all(outer == step * extent for outer, step, extent in inner) else None

    def split(self, atom: str, inner: int) -> Dimension:
        where = self.atoms.index(atom)
        extent = self.extents[where]
        atoms = (*self.atoms[:where], f"{atom}o", f"{atom}i", *self.atoms[where + 1 :])
        return Dimension(atoms, (*self.extents[:where], extent // inner, inner, *self.extents[where + 1 :]))


@dataclass(frozen=True)
class Sink:
    """``value`` is stored in ``buffer`` with these strides, from element ``start`` on."""

    value: Value
    buffer: Buffer
    strides: tuple[Stride, ...]
    start: Affine = ZERO


def builder_for(dimensions: Sequence[Dimension], inputs: list[Buffer], names: Mapping[int, str]) -> Builder:
    extents = {a: e for d in dimensions for a, e in zip(d.atoms, d.extents, strict=True)}
    return Builder(inputs, extents, names)


def store(builder: Builder, stores: Sequence[tuple[Sink, Index]]) -> None:
    """Append stores of each sink's element at its index.

    All elements are computed before the first store, because an output may share memory with an input.
    """
    elements = [builder.element(target.value, index) for target, index in stores]
    for element, (target, index) in zip(elements, stores, strict=True):
        builder.add(Store(target.buffer, offset(index, target.strides) + target.start, element))
