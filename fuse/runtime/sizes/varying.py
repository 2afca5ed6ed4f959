"""Sizes of a model's calls that vary, found by comparing calls; integer arguments count as sizes.

model(x [5, 3, 64])     captured, kernels for these sizes
model(x [7, 4, 64])     5 and 3 became 7 and 4: captured, kernels for any such sizes (fuse/kernel/sizes/sized.py)
model(x [9, 6, 64])     captured, the same kernels
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fuse.kernel.arithmetic.extents import LEAST, LEAST_LOWERED
from fuse.runtime.guards.call_keys import Key

Shapes = tuple[tuple[int, ...], ...]
LARGEST_KINDS = 16
"""Most kinds of calls that are kept, and most calls of each; a kind is a structure with dtypes and ranks of tensors."""


@dataclass(frozen=True)
class VaryingSize:
    """A size that varies in calls of one kind: its value ``now`` and in ``earlier`` calls.

    ``places``: (tensor, dimension) with this size, each with what is added to it there.
    """

    now: int
    earlier: tuple[int, ...]
    places: tuple[tuple[tuple[int, int], int], ...]


class SizesSeen:
    """The sizes of a model's calls so far, and the ``remarks`` of passes (:class:`fuse.kernel.sizes.sized.SizedCall`).

    ``rehearsed``: kinds of calls for which a call at other declared sizes was planned
    (:mod:`fuse.runtime.sizes.rehearsing`).
    """

    def __init__(self) -> None:
        self._first: dict[Hashable, list[Shapes]] = {}
        self._wide: dict[Hashable, set[tuple[int, int]]] = {}  # (tensor, dimension) that were not one
        self.remarks: dict[Hashable, set[Hashable]] = {}
        self.rehearsed: set[Hashable] = set()

    def varying(self, kind: Key, leaves: Sequence[Any]) -> frozenset[int] | None:
        """The sizes of a call from 2 on that differ from those of earlier calls of its kind; None if no size differs.

        Records the call.
        """
        integers = tuple(leaf if type(leaf) is int else 0 for leaf in leaves)
        now = (*(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)), integers)
        seen = self._first.setdefault(kind, [])
        found = {
            b
            for shapes in seen
            for one, other in zip(shapes, now, strict=True)
            for a, b in zip(one, other, strict=True)
            if a != b and a >= LEAST and b >= LEAST_LOWERED
        }
        differs = any(shapes != now for shapes in seen)
        if now not in seen and len(seen) < LARGEST_KINDS:
            seen.append(now)
            wide = ((i, d) for i, shape in enumerate(now[:-1]) for d, size in enumerate(shape) if size != 1)
            self._wide.setdefault(kind, set()).update(wide)
        while len(self._first) > LARGEST_KINDS:
            oldest = next(iter(self._first))
            del self._first[oldest], self._wide[oldest]
        return frozenset(found) if differs else None

    def sizes(self, kind: Key, leaves: Sequence[Any]) -> list[VaryingSize]:
        """The sizes of tensors that differ between earlier calls of this kind and this one; none if one is too small.

        >>> import torch
        >>> seen, kind = SizesSeen(), Key(None, (), None)
        >>> _ = seen.varying(kind, [torch.ones(5, 8), torch.ones(8, 6)])
        >>> [(one.now, one.places) for one in seen.sizes(kind, [torch.ones(9, 8), torch.ones(8, 10)])]
        [(9, (((0, 0), 0), ((1, 1), 1)))]
        """
        now = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        calls = [*(shapes[:-1] for shapes in self._first.get(kind, ())), now]
        found: dict[tuple[int, ...], list[tuple[tuple[int, int], tuple[int, ...]]]] = {}
        for i, shape in enumerate(now):
            for d in range(len(shape)):
                column = tuple(shapes[i][d] for shapes in calls)
                if len(set(column)) > 1:
                    found.setdefault(tuple(n - column[0] for n in column), []).append(((i, d), column))
        if any(min(column) < LEAST_LOWERED for places in found.values() for _, column in places):
            return []
        firsts = ((places, places[0][1]) for places in found.values())
        return [
            VaryingSize(first[-1], first[:-1], tuple((place, column[-1] - first[-1]) for place, column in places))
            for places, first in firsts
        ]

    def ones(self, kind: Key, shapes: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
        """(tensor, dimension) of the sizes of a call that are one, and were not in another call of its kind."""
        wide = self._wide.get(kind, ())
        return tuple(
            (i, d) for i, shape in enumerate(shapes) for d, size in enumerate(shape) if size == 1 and (i, d) in wide
        )

    def grows(self, kind: Key, leaves: Sequence[Any]) -> bool:
        """Whether a tensor of a call has one row, and was empty in all earlier calls of its kind."""
        now = [leaf.shape for leaf in leaves if isinstance(leaf, Tensor)]
        seen = self._first.get(kind, ())
        return any(
            size == 1 and seen and all(shapes[i][d] == 0 for shapes in seen)
            for i, shape in enumerate(now)
            for d, size in enumerate(shape)
        )
