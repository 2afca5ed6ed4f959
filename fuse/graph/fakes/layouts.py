"""Strides that eager gives to results, for operators whose fake results may have others.

    logical_or(f32[2, 3] strides (1, 2), f32[2, 3] strides (3, 1))   ->   strides (1, 2): the first operand decides

Elementwise operators of ATen share one iterator, which orders the dimensions of its result by the operands' strides.
For many of them FakeTensorMode uses a Python formula of several operators, which orders dimensions differently if
operands disagree, are broadcast or are converted. The caller must see eager's strides. So this file follows the
iterator's rule (``reorder_dimensions`` of ATen's TensorIterator.cpp), and lists the operators with other rules.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from fuse import ops
from fuse.graph.strides import contiguous_strides, dense_strides, is_dense

aten = torch.ops.aten

_BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
                "_native_batch_norm_legit_functional")  # fmt: skip
_CONTIGUOUS = frozenset(
    {aten.log_sigmoid_forward.default, aten.pow.Scalar, aten.masked_fill.Scalar, aten.masked_fill.Tensor}
)
_ROWS = frozenset(
    {
        aten.native_layer_norm.default, aten._transformer_encoder_layer_fwd.default, aten.nll_loss2d_forward.default,
        aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor, aten.mvlgamma.default,
    }
)  # fmt: skip
_SECOND_FIRST = frozenset(
    {aten.rsub.Tensor, aten.threshold_backward.default}
)  # ATen passes the second operand to its iterator first
_JOINS = frozenset({aten.cat.default, aten.stack.default})
_OF_IMAGES = frozenset(
    {
        aten.channel_shuffle.default, aten.max_unpool2d.default, aten.reflection_pad2d.default,
        aten.replication_pad2d.default,
    }
)  # fmt: skip
_LOOKUPS = frozenset({aten.index.Tensor, aten._unsafe_index.Tensor})


def eager_strides(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor
) -> tuple[int, ...] | None:
    """The strides in eager mode of ``result``, a new tensor made by ``op``; None if the fake result has them.

    >>> x, y = torch.empty(3, 2).t(), torch.empty(2, 3)
    >>> eager_strides(aten.logical_or.default, (x, y), {}, torch.empty(2, 3))
    (1, 2)
    """
    name = op._schema.name.removeprefix("aten::")
    if name in _BATCH_NORMS:
        return _batch_norm(args[0]) if result.shape == args[0].shape else None
    if name == "native_batch_norm_backward":
        return _batch_norm_backward(args[0], args[1]) if result.shape == args[1].shape else None
    if op is aten.native_group_norm.default:
        return _of_format(result.shape, suggest_memory_format(args[0])) if result.shape == args[0].shape else None
    if op in _ROWS:
        return contiguous_strides(result.shape)
    if name.startswith(("upsample_", "_upsample_")) and result.dim() > 3 and "backward" not in name:
        return _of_format(result.shape, suggest_memory_format(args[0]))
    if op in _OF_IMAGES:
        return _of_format(result.shape, suggest_memory_format(args[0]))
    if op is aten.binary_cross_entropy.default:
        return iterator_strides(args[:1], result.shape, False) if result.dim() else None
    if op is aten.roll.default:
        return _rolled(args[0], *args[1:])
    if op in _JOINS:
        return _joined(op, result, *args)
    if op in _LOOKUPS:
        return _looked_up(args[0], args[1], result.shape)
    if not ops.is_pointwise(op):
        return None
    if op in _CONTIGUOUS or (op is aten.angle.default and args[0].is_complex()):
        return contiguous_strides(result.shape)
    named = [kwargs[a.name] for a in op._schema.arguments if a.name in kwargs]
    operands = [value for value in (*args, *named) if isinstance(value, (Tensor, bool, int, float, complex))]
    tensors = [value for value in operands if isinstance(value, Tensor)]
    if not tensors or any(tensor.layout is not torch.strided for tensor in tensors):
        return None
    if op in _SECOND_FIRST:
        tensors.reverse()
    if op is aten.ldexp.Tensor:  # a product with a power, which is contiguous
        with torch._C._DisableTorchDispatch():
            tensors[1] = torch.empty(tensors[1].shape, dtype=tensors[1].dtype, device="meta")
    common = _common_dtype(operands) if result.dtype == torch.bool else result.dtype
    is_read_as_it_is = tensors[0] if op is aten.where.self else None
    converted = [tensor if tensor is is_read_as_it_is else _converted(tensor, common) for tensor in tensors]
    try:
        return iterator_strides(converted, result.shape, _has_number(op, args))
    except ValueError:  # the shapes do not broadcast to the result's: the iterator was not used
        return None


def _common_dtype(operands: Sequence[Any]) -> torch.dtype:
    """The dtype to which the operands are promoted."""
    if len(operands) == 2:
        return torch.result_type(*operands)
    return functools.reduce(torch.promote_types, (value.dtype for value in operands if isinstance(value, Tensor)))


def _converted(operand: Tensor, common: torch.dtype) -> Tensor:
    """An operand in the common dtype; converting copies it, without gaps."""
    if operand.dtype == common or operand.dim() == 0 or is_dense(operand):
        return operand
    strides = dense_strides(operand.shape, _order(operand.shape, [operand.stride()]))
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(operand.shape, strides, device="meta")


def _has_number(op: OpOverload, args: Sequence[Any]) -> bool:
    """Whether an operand is a number, which the iterator treats as a tensor without dimensions."""
    named = zip(op._schema.arguments, args, strict=False)
    return any(argument.name == "other" and not isinstance(value, Tensor) for argument, value in named)


def iterator_strides(operands: Sequence[Tensor], shape: Sequence[int], has_number: bool) -> tuple[int, ...]:
    """The result strides of ATen's iterator for operands broadcast to ``shape``, and perhaps a number."""
    if not has_number and all(tuple(operand.shape) == tuple(shape) for operand in operands):
        if all(operand.is_contiguous() for operand in operands):
            return contiguous_strides(shape)
        if len(shape) == 4 and all(o.is_contiguous(memory_format=torch.channels_last) for o in operands):
            return dense_strides(shape, (1, 3, 2, 0))
        if len({o.stride() for o in operands}) == 1 and is_dense(operands[0]):
            return operands[0].stride()
    return dense_strides(shape, _order(shape, [_broadcast(operand, shape) for operand in operands if operand.dim()]))


