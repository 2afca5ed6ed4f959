"""Arithmetic and memory traffic of one operator call, from shapes alone.

    addmm(bias[8], a[4, 16], b[16, 8])  ->  Work(flops=2*4*16*8, bytes=4*(8 + 64 + 128 + 32))

The arithmetic of products, convolutions and attention is counted by the formulas of ``torch.utils.flop_counter``, that
of other operators by the rule that the operator table names. Bytes are those of a perfect kernel: each argument is read
once and each result written once; a dimension expanded from one element counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fuse import ops


@dataclass(frozen=True)
class Work:
    """Floating-point operations and bytes moved; ``dtype`` is the dtype of the arithmetic."""

    flops: int
    bytes: int
    dtype: torch.dtype


def work_of_call(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Work:
    """Cost of ``result = op(*args, **kwargs)``; tensors may be real, fake or meta.

    >>> a, b = torch.ones(4, 16), torch.ones(16, 8)
    >>> work_of_call(torch.ops.aten.mm.default, (a, b), {}, a @ b)
    Work(flops=1024, bytes=896, dtype=torch.float32)
    """
    results = list(tensors_in(result))
    arguments = list(tensors_in((args, kwargs)))
    facts = ops.info(op)
    dtype = results[0].dtype if results else arguments[0].dtype if arguments else torch.float32
    if facts is not None and facts.launches == 0:
        return Work(0, 0, dtype)
    return Work(
        flops=_flops(op, facts, args, kwargs, arguments, results, result) if facts else 0,
        bytes=_bytes_read(op, facts, arguments, results) + sum(map(bytes_of, results)),
        dtype=dtype,
    )


def work_of_node(node: Node) -> Work:
    """Cost of an operator of a graph."""
    assert isinstance(node.target, OpOverload)
    args, kwargs = map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    return work_of_call(node.target, args, kwargs, node.meta["val"])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts, in order.

    >>> [t.numel() for t in tensors_in((torch.ones(1), [torch.ones(2), 3], {"x": torch.ones(4)}))]
    [1, 2, 4]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


def bytes_of(tensor: Tensor) -> int:
    """Bytes of the distinct elements of a tensor: a dimension expanded from one element counts once.

    A tensor without strides (sparse, oneDNN's own format) counts as if it were dense.

    >>> bytes_of(torch.ones(8).expand(100, 8))
    32
    """
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    count: int = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride != 0 or size == 0:
            count *= int(size)
    return count


def _bytes_read(
    op: OpOverload, facts: ops.OpInfo | None, arguments: Sequence[Tensor], results: Sequence[Tensor]
) -> int:
    distinct = {id(tensor): tensor for tensor in arguments}
    if facts is not None and facts.kind in ("movement", "random"):
        # A copy or a random draw overwrites the old values without reading them.
        for written in results if ops.mutates(op) else ():
            distinct.pop(id(written), None)
    read = sum(map(bytes_of, distinct.values()))
    if facts is not None and facts.gathers:
        source, gathered = bytes_of(arguments[0]), sum(map(bytes_of, results))
        read -= max(0, source - gathered)
    return read


def _flops(
    op: OpOverload,
    facts: ops.OpInfo,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    arguments: Sequence[Tensor],
    results: Sequence[Tensor],
    result: Any,
) -> int:
    if facts.flops == "output":
        return facts.weight * max((tensor.numel() for tensor in results), default=0)
    if facts.flops == "input":
        return facts.weight * max((tensor.numel() for tensor in arguments), default=0)
    if facts.flops == "recurrence":
        return _recurrence_flops(op, args)
    if facts.flops == "contraction":
        formula = flop_registry.get(op.overloadpacket)
        if formula is not None:
            return int(formula(*args, **kwargs, out_val=result))
        return _contraction_flops(op, facts, arguments, results)
    return 0


def _contraction_flops(
    op: OpOverload, facts: ops.OpInfo, arguments: Sequence[Tensor], results: Sequence[Tensor]
) -> int:
    """The flops of products for which PyTorch's counter has no formula."""
    name = op._schema.name.partition("::")[2]
    shapes = [list(tensor.shape) for tensor in arguments]
    if facts.kind == "convolution":
        return int(conv_flop_count(shapes[0], shapes[1], list(results[0].shape), transposed="transpose" in name))
    if "scaled_dot_product" in name:
        formula: Callable[..., int] = sdpa_backward_flop_count if name.endswith("backward") else sdpa_flop_count
        shapes = shapes[: 4 if name.endswith("backward") else 3]
        heads = max(shape[1] for shape in shapes)  # one head of the keys may serve several heads of the queries
        return int(formula(*([shape[0], heads, *shape[2:]] for shape in shapes)))
    # Each index of a product occurs in two of left, right and result: the product of their three sizes is the square
    # of the number of multiply-adds. Operators called add... take the summand as their first argument.
    left, right = arguments[1:3] if name.startswith("add") else arguments[:2]
    return 2 * math.isqrt(left.numel() * right.numel() * results[0].numel())


def _recurrence_flops(op: OpOverload, args: Sequence[Any]) -> int:
    """Each weight matrix multiplies each row of the input once, and twice in the backward pass. Biases are vectors."""
    rows = args[0].numel() // max(1, args[0].shape[-1])
    given = zip(op._schema.arguments, args, strict=False)
    weights = [
        tensor for argument, value in given if argument.name.startswith("weight") for tensor in tensors_in(value)
    ]
    multiply_adds: int = rows * sum(tensor.numel() for tensor in weights if tensor.dim() == 2)
    return 2 * multiply_adds * (2 if "backward" in op._schema.name else 1)
