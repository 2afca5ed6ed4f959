"""The order of the copies at the end of a call, which write values back into inputs.

    x, y = y, x + 1        copy y -> x; copy (x + 1) -> y       x + 1 has memory of its own, so y may be read first
    x, y = y, x            set x aside; copy y -> x; copy aside -> y

A value may be an input, or a view of one, that another copy overwrites. A copy whose target no other copy reads comes
first. In a cycle, one value is first copied aside, which is one copy more. One kernel writes small values that are no
inputs together, such as the running statistics of all batch norms.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.devices import has_kernels
from fuse.graph.outputs import outputs_of
from fuse.graph.signature import Mutation, Signature


@dataclass(frozen=True)
class Write:
    """``value`` is copied into placeholder ``input_index``. ``aside``: it is first copied to other memory, before all
    writes."""

    input_index: int
    value_index: int
    value: Node
    aside: bool
    small: bool = False


LARGEST_TOGETHER = 64
"""The most values that one kernel writes."""

MAX_BYTES = 2**20
"""The most bytes of a small value: for larger ones, a launch takes little time beside the copy."""

_IN_KERNELS = frozenset(
    getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
)


def launched(planned: Sequence[Write]) -> list[tuple[Write, ...]]:
    """The writes grouped by launch, in order: first those of large values and of inputs, one by one.

    >>> class Count(torch.nn.Module):
    ...     def forward(self, x, y):
    ...         x.add_(1)
    ...         y.mul_(2)
    >>> from fuse.graph.capture import capture
    >>> [len(group) for group in launched(writes(capture(Count(), (torch.ones(2), torch.ones(3)))))]
    [2]
    """
    small = [write for write in planned if write.small]
    groups = [tuple(small[i : i + LARGEST_TOGETHER]) for i in range(0, len(small), LARGEST_TOGETHER)]
    return [*((write,) for write in planned if not write.small), *groups]


def writes(graph: GraphModule) -> list[Write]:
    """The copies at the end of a call of ``graph``, in order; an unchanged input is not copied.

    >>> from fuse.graph.capture import capture
    >>> class Shift(torch.nn.Module):
    ...     def forward(self, x, y):
    ...         x.copy_(y)
    ...         y.zero_()
    >>> [(w.input_index, w.aside) for w in writes(capture(Shift(), (torch.ones(2), torch.ones(2))))]
    [(0, False), (1, False)]
    """
    signature: Signature | None = graph.meta.get("signature")
    if signature is None or not signature.mutations:
        return []
    inputs = graph.graph.find_nodes(op="placeholder")
    values = outputs_of(graph.graph)
    number = {node: index for index, node in enumerate(inputs)}
    read = {m: number.get(_memory(values[m.value_index])) for m in signature.mutations}
    pending = [m for m in signature.mutations if not _is(values[m.value_index], inputs[m.input_index], read[m])]
    aside: set[Mutation] = set()
    ordered: list[Mutation] = []
    while pending:
        sources = {read[m] for m in pending if m not in aside}
        free = next((m for m in pending if m.input_index not in sources), None)
        if free is None:
            targets = {m.input_index for m in pending}
            aside.add(next(m for m in pending if m not in aside and read[m] in targets))
        else:
            pending.remove(free)
            ordered.append(free)
    return [
        Write(
            m.input_index,
            m.value_index,
            values[m.value_index],
            m in aside,
            read[m] is None and _is_small(values[m.value_index].meta["val"], inputs[m.input_index].meta["val"]),
        )
        for m in ordered
    ]


def _is_small(value: Tensor, target: Tensor) -> bool:
    plain = value.dtype in _IN_KERNELS and value.dtype == target.dtype and has_kernels(value)
    dense = not any(s == 0 and e > 1 for s, e in zip(target.stride(), target.shape, strict=True))
    return plain and dense and not value.is_neg() and 0 < value.numel() * value.itemsize <= MAX_BYTES


def _memory(node: Node) -> Node:
    """The node in whose memory ``node`` lies."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], Node):
        base = node.args[0]
        holder = base if node.target is operator.getitem else node
        if not ops.is_view(holder.target):
            break
        node = base
    return node


def _is(value: Node, target: Node, read: int | None) -> bool:
    """Whether ``value`` is the input ``target`` itself, unchanged."""
    if value is target:
        return True
    if read is None or _memory(value) is not target:
        return False
    return _layout_key(value.meta["val"]) == _layout_key(target.meta["val"])


def _layout_key(tensor: Tensor) -> tuple[object, ...]:
    layout = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
    return *layout, tensor.is_conj(), tensor.is_neg()