def _broadcast(operand: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    missing = len(shape) - operand.dim()
    if missing < 0:
        raise ValueError
    own = zip(operand.shape, operand.stride(), shape[missing:], strict=True)
    return (0,) * missing + tuple(0 if size == 1 != whole else stride for size, stride, whole in own)


def _order(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[int]:
    """The dimensions from the innermost to the outermost; an insertion sort, because comparisons may be undecided."""
    order = list(range(len(shape)))[::-1]
    for i in range(1, len(order)):
        moving = i
        for at in range(i - 1, -1, -1):
            verdict = _compare(order[at], order[moving], shape, strides)
            if verdict > 0:
                order[at], order[moving] = order[moving], order[at]
                moving = at
            elif verdict < 0:
                break
    return order


def _compare(inner: int, outer: int, shape: Sequence[int], strides: Sequence[Sequence[int]]) -> int:
    """Positive if dimension ``outer`` should be inside ``inner``, negative if not, 0 if undecided."""
    for own in strides:
        if own[inner] and own[outer]:
            if own[inner] != own[outer]:
                return 1 if own[inner] > own[outer] else -1
            if shape[inner] > shape[outer]:
                return 1
    return 0


def _batch_norm(values: Tensor) -> tuple[int, ...]:
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(values.dim())
    if channels_last and not values.is_contiguous() and values.is_contiguous(memory_format=channels_last):
        memory_format = channels_last
    else:
        memory_format = suggest_memory_format(values)
    return _of_format(values.shape, memory_format)


def _batch_norm_backward(gradient: Tensor, values: Tensor) -> tuple[int, ...]:
    """The strides of the values if both tensors are dense and of one memory format; else those of that format."""
    formats = suggest_memory_format(gradient), suggest_memory_format(values)
    if formats[0] is formats[1] and _has_format(gradient) and _has_format(values):
        return contiguous_strides(values.shape) if values.is_contiguous() else _batch_norm(values)
    return _of_format(values.shape, formats[1])


def _has_format(tensor: Tensor) -> bool:
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim(), torch.contiguous_format)
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=channels_last)


