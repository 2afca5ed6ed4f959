"""The loop nest of scans: ``cumsum``, ``cumprod``, ``cummax`` and ``cummin``.

for rows (parallel):
    so_far = 0
    for columns:
        so_far = so_far + x
        store so_far
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fuse.kernel.arithmetic.dtypes import register
from fuse.kernel.arithmetic.expressions import converted
from fuse.kernel.arithmetic.index import offset
from fuse.kernel.ir import Accumulate, Accumulator, Buffer, Let, Statement, Store
from fuse.kernel.nest import Dimension, Sink, builder_for
from fuse.kernel.recipes.registry import Call, Unsupported, convert
from fuse.kernel.values import ReduceOp, Scan, Value

aten = torch.ops.aten

OPS: Mapping[object, ReduceOp] = {
    aten.cumsum.default: "sum",
    aten.cumprod.default: "prod",
    aten.cummax.default: "max",
    aten.cummin.default: "min",
}


def scan_of(call: Call) -> Value | tuple[Value | None, ...]:
    """The value of an operator in ``OPS``; the positions of ``cummax`` and ``cummin`` have no kernel.

    Sums and products of floats are computed in float64, as in eager.
    """
    op, result = OPS[call.op], call.result
    value = convert(call.tensor("self"), call.dtype)
    if not value.shape:
        raise Unsupported("the scan is of a tensor without dimensions")
    if op in ("sum", "prod") and value.dtype.is_floating_point:
        value = convert(value, torch.float64)
    scan = Scan(value.shape, call.dtype, value, call["dim"] % len(value.shape), op)
    return (scan, None) if isinstance(result, (tuple, list)) else scan


def scan_nest(
    target: Sink, inputs: list[Buffer], names: Mapping[int, str], dimensions: Sequence[Dimension]
) -> list[Statement]:
    """The loops that store ``target``, whose value is a scan.

    Raises:
        SplitNeeded, NotAffine: see :mod:`fuse.kernel.arithmetic.index`.
    """
    scan = target.value
    assert isinstance(scan, Scan)
    builder = builder_for(dimensions, inputs, names)
    index = tuple(d.index() for d in dimensions)
    rows = [atom for d, dimension in enumerate(dimensions) if d != scan.dim for atom in dimension.atoms]
    along = dimensions[scan.dim].atoms
    for atom in rows:
        builder.open(atom, "parallel")
    so_far = Accumulator(builder.fresh(f"{scan.op}_so_far"), register(scan.source.dtype), scan.op)
    builder.add(so_far)
    for atom in along:
        builder.open(atom, "serial")
    builder.add(Accumulate(so_far, builder.element(scan.source, index)))
    result = Let(builder.fresh(scan.op), converted(so_far.result, scan.source.dtype, scan.dtype))
    builder.add(result)
    builder.add(Store(target.buffer, offset(index, target.strides) + target.start, result.variable))
    for _ in (*along, *rows):
        builder.close()
    return builder.blocks[0].statements
