"""Recipes of views, copies, concatenations and constructors.

Views become index arithmetic and cost nothing inside a kernel. Concatenations become pieces, each written by a loop of
its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuse.kernel.arithmetic.dtypes import register
from fuse.kernel.arithmetic.expressions import Expression, Operation, Parameter, fn
from fuse.kernel.arithmetic.extents import always_equal, estimate, is_one
from fuse.kernel.recipes.elementwise import apply_test
from fuse.kernel.recipes.registry import Call, Unsupported, choice, convert, recipe
from fuse.kernel.values import (
    Concat,
    Constant,
    Iota,
    Map,
    Pad,
    Value,
    affine,
    expand,
    permute,
    view,
)


@recipe("view.default", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze", "reshape", "_reshape_copy")
def reshape(call: Call) -> Value:
    return view(call.tensor("self"), call.shape)


@recipe("alias", "detach", "contiguous")
def same(call: Call) -> Value:
    return call.tensor("self")


@recipe("expand")
def expanded(call: Call) -> Value:
    return expand(call.tensor("self"), call.shape)


@recipe("permute")
def permuted(call: Call) -> Value:
    return permute(call.tensor("self"), call["dims"])


@recipe("t")
def transposed_matrix(call: Call) -> Value:
    value = call.tensor("self")
    return value if len(value.shape) < 2 else permute(value, (1, 0))


@recipe("transpose.int")
def transposed(call: Call) -> Value:
    rank = len(call.shape)
    if rank == 0:
        return call.tensor("self")
    order = list(range(rank))
    first, second = call["dim0"] % rank, call["dim1"] % rank
    order[first], order[second] = order[second], order[first]
    return permute(call.tensor("self"), order)


@recipe("select.int")
def select(call: Call) -> Value:
    value = call.tensor("self")
    dim = call["dim"] % len(value.shape)
    return affine(value, call.shape, _selecting(value.shape, dim, call["index"]))


def _selecting(shape: Sequence[int], dim: int, index: int) -> list[tuple[int | None, int, int]]:
    terms: list[tuple[int | None, int, int]] = []
    for d in range(len(shape)):
        terms.append((None, 0, _from_start(index, shape[d])) if d == dim else (d - (d > dim), 1, 0))
    return terms


def _from_start(index: int, extent: int) -> int:
    """A position counted from the start of a dimension; eager has checked its range."""
    return index + extent if index < 0 else index


@recipe("slice.Tensor")
def sliced(call: Call) -> Value:
    value = call.tensor("self")
    dim = call["dim"] % len(value.shape)
    start, _, step = _stretch(call, value.shape[dim])
    return affine(value, call.shape, [(d, step, start) if d == dim else (d, 1, 0) for d in range(len(value.shape))])


def _stretch(call: Call, extent: int) -> tuple[int, int, int]:
    """Start, end and step of a slice, as from ``slice.indices``, which would make plain numbers of extents."""
    start, end = call["start"], call["end"]
    start = 0 if start is None else start + extent if start < 0 else start
    end = extent if end is None else end + extent if end < 0 else end
    start = 0 if start < 0 else extent if start > extent else start
    end = 0 if end < 0 else extent if end > extent else end
    return start, end, call["step"]


@recipe("flip")
def flipped(call: Call) -> Value:
    value = call.tensor("self")
    dims = {d % len(value.shape) for d in call["dims"]} if value.shape else set()
    extents = value.shape
    return affine(value, call.shape, [(d, -1, extents[d] - 1) if d in dims else (d, 1, 0) for d in range(len(extents))])


@recipe("roll")
def rolled(call: Call) -> Value:
    """Each rolled dimension as a concatenation of its end and its beginning."""
    value = call.tensor("self")
    if not call["dims"]:
        raise Unsupported("roll shifts the flattened tensor")
    for shift, dim in zip(call["shifts"], call["dims"], strict=True):
        dim %= len(value.shape)
        extent = value.shape[dim]
        cut = -shift % extent
        pieces = [_part(value, dim, cut, extent), _part(value, dim, 0, cut)]
        value = concat(pieces, dim, value.shape, value.dtype)
    return value


@recipe("diagonal")
def diagonal(call: Call) -> Value:
    value = call.tensor("self")
    rank = len(value.shape)
    first, second, shift = call["dim1"] % rank, call["dim2"] % rank, call["offset"]
    kept = iter(range(rank - 2))
    terms: list[tuple[int | None, int, int]] = []
    for d in range(rank):
        if d == first:
            terms.append((rank - 2, 1, max(-shift, 0)))
        elif d == second:
            terms.append((rank - 2, 1, max(shift, 0)))
        else:
            terms.append((next(kept), 1, 0))
    return affine(value, call.shape, terms)


@recipe("pixel_shuffle")
def pixel_shuffled(call: Call) -> Value:
    """Rearrange channels ``C * f * f`` to blocks of ``f`` by ``f`` pixels."""
    value, factor = call.tensor("self"), call["upscale_factor"]
    *batch, channels, rows, columns = value.shape
    apart = view(value, (*batch, channels // factor**2, factor, factor, rows, columns))
    at = len(batch)
    return view(permute(apart, (*range(at + 1), at + 3, at + 1, at + 4, at + 2)), call.shape)


@recipe("pixel_unshuffle")
def pixel_unshuffled(call: Call) -> Value:
    """Rearrange blocks of ``f`` by ``f`` pixels to channels ``C * f * f``."""
    value, factor = call.tensor("self"), call["downscale_factor"]
    *batch, channels, rows, columns = value.shape
    apart = view(value, (*batch, channels, rows // factor, factor, columns // factor, factor))
    at = len(batch)
    return view(permute(apart, (*range(at + 1), at + 2, at + 4, at + 1, at + 3)), call.shape)


@recipe("repeat")
def repeated(call: Call) -> Value:
    """A broadcast over new dimensions, then a reshape."""
    value, repeats = call.tensor("self"), call["repeats"]
    own = (1,) * (len(repeats) - len(value.shape)) + value.shape
    spread = tuple(extent for pair in zip(repeats, own, strict=True) for extent in pair)
    split = tuple(extent for size in own for extent in (1, size))
    return view(expand(view(value, split), spread), call.shape)


@recipe("cat", "assemble")
def cat(call: Call) -> Value:
    tensors = call["tensors"] if "tensors" in call.arguments else call["pieces"]
    pieces = [convert(t, call.dtype) for t in tensors if t.shape != (0,)]
    return concat(pieces, call["dim"] % len(call.shape), call.shape, call.dtype)


@recipe("stack")
def stack(call: Call) -> Value:
    dim = call["dim"] % len(call.shape)
    pieces = [_with_dimension(convert(t, call.dtype), dim) for t in call["tensors"]]
    return concat(pieces, dim, call.shape, call.dtype)


@recipe("select_scatter", "select_backward")
def written_at(call: Call) -> Value:
    """One position of a dimension replaced; for a gradient, in zeros."""
    whole, piece = _write(call)
    dim = call["dim"] % len(call.shape)
    index = _from_start(call["index"], call.shape[dim])
    return _overlay(whole, _with_dimension(piece, dim), dim, index, index + 1)


@recipe("slice_scatter", "slice_backward")
def written_stretch(call: Call) -> Value:
    """A slice of a dimension replaced; for a gradient, in zeros."""
    dim = call["dim"] % len(call.shape)
    start, end, step = _stretch(call, call.shape[dim])
    return _overlay(*_write(call), dim, start, max(end, start), step)


def _write(call: Call) -> tuple[Value, Value]:
    """The tensor that is written to (zeros for a gradient), and the values written."""
    if "grad_output" in call.arguments:
        return Constant(call.shape, call.dtype, 0), convert(call.tensor("grad_output"), call.dtype)
    return call.tensor("self"), convert(call.tensor("src"), call.dtype)


@recipe("glu")
def gated(call: Call) -> Value:
    """The first half of a dimension times the sigmoid of the second."""
    value = call.tensor("self")
    dim = call["dim"] % len(value.shape)
    half = call.shape[dim]
    first, gate = _part(value, dim, 0, half), _part(value, dim, half, 2 * half)
    return call.map(lambda x, gate: x * fn.sigmoid(gate), first, gate)


def _with_dimension(value: Value, dim: int) -> Value:
    return view(value, (*value.shape[:dim], 1, *value.shape[dim:]))


def _overlay(value: Value, piece: Value, dim: int, start: int, end: int, step: int = 1) -> Value:
    """``value`` with ``[start:end:step]`` of ``dim`` replaced by ``piece``."""
    if is_one(piece.shape[dim]):
        end = start + 1
    elif step != 1:
        return _interleaved(value, piece, dim, start, step)
    pieces = [_part(value, dim, 0, start), piece, _part(value, dim, end, value.shape[dim])]
    return concat(pieces, dim, value.shape, value.dtype)


def _interleaved(value: Value, piece: Value, dim: int, start: int, step: int) -> Value:
    """Every ``step``-th position of ``dim`` from ``start`` on replaced: column ``start`` of rows of ``step`` positions.

    0 1 2 3 4 5   [1::2] = a b c   ->   0 a   ->   0 a 2 b 4 c
                                        2 b
                                        4 c
    """
    count, extent = piece.shape[dim], value.shape[dim]
    if start >= step or count * step != extent:
        return _interleaved_within(value, piece, dim, start, step)
    rows = view(value, (*value.shape[:dim], count, step, *value.shape[dim + 1 :]))
    return view(_overlay(rows, _with_dimension(piece, dim + 1), dim + 1, start, start + 1), value.shape)


def _interleaved_within(value: Value, piece: Value, dim: int, start: int, step: int) -> Value:
    """``_interleaved`` where rows of ``step`` positions do not fill ``dim``: parts before and after them are copied."""
    count, extent = piece.shape[dim], value.shape[dim]
    if not isinstance(count, int) or not isinstance(extent, int):
        raise Unsupported("the write has a step, and its sizes vary")
    rows = min(count, (extent - start) // step)
    end = start + rows * step
    parts = [_part(value, dim, 0, start)]
    if rows:
        parts.append(_interleaved(_part(value, dim, start, end), _part(piece, dim, 0, rows), dim, 0, step))
    parts += [_part(piece, dim, rows, count), _part(value, dim, end + count - rows, extent)]
    return concat(parts, dim, value.shape, value.dtype)


def _part(value: Value, dim: int, start: int, end: int) -> Value:
    shape = (*value.shape[:dim], end - start, *value.shape[dim + 1 :])
    return affine(value, shape, [(d, 1, start if d == dim else 0) for d in range(len(shape))])


def concat(pieces: Sequence[Value], dim: int, shape: tuple[int, ...], dtype: torch.dtype) -> Value:
    filled = tuple(p for p in pieces if not always_equal(p.shape[dim], 0))
    if len(filled) == 1:
        return Map(shape, dtype, Parameter(register(dtype), 0), filled)
    return Concat(shape, dtype, filled, dim)


@recipe("constant_pad_nd")
def pad(call: Call) -> Value:
    """The tensor between borders; a negative width cuts elements off, as in the gradient of a padding."""
    value, widths = call.tensor("self"), call["pad"]
    rank = len(value.shape)
    before, after = [0] * rank, [0] * rank
    for position in range(len(widths) // 2):
        before[rank - 1 - position], after[rank - 1 - position] = widths[2 * position : 2 * position + 2]
    cuts = min(map(estimate, widths), default=0) < 0  # which of two right tests comes first; a width may be 0 elsewhere
    if not cuts and min(widths, default=0) >= 0:
        return Pad(call.shape, call.dtype, value, tuple(before), call["value"])
    if cuts and max(widths) <= 0:
        return affine(value, _left(value, before, after), [(d, 1, -width) for d, width in enumerate(before)])
    cut = [[min(width, 0) for width in side] for side in (before, after)]
    kept = affine(value, _left(value, *cut), [(d, 1, -width) for d, width in enumerate(cut[0])])
    return Pad(call.shape, call.dtype, kept, tuple(max(width, 0) for width in before), call["value"])


def _left(value: Value, before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """The shape that negative widths leave."""
    extents = tuple(extent + b + a for extent, b, a in zip(value.shape, before, after, strict=True))
    if min(extents) < 1:
        raise Unsupported("a negative padding leaves no element")
    return extents


@recipe("full", "full_like", "new_full", "fill.Scalar")
def full(call: Call) -> Value:
    number = call.arguments.get("fill_value", call.arguments.get("value"))
    return Constant(call.shape, call.dtype, number)


@recipe("fill.Tensor")
def filled(call: Call) -> Value:
    return expand(convert(call.tensor("value"), call.dtype), call.shape)


@recipe("zeros", "zeros_like", "new_zeros", "zero")
def zeros(call: Call) -> Value:
    return Constant(call.shape, call.dtype, 0)


@recipe("ones", "ones_like", "new_ones")
def ones(call: Call) -> Value:
    return Constant(call.shape, call.dtype, 1)


@recipe("scalar_tensor")
def scalar_tensor(call: Call) -> Value:
    return Constant(call.shape, call.dtype, call["s"])


@recipe("arange.default", "arange.start", "arange.start_step")
def arange(call: Call) -> Value:
    start, step = call.arguments.get("start", 0), call.arguments.get("step", 1)
    if call.dtype.is_floating_point and not (float(start).is_integer() and float(step).is_integer()):
        raise Unsupported("arange has a fractional step, and eager's vector code rounds in a way of its own")
    return Iota(call.shape, call.dtype, 0, start, step)


@recipe("tril", "triu")
def triangle(call: Call) -> Value:
    """``where(column - row <= diagonal, self, 0)`` and its mirror image."""
    value, rank = call.tensor("self"), len(call.shape)
    row = Iota(call.shape, torch.int64, rank - 2, 0, 1)
    column = Iota(call.shape, torch.int64, rank - 1, 0, 1)
    below = "tril" in call.op._schema.name

    def kept(column: Expression, row: Expression, diagonal: Expression) -> Operation:
        return column - row <= diagonal if below else column - row >= diagonal

    inside = apply_test(kept, [column, row, call["diagonal"]], torch.int64, call.shape)
    return choice(inside, value, Constant(call.shape, call.dtype, 0))


@recipe("diag_embed")
def diagonal_matrix(call: Call) -> Value:
    """``where(column == row, self[row], 0)``."""
    if call["offset"]:
        raise Unsupported("the diagonal is not the main one")
    return _on_diagonal(call, call.tensor("self"), Constant(call.shape, call.dtype, 0))


@recipe("diagonal_scatter", "diagonal_backward")
def written_diagonal(call: Call) -> Value:
    """A diagonal replaced; for a gradient, in zeros."""
    whole, piece = _write(call)
    return _on_diagonal(call, piece, whole)


def _on_diagonal(call: Call, piece: Value, value: Value) -> Value:
    """``where(column - row == offset, piece, value)``; ``piece`` has the diagonal as its last dimension."""
    rank, offset = len(call.shape), call["offset"]
    first, second = call["dim1"] % rank, call["dim2"] % rank
    length = piece.shape[-1]
    if call.shape[first] == length and offset >= 0:
        counted = first
    elif call.shape[second] == length and offset <= 0:
        counted = second
    else:
        raise Unsupported("the diagonal neither begins in the first row nor ends in the last column")
    row, column = (Iota(call.shape, torch.int64, d, 0, 1) for d in (first, second))
    on_it = apply_test(lambda c, r, offset: fn.equal(c - r, offset), [column, row, offset], torch.int64, call.shape)
    kept = [(d, 1, 0) for d in range(rank) if d not in (first, second)]
    spread = affine(convert(piece, call.dtype), call.shape, [*kept, (counted, 1, 0)])
    return choice(on_it, spread, convert(value, call.dtype))
