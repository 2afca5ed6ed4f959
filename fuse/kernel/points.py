"""The nest of elementwise outputs: every element on its own.

    for rows (parallel):
        for columns (vector):
            load, compute, store

Loops run in the order of the first output's strides, so that stores are contiguous whatever its layout; but where fewer
loads and stores jump from line to line along another dimension, that is the innermost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fuse.kernel.index import Size
from fuse.kernel.ir import Buffer, Load, Loop, Scope, Statement, Store
from fuse.kernel.nest import Dimension, Target, builder_for, store
from fuse.kernel.values import Output

ELEMENTS_OF_A_LINE = 16
NEAR = 1
"""More loads and stores that jump in an order of loops that may still be the best."""
WORTH_A_VECTOR = 16
"""Elements of a dimension that are worth an innermost loop other than that of the stores."""


def point_nest(
    targets: Sequence[Target],
    inputs: list[Buffer],
    names: Mapping[int, str],
    dimensions: Sequence[Dimension],
    place: int = 0,
) -> list[Statement]:
    """Loops over ``dimensions`` that store all ``targets``, which have one shape; ``place`` is that of their order
    among all, the best first."""
    order = order_of_loops(Output(targets[0].value, targets[0].strides))
    found = [_nest(targets, inputs, names, dimensions, order)]
    for dim in order[:-1]:
        if not all(map(_strided, found)) or math.prod(dimensions[dim].extents) < WORTH_A_VECTOR:
            continue
        moved = (*(d for d in order if d != dim), dim)
        found.append(_nest(targets, inputs, names, dimensions, moved))
    found.sort(key=_strided)
    near = [nest for nest in found if _strided(nest) <= _strided(found[0]) + NEAR]
    return near[min(place, len(near) - 1)]


def _nest(
    targets: Sequence[Target],
    inputs: list[Buffer],
    names: Mapping[int, str],
    dimensions: Sequence[Dimension],
    order: Sequence[int],
) -> list[Statement]:
    builder = builder_for(dimensions, inputs, names)
    atoms = [atom for d in order for atom in dimensions[d].atoms]
    for i, atom in enumerate(atoms):
        builder.open(atom, "vector" if i == len(atoms) - 1 else "parallel")
    index = tuple(d.index() for d in dimensions)
    store(builder, [(target, index) for target in targets])
    for _ in atoms:
        builder.close()
    return builder.blocks[0].statements


def _strided(statements: Sequence[Statement]) -> int:
    """How many loads and stores of the innermost loop take each element from another cache line."""
    found = 0
    for statement in statements:
        match statement:
            case Loop(kind="vector"):
                steps = (s.offset.step(statement.atom) for s in statement.body if isinstance(s, (Load, Store)))
                found += sum(bool(step.sized) or abs(step.constant) >= ELEMENTS_OF_A_LINE for step in steps)
            case Loop() | Scope():
                found += _strided(statement.body)
            case _:
                pass
    return found


def order_of_loops(output: Output) -> tuple[int, ...]:
    """Dimensions from the largest stride to the smallest."""
    shape = output.value.shape
    strides = [s.value if isinstance(s, Size) else s for s in output.strides]
    return tuple(sorted(range(len(shape)), key=lambda d: (-strides[d] if shape[d] > 1 else -math.inf, d)))
