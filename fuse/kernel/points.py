"""The nest of elementwise outputs: every element on its own.

    for rows (parallel):
        for columns (vector):
            load, compute, store

Loops run in the order of the first output's strides, so that stores are contiguous whatever its layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fuse.kernel.index import Size
from fuse.kernel.ir import Buffer, Statement
from fuse.kernel.nest import Dimension, Target, builder_for, store
from fuse.kernel.values import Output


def point_nest(
    targets: Sequence[Target], inputs: list[Buffer], names: Mapping[int, str], dimensions: Sequence[Dimension]
) -> list[Statement]:
    """Loops over ``dimensions`` that store all ``targets``, which have one shape."""
    builder = builder_for(dimensions, inputs, names)
    order = order_of_loops(Output(targets[0].value, targets[0].strides))
    atoms = [atom for d in order for atom in dimensions[d].atoms]
    for i, atom in enumerate(atoms):
        builder.open(atom, "vector" if i == len(atoms) - 1 else "parallel")
    index = tuple(d.index() for d in dimensions)
    store(builder, [(target, index) for target in targets])
    for _ in atoms:
        builder.close()
    return builder.blocks[0].statements


def order_of_loops(output: Output) -> tuple[int, ...]:
    """Dimensions from the largest stride to the smallest."""
    shape = output.value.shape
    strides = [s.value if isinstance(s, Size) else s for s in output.strides]
    return tuple(sorted(range(len(shape)), key=lambda d: (-strides[d] if shape[d] > 1 else -math.inf, d)))
