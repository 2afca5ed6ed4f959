"""Result layouts of the commonest operators on fake tensors, without torch's fake mode.

    mm(f32[4, 8], f32[8, 16])         ->   f32[4, 16]
    add(f32[4, 16], f32[16])          ->   f32[4, 16]
    slice(f32[4, 16], 1, 0, 8)        ->   a view, computed by torch on a tensor without data

The first operator under a ``FakeTensorMode`` imports sympy for symbolic sizes, which takes a third of a second; no
tensor here has symbolic sizes. Most models need a dozen operators, with simple results in the common case:
floating-point operands of one dtype on the CPU. torch computes everything else, and raises all errors, so that users
see the messages that they know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fuse.devices import HOST
from fuse.graph.fakes.layouts import iterator_strides
from fuse.graph.strides import broadcast, contiguous_strides, is_dense

aten = torch.ops.aten


def known(mode: FakeTensorMode, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``op(*args, **kwargs)`` under ``mode``; ``NotImplemented`` if torch must compute it.

    >>> with FakeTensorMode() as mode:
    ...     a, b = torch.empty(4, 8), torch.empty(8, 16)
    >>> known(mode, aten.mm.default, (a, b), {})
    FakeTensor(..., size=(4, 16))
    >>> known(mode, aten.mm.default, (b, b), {})
    NotImplemented
    """
    rule = _RULES.get(op)
    return NotImplemented if rule is None else rule(mode, op, args, kwargs)


def _plain(mode: FakeTensorMode, tensor: Any) -> bool:
    """Whether ``tensor`` is a fake tensor of ``mode`` on the CPU without special properties."""
    return (
        type(tensor) is FakeTensor
        and tensor.fake_mode is mode
        and tensor.fake_device == HOST
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
        and all(type(extent) is int for extent in tensor.shape)
    )


def _dense(mode: FakeTensorMode, tensor: Any) -> bool:
    return _plain(mode, tensor) and tensor.is_contiguous() and tensor.dtype.is_floating_point


def _made(
    mode: FakeTensorMode, size: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None
) -> Tensor:
    strides = contiguous_strides(size) if strides is None else strides
    with torch._C._DisableTorchDispatch():
        return FakeTensor(mode, torch.empty_strided(size, strides, dtype=dtype, device="meta"), HOST)


def _is_ordinary(options: Mapping[str, Any]) -> bool:
    """Whether the options of a new tensor ask for an ordinary tensor of the CPU."""
    device, layout = options.get("device"), options.get("layout")
    on_host = device is None or torch.device(device) == HOST
    return on_host and layout in (None, torch.strided) and not options.get("pin_memory")


