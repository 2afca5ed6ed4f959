"""Values computed with torch, whole tensors at a time: what a region's recipes say, whatever loops are made of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuse.kernel.arithmetic.expressions import Operation, Position, parts, position
from fuse.kernel.arithmetic.index import Affine, Index
from fuse.kernel.traversals import within_stage
from fuse.kernel.values import (
    Computation,
    Concat,
    Constant,
    Gather,
    Input,
    Iota,
    Map,
    Pad,
    Product,
    Reduce,
    Reindex,
    Reshaped,
    Value,
)
from tests.kernel.expression_values import evaluate


class NotEvaluated(Exception):
    """There is no evaluation of such a value."""


def evaluated(computation: Computation, inputs: Sequence[Tensor], widened: bool = False) -> list[Tensor]:
    """The results of a region, in its own dtypes or with floats widened to float64."""
    known: dict[int, Tensor] = {}
    outputs = [output.value for output in computation.outputs]
    for value in within_stage(outputs, through_reductions=True):
        known[id(value)] = _value(value, inputs, known, widened)
    return [known[id(value)].expand(value.shape) for value in outputs]


def multiplies_and_adds(computation: Computation) -> bool:
    """Whether a multiplication and an addition are rounded once, which torch has no operator for."""
    values = within_stage([output.value for output in computation.outputs], through_reductions=True)
    formulas = (value.formula for value in values if isinstance(value, Map))
    return any(isinstance(p, Operation) and p.operator == "fma" for formula in formulas for p in parts(formula))


def _value(value: Value, inputs: Sequence[Tensor], known: dict[int, Tensor], widened: bool) -> Tensor:
    wide = torch.float64 if widened and value.dtype.is_floating_point else value.dtype
    match value:
        case Input():
            return inputs[value.position].to(wide)
        case Constant():
            return torch.full(value.shape, value.number, dtype=wide)
        case Iota():
            return _at(value.shape, position(_grid(value)[value.dim] * int(value.step) + int(value.start))).to(wide)
        case Map():
            arguments = [_in_register(known[id(argument)], argument.dtype, widened) for argument in value.args]
            return evaluate(value.formula, arguments, widened=widened).to(wide).expand(value.shape)
        case Reshaped():
            return known[id(value.source)].reshape(value.shape)
        case Reindex():
            extents = {f"i{d}": extent for d, extent in enumerate(value.shape)}
            return _read(known[id(value.source)], value.where(_grid(value), extents), value.shape)
        case Reduce():
            return _reduced(known[id(value.source)], value).to(wide)
        case Concat():
            return torch.cat([known[id(piece)].to(wide) for piece in value.pieces], value.dim)
        case Pad():
            result = torch.full(value.shape, value.fill, dtype=wide)
            inside = [slice(b, b + n) for b, n in zip(value.before, value.source.shape, strict=True)]
            result[tuple(inside)] = known[id(value.source)]
            return result
        case Gather():
            at = _grid(value)
            rows = _read(known[id(value.positions)], value.position_index(at), value.shape)
            rest = [_at(value.shape, position(i)) for i in value.rest(at)]
            return known[id(value.table)][(*rest[: value.dim], rows, *rest[value.dim :])]
        case Product():
            return known[id(value.left)] @ known[id(value.right)]
    raise NotEvaluated(type(value).__name__)


def _in_register(value: Tensor, dtype: torch.dtype, widened: bool) -> Tensor:
    return value.float() if dtype in (torch.bfloat16, torch.float16) and not widened else value


def _grid(value: Value) -> Index:
    return tuple(Affine.of(f"i{d}") for d in range(len(value.shape)))


def _at(shape: tuple[int, ...], where: Position) -> Tensor:
    """An index at every element of ``shape``."""
    ranges = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij") if shape else ()
    return evaluate(where, (), {f"i{d}": r for d, r in enumerate(ranges)}).expand(shape)


def _read(source: Tensor, where: Index, shape: tuple[int, ...]) -> Tensor:
    return source[tuple(_at(shape, position(i)) for i in where)] if where else source.expand(shape)


def _reduced(source: Tensor, value: Reduce) -> Tensor:
    dims = value.dims
    if value.op == "largest":
        return torch.where(source.isnan(), -torch.inf, source).amax(dims, keepdim=True) if dims else source
    if not dims:
        return torch.zeros_like(source, dtype=torch.int64) if value.op.startswith("arg") else source
    if value.op in ("max", "min"):
        return (source.amax if value.op == "max" else source.amin)(dims, keepdim=True)
    if value.op == "sum":
        return source.sum(dims, keepdim=True, dtype=source.dtype if source.is_floating_point() else value.dtype)
    last = source.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims))
    return getattr(last, value.op)(-1).reshape(value.shape)
