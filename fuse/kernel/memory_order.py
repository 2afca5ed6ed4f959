"""How far apart in memory the loops of a nest move, where that is not the order of the dimensions.

sum(x, (2, 3)) of x [2, 64, 8, 8], channels side by side   ->   {i0: 4096, i1: 1, i2: 512, i3: 64}
sum(x, (2, 3)) of x [2, 64, 8, 8], places side by side     ->   {}                     the loops as they come
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from fuse.kernel.index import Index, NotAffine, Size, Stride, offset
from fuse.kernel.values import Input, Map, Product, Reindex, Value


def strides_of_loops(value: Value, index: Index, extents: Mapping[str, int]) -> dict[str, int]:
    """The distance in memory that each loop variable moves the largest input below ``value`` at ``index``.

    Empty where the inputs lie in the order of their dimensions, and where what is read is computed in other loops.

    >>> import torch
    >>> from fuse.kernel.index import Affine
    >>> image = Input((2, 3, 5), torch.float32, 0, (15, 1, 3))
    >>> strides_of_loops(image, tuple(map(Affine.of, "bcx")), {"b": 2, "c": 3, "x": 5})
    {'b': 15, 'c': 1, 'x': 3}
    """
    found: dict[tuple[int, Index], Input] = {}
    stack, seen = [(value, index)], set()
    while stack:
        current, at = stack.pop()
        if (id(current), at) in seen:
            continue
        seen.add((id(current), at))
        if isinstance(current, Input):
            found[id(current), at] = current
        elif isinstance(current, Map):
            stack += [(argument, at) for argument in current.args]
        elif isinstance(current, Reindex):
            try:
                stack.append((current.source, current.where(at, extents)))
            except NotAffine:
                return {}
        elif isinstance(current, Product):
            return {}
    if all(_in_order(leaf.shape, leaf.strides) for leaf in found.values()):
        return {}
    (_, at), largest = max(found.items(), key=lambda item: math.prod(item[1].shape))
    where = offset(at, largest.strides)
    return {atom: abs(where.coefficient(atom)) for atom in extents} if not where.sized else {}


def _in_order(shape: tuple[int, ...], strides: tuple[Stride, ...]) -> bool:
    """Whether no dimension moves further than one before it."""
    steps = [
        s.value if isinstance(s, Size) else abs(s) for s, n in zip(strides, shape, strict=True) if n > 1 and s != 0
    ]
    return all(outer >= inner for outer, inner in itertools.pairwise(steps))