def _factory(mode: FakeTensorMode, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A new tensor, made by torch on the meta device."""
    if not _is_ordinary(kwargs) or torch.get_default_device() != HOST:
        return NotImplemented
    if op is aten.full.default and kwargs.get("dtype") is not None:  # else the value decides
        args = args[:1]
    if not _whole_numbers(args):
        return NotImplemented
    if op in (aten.empty.memory_format, aten.empty_strided.default):
        allocate, kwargs = op, dict(kwargs)
    else:  # only the values differ
        allocate, kwargs = aten.empty.memory_format, {"dtype": kwargs.get("dtype")}
    try:
        with torch._C._DisableTorchDispatch():
            return FakeTensor(mode, allocate(*args, **{**kwargs, "device": "meta"}), HOST)
    except (RuntimeError, TypeError):
        return NotImplemented


def _view(mode: FakeTensorMode, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A view of the first argument, or a list of them."""
    if not _plain(mode, args[0]) or not _whole_numbers(args[1:]) or not _whole_numbers(tuple(kwargs.values())):
        return NotImplemented
    values = args[0]
    with torch._C._DisableTorchDispatch():
        plain = torch.empty(0, dtype=values.dtype, device="meta")
        plain.set_(values.untyped_storage(), values.storage_offset(), values.shape, values.stride())
        try:
            result = op(plain, *args[1:], **kwargs)
        except (
            RuntimeError,
            TypeError,
        ):  # an IndexError passes through: torch 2.11 raises none for select of fake tensors
            return NotImplemented
        if isinstance(result, (tuple, list)):
            return type(result)([FakeTensor(mode, part, HOST) for part in result])
        return FakeTensor(mode, result, HOST)


def _elementwise(mode: FakeTensorMode, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Tensors of one floating-point dtype and numbers, laid out by ATen's iterator."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if kwargs or not tensors or not all(_plain(mode, tensor) and tensor.dim() for tensor in tensors):
        return NotImplemented
    if not all(isinstance(arg, Tensor) or type(arg) in (int, float) for arg in args):
        return NotImplemented
    dtype = tensors[0].dtype
    if not dtype.is_floating_point or any(tensor.dtype is not dtype for tensor in tensors):
        return NotImplemented
    size = broadcast([tensor.shape for tensor in tensors])
    if size is None or 0 in size:
        return NotImplemented
    return _made(mode, size, dtype, iterator_strides(tensors, size, len(tensors) < len(args)))


def _in_place(mode: FakeTensorMode, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The first argument, if it can hold the result."""
    result = _elementwise(mode, op, args, kwargs)
    fits = result is not NotImplemented and isinstance(args[0], Tensor) and result.shape == args[0].shape
    return args[0] if fits else NotImplemented


def _product(mode: FakeTensorMode, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``mm(a, b)``, ``addmm(bias, a, b)`` and ``bmm(a, b)``."""
    if kwargs or not all(_plain(mode, arg) for arg in args):
        return NotImplemented
    left, right = args[-2:]
    rank = 3 if op is aten.bmm.default else 2
    if left.dim() != rank or right.dim() != rank or left.shape[-1] != right.shape[-2]:
        return NotImplemented
    if left.shape[:-2] != right.shape[:-2]:
        return NotImplemented
    size = (*left.shape[:-1], right.shape[-1])
    dtypes = {arg.dtype for arg in args}
    if len(dtypes) > 1 or not left.dtype.is_floating_point:
        return NotImplemented
    if len(args) == 3 and broadcast([args[0].shape, size]) != size:
        return NotImplemented
    return _made(mode, size, left.dtype)


def _stack(mode: FakeTensorMode, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A stack of dense tensors of one shape along a new dimension."""
    tensors, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if not tensors or not all(_dense(mode, tensor) for tensor in tensors):
        return NotImplemented
    if len({(tensor.dtype, tuple(tensor.shape)) for tensor in tensors}) > 1:
        return NotImplemented
    rank = tensors[0].dim() + 1
    if type(dim) is not int or not -rank <= dim < rank:
        return NotImplemented
    size = list(tensors[0].shape)
    size.insert(dim % rank, len(tensors))
    return _made(mode, size, tensors[0].dtype)


def _cat(mode: FakeTensorMode, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Tensors of up to three dimensions, which have no channels last, one after another."""
    tensors, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if not tensors or not all(_plain(mode, tensor) for tensor in tensors) or type(dim) is not int:
        return NotImplemented
    rank = tensors[0].dim()
    if not 1 <= rank <= 3 or not -rank <= dim < rank or len({tensor.dtype for tensor in tensors}) > 1:
        return NotImplemented
    along = dim % rank
    if len({(*tensor.shape[:along], 0, *tensor.shape[along + 1 :]) for tensor in tensors}) > 1:
        return NotImplemented
    size = list(tensors[0].shape)
    size[along] = sum(tensor.shape[along] for tensor in tensors)
    return _made(mode, size, tensors[0].dtype)


def _grouped_product(mode: FakeTensorMode, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Products of groups of rows, for every dtype that eager multiplies.

    Each group of the rows [rows, k] is multiplied by its matrix [k, n]; or, for the gradients of the matrices, each
    group of columns by its group of rows.
    """
    if kwargs or len(args) != 3 or not all(_plain(mode, arg) for arg in args):
        return NotImplemented
    one, other, ends = args
    of_rows, of_matrices = (one.dim(), other.dim()) == (2, 3), (one.dim(), other.dim()) == (2, 2)
    if not (of_rows or of_matrices) or one.shape[1] != other.shape[-2] or one.dtype is not other.dtype:
        return NotImplemented
    if ends.dim() != 1 or other.shape[-1] * one.itemsize % 16:  # eager pads the rows of the result
        return NotImplemented
    size = (one.shape[0], other.shape[-1])
    return _made(mode, size if of_rows else (ends.shape[0], *size), one.dtype)


def _same(mode: FakeTensorMode, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A dense tensor like the first argument: ``clone(x)``, ``_softmax(x, dim, half_to_float)``."""
    x, *rest = args
    if kwargs or not _dense(mode, x) or not x.numel():
        return NotImplemented
    if rest and (len(rest) != 2 or type(rest[0]) is not int or rest[1] is not False or not _is_dim(rest[0], x)):
        return NotImplemented
    return _made(mode, x.shape, x.dtype, None if rest else x.stride())


def _like(mode: FakeTensorMode, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A tensor with the size and layout of a clone of the first argument: ``zeros_like(x)``, ``full_like(x, 0)``; and
    ``zero(x)``, which torch 2.11 makes contiguous."""
    x, kept = args[0], (None, torch.preserve_format)
    if not _plain(mode, x) or not x.numel() or not _is_ordinary(kwargs) or kwargs.get("memory_format") not in kept:
        return NotImplemented
    dtype = kwargs.get("dtype") or x.dtype
    dense = is_dense(x)  # torch on a meta device does not count one element with odd strides as dense
    return _made(mode, x.shape, dtype, x.stride() if dense else iterator_strides([x], x.shape, False))


def _new(mode: FakeTensorMode, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A contiguous tensor of another size, with the dtype of the first argument: ``x.new_zeros(size)``."""
    x, size = args[:2]
    if not _plain(mode, x) or not _is_ordinary(kwargs) or not all(type(n) is int and n >= 0 for n in size):
        return NotImplemented
    return _made(mode, size, kwargs.get("dtype") or x.dtype)


def _layer_norm(mode: FakeTensorMode, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``native_layer_norm(x, shape, weight, bias, eps)``: result, means, reciprocal standard deviations."""
    x, shape, *parameters = args[:4]
    if kwargs or not _dense(mode, x) or x.dtype not in (torch.float32, torch.float64) or not x.numel():
        return NotImplemented
    over = len(shape)
    if not 1 <= over <= x.dim() or tuple(shape) != tuple(x.shape[x.dim() - over :]):
        return NotImplemented
    for one in parameters:
        if one is not None and not (_dense(mode, one) and one.dtype is x.dtype and tuple(one.shape) == tuple(shape)):
            return NotImplemented
    reduced = (*x.shape[: x.dim() - over], *(1,) * over)
    return _made(mode, x.shape, x.dtype), _made(mode, reduced, x.dtype), _made(mode, reduced, x.dtype)


def _is_dim(dim: int, tensor: Tensor) -> bool:
    return -tensor.dim() <= dim < tensor.dim()


def _drawn(mode: FakeTensorMode, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The first argument, which the operator fills with numbers."""
    numbers = (*args[1:], *(value for name, value in kwargs.items() if name != "generator"))
    fits = _dense(mode, args[0]) and all(type(value) in (int, float) for value in numbers)
    return args[0] if fits else NotImplemented


def _whole_numbers(values: Sequence[Any]) -> bool:
    """Whether all values are plain numbers, booleans, dtypes, or lists of these."""
    return all(
        _whole_numbers(value) if isinstance(value, (tuple, list)) else type(value) in (int, bool, type(None))
        for value in values
    )


_Rule = Callable[[FakeTensorMode, OpOverload, tuple[Any, ...], Mapping[str, Any]], Any]
_RULES: dict[OpOverload, _Rule] = {
    getattr(getattr(aten, name.partition(".")[0]), name.partition(".")[2] or "default"): rule
    for rule, names in (
        (_factory, "empty.memory_format empty_strided full ones rand randn zeros"),
        (
            _view,
            """
            alias as_strided detach expand permute select.int slice.Tensor split.Tensor split_with_sizes squeeze.dim t
            transpose.int unbind.int unsqueeze view
        """,
        ),
        (
            _elementwise,
            """
            abs add.Tensor div.Tensor exp gelu log maximum minimum mul.Tensor neg reciprocal relu rsqrt rsub.Scalar
            sigmoid silu sqrt sub.Tensor tanh
        """,
        ),
        (_in_place, "add_.Tensor mul_.Tensor relu_"),
        (_product, "addmm bmm mm"),
        (_grouped_product, "_grouped_mm"),
        (_same, "_log_softmax _softmax clone"),
        (_like, "empty_like full_like ones_like rand_like randn_like zero zeros_like"),
        (_new, "new_empty new_full new_ones new_zeros"),
        (_layer_norm, "native_layer_norm"),
        (_stack, "stack"),
        (_cat, "cat"),
        (_drawn, "fill_.Scalar normal_ uniform_ zero_"),
    )
    for name in names.split()
}