def _of_format(shape: Sequence[int], memory_format: torch.memory_format) -> tuple[int, ...]:
    with torch._C._DisableTorchDispatch():
        return torch.empty(shape, device="meta", memory_format=memory_format).stride()


def _joined(op: OpOverload, result: Tensor, tensors: Sequence[Tensor], *where: int) -> tuple[int, ...]:
    """The strides of a concatenation: ATen's code for meta tensors considers the memory formats of all operands."""
    if result.dim() < 4:  # only the contiguous memory format
        return contiguous_strides(result.shape)
    with torch._C._DisableTorchDispatch():
        stand_ins = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
        strides: tuple[int, ...] = op(stand_ins, *where).stride()
        return strides


def _rolled(values: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> tuple[int, ...] | None:
    """The strides of ``roll``, which concatenates two swapped parts along each dimension."""
    if values.numel() == 0:
        return None
    with torch._C._DisableTorchDispatch():
        whole = torch.empty_strided(values.shape, values.stride(), device="meta")
        for shift, dim in zip(shifts, dims, strict=bool(dims)):
            size = whole.shape[dim]
            start = (size - shift % size) % size
            whole = torch.cat([whole.narrow(dim, start, size - start), whole.narrow(dim, 0, start)], dim)
        return whole.stride() if dims else whole.contiguous().stride()


def _looked_up(values: Tensor, indices: Sequence[Tensor | None], shape: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of ``index``: those of the iterator over table and indices, where the table has stride 0 along the
    dimensions of the indices.

    ``make_info`` of ATen's TensorAdvancedIndexing.cpp: indices that are not neighbours come first.
    """
    at = [d for d, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if 0 in shape or any(index.dtype not in (torch.int64, torch.int32) for index in given):
        return None
    if not all(index.dim() for index in given):  # fake tensors have another shape, too, so the call runs eager
        return None
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    rest = [
        (size, stride)
        for d, (size, stride) in enumerate(zip(values.shape, values.stride(), strict=True))
        if d not in at
    ]
    looked_up = torch.broadcast_shapes(*(index.shape for index in given))
    strides = [stride for _, stride in rest[:first]] + [0] * len(looked_up) + [stride for _, stride in rest[first:]]
    after = len(rest) - first
    with torch._C._DisableTorchDispatch():
        table = torch.empty(0, dtype=values.dtype, device="meta").as_strided(shape, strides)
        places = []
        for index in given:
            alone = torch.empty_strided(index.shape, index.stride(), dtype=index.dtype, device="meta").expand(looked_up)
            places.append(alone.long().reshape((1,) * first + tuple(looked_up) + (1,) * after))
    return iterator_strides([table, *places], shape, has_number=False)


def strides_of_view(values: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of ``values.view(shape)`` in eager mode; fake tensors have others for dimensions of one element.

    >>> strides_of_view(torch.empty(128, 1, 1, 128).permute(2, 0, 3, 1), (1, 128, 128))
    (16384, 128, 1)
    """
    with torch._C._DisableTorchDispatch():
        stand_in = torch.empty_strided(values.shape, values.stride(), dtype=torch.bool, device="meta")
        return stand_in.view(shape).stride()
