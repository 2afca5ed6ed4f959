"""Strides of a nest's loops in memory, where inputs are not stored in the order of their dimensions.

sum(x, (2, 3)) of x [2, 64, 8, 8], channels-last   ->   {i0: 4096, i1: 1, i2: 512, i3: 64}
sum(x, (2, 3)) of x [2, 64, 8, 8], contiguous      ->   {}                     loops in the order of the dimensions
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from fuse.kernel.arithmetic.extents import always_equal, is_one
from fuse.kernel.arithmetic.index import Affine, Index, NotAffine, Size, SplitNeeded, Stride, offset
from fuse.kernel.traversals import children, within_stage
from fuse.kernel.values import Input, Product, Reindex, Value


def strides_of_loops(value: Value, index: Index, extents: Mapping[str, int]) -> dict[str, int]:
    """By loop variable: its stride, in elements, in the largest input that ``value`` reads at ``index``.

    Empty if all inputs are stored in the order of their dimensions, and if ``value`` reads a product.

    >>> import torch
    >>> image = Input((2, 3, 5), torch.float32, 0, (15, 1, 3))
    >>> strides_of_loops(image, tuple(map(Affine.of, "bcx")), {"b": 2, "c": 3, "x": 5})
    {'b': 15, 'c': 1, 'x': 3}
    """
    found = reads_of(value, index, extents)
    if all(_in_order(leaf.shape, leaf.strides) for leaf, _ in found):
        return {}
    if any(isinstance(below, Product) for below in within_stage([value])):
        return {}
    _, where = max(found, key=lambda read: math.prod(read[0].shape))
    return {atom: abs(where.coefficient(atom)) for atom in extents} if not where.sized else {}


def reads_of(value: Value, index: Index, extents: Mapping[str, int]) -> list[tuple[Input, Affine]]:
    """The inputs read for the element of ``value`` at ``index``, with their offsets; reads that are not affine left
    out."""
    found: list[tuple[Input, Affine]] = []
    seen: set[tuple[int, Index]] = set()
    stack = [(value, index)]
    while stack:
        current, at = stack.pop()
        if (id(current), at) in seen:
            continue
        seen.add((id(current), at))
        if isinstance(current, Input):
            found.append((current, offset(at, current.strides)))
        elif isinstance(current, Reindex):
            try:
                stack.append((current.source, current.where(at, extents)))
            except (SplitNeeded, NotAffine):
                continue
        elif not isinstance(current, Product):  # computed in loops of its own
            stack.extend((child, at) for child in children(current) if _same(child.shape, current.shape))
    return found


def _same(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(map(always_equal, one, other))


def _in_order(shape: tuple[int, ...], strides: tuple[Stride, ...]) -> bool:
    """Whether no dimension has a larger stride than one before it."""
    steps = [
        s.value if isinstance(s, Size) else abs(s)
        for s, n in zip(strides, shape, strict=True)
        if not is_one(n) and s != 0
    ]
    return all(outer >= inner for outer, inner in itertools.pairwise(steps))
