"""One step of a loop as values: what a persistent kernel computes at every step, and in which order.

    gates = h @ W.t() + x_t         product: h x W -> gates
    c = f(gates) * c + ...     ->   results: values over gates, x_t and c
    h = o(gates) * tanh(c)

A matrix product is no value: its result is an input of what follows, as are values that must be in memory before others
can be computed (the computed left operand of a product, the result of a reduction). These are the step's *stages*, in
order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fuse.graph.loop import Loop
from fuse.kernel import elementwise, lookups, losses, movement, reductions, scans  # noqa: F401  (registers recipes)
from fuse.kernel.dtypes import supported
from fuse.kernel.index import contiguous_strides
from fuse.kernel.loop_products import FACTORS, convolution_of, product_of
from fuse.kernel.loop_sizes import strides_in
from fuse.kernel.loop_stages import Cut, StepReader, StepValues
from fuse.kernel.names import plain_name
from fuse.kernel.packing import Packing
from fuse.kernel.placement import as_memory
from fuse.kernel.recipes import Call, Result, Unsupported, bind, translate
from fuse.kernel.values import Concat, Constant, Input, Map, Value
from fuse.kernel.walks import WORTH_KEEPING, cost_within_stage, reductions_below

aten = torch.ops.aten

EMPTY = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default)
"""Operators that promise no elements: zeros do."""

TABLES = (
    aten.gather.default,
    aten.index_select.default,
    aten.index.Tensor,
    aten.embedding.default,
    aten.nll_loss_forward.default,
)
"""Operators that look their first argument up, which must be in memory."""


def read_step(
    loop: Loop, operands: Sequence[Tensor], cut: Cut, packing: Packing, is_kept: Callable[[str], bool]
) -> StepValues:
    """The step that ``loop``'s body describes; ``cut`` says what is kept beside what must be.

    ``packing`` is that of the target: results of products are padded to whole blocks. ``is_kept`` says which names the
    target keeps for itself.

    Raises:
        Unsupported: an operator, dtype or layout that loops do not handle.
    """
    spec = loop.spec
    reader = StepReader(spec, cut, len(operands), packing, is_kept)
    values: dict[Node, Any] = {}  # None: a part of a result without a kernel
    results: list[Value] = []
    result_names: list[str] = []
    lines: dict[str, list[str]] = {}
    nodes = list(loop.body.graph.nodes)
    for node in nodes:
        if node.op == "placeholder":
            values[node] = _placeholder(reader, node, operands[len(reader.inputs)])
        elif node.op == "output":
            results = [_result(values[n], n) for n in node.args[0]]
            result_names = [n.name for n in node.args[0]]
        elif node.target is operator.getitem:
            values[node] = _part(values[node.args[0]], node)
        elif node.op == "call_function":
            values[node] = _call(reader, node, values)
            if source := node.meta.get("source"):
                lines.setdefault(source.replace("\\", "/"), []).append(plain_name(node.name))
        else:
            raise Unsupported(f"{node.name} is a call of another graph")
    return StepValues(
        tuple(reader.inputs),
        tuple(reader.stages),
        tuple(results),
        reader.names,
        tuple(reader.name(f"{plain_name(n)}_result") for n in result_names),
        reader.value_names,
        tuple(f"{source}  {', '.join(dict.fromkeys(names))}" for source, names in lines.items()),
    )


def _placeholder(reader: StepReader, node: Node, operand: Tensor) -> Input:
    """A state lies in memory of the kernel's own, dense; step inputs and invariants lie where the caller has them."""
    position, spec = len(reader.inputs), reader.spec
    _check(operand)
    name, shape, dim = reader.name(node.name), tuple(operand.shape), None
    if spec.carries <= position < spec.carries + len(spec.step_inputs):
        dim = spec.step_inputs[position - spec.carries].dim
        shape = shape[:dim] + shape[dim + 1 :]
    held = node.meta["val"]
    if tuple(held.shape) != shape or held.dtype != operand.dtype:
        raise Unsupported(f"{node.name} is {held.dtype}{list(held.shape)} in the body and another tensor outside")
    strides = contiguous_strides(shape) if position < spec.carries else strides_in(operand, name, dim)
    return reader.input(shape, operand.dtype, strides, name)


def _check(value: object) -> None:
    if not isinstance(value, Tensor):
        return
    if not supported(value.dtype):
        raise Unsupported(f"dtype {value.dtype} is not supported in kernels")
    if value.numel() == 0:
        raise Unsupported("a tensor has no elements")
    if value.layout is not torch.strided or value.is_conj() or value.is_neg():
        raise Unsupported("a tensor is sparse or lazily conjugated or negated")


def _call(reader: StepReader, node: Node, values: Mapping[Node, Result]) -> Result:
    held = node.meta["val"]
    for part in held if isinstance(held, (tuple, list)) else (held,):
        _check(part)
    if node.target in FACTORS:
        result: Result = product_of(reader, node, _bound(node, values))
    elif node.target is aten.convolution.default:
        result = convolution_of(reader, node, _bound(node, values))
    elif node.target in scans.OPS:
        result = _scan(reader, node, _bound(node, values))
    elif node.target in EMPTY:
        result = Constant(tuple(held.shape), held.dtype, 0)
    else:
        result = translate(node, _with_tables(reader, node, values))
    parts = result if isinstance(result, tuple) else (result,)
    for part in parts:
        if isinstance(part, Map):
            reader.value_names.setdefault(id(part), reader.hint(node))
            reader.named.append(part)
    if reader.cut != "as needed" and isinstance(result, Concat) and _worth_putting_together(node, result):
        return reader.keep(result, f"{plain_name(node.name)}_kept")
    if reader.cut != "reductions" or not reductions_below(p for p in parts if p is not None):
        return result
    name = f"{plain_name(node.name)}_kept"
    if not isinstance(result, tuple):
        return reader.keep(result, name)
    used = {user.args[1] for user in node.users}
    return tuple(reader.keep(p, name) if p is not None and i in used else None for i, p in enumerate(result))


def _worth_putting_together(node: Node, value: Concat) -> bool:
    """Whether a concatenation is written piece by piece before it is read: who reads an element would ask which piece
    it is of, and compute it of all."""
    return any(user.op != "output" for user in node.users) and cost_within_stage(value) >= WORTH_KEEPING


def _bound(node: Node, values: Mapping[Node, Result]) -> dict[str, Any]:
    """The arguments of ``node`` by name, tensors as values."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])  # type: ignore[arg-type,return-value]
    return bind(node.target, args, kwargs)  # type: ignore[arg-type]


def _with_tables(reader: StepReader, node: Node, values: Mapping[Node, Result]) -> Mapping[Node, Result]:
    """``values`` with the table of a look-up in memory."""
    if node.target not in TABLES:
        return values
    table = node.args[0]
    assert isinstance(table, Node)
    value = values[table]
    assert isinstance(value, Value)
    return {**values, table: as_memory(value) or reader.keep(value, f"{plain_name(node.name)}_table")}


def _scan(reader: StepReader, node: Node, bound: Mapping[str, Any]) -> Result:
    """A scan, in memory: what reads it reads any element."""
    if reductions_below([bound["self"]]):
        bound = {**bound, "self": reader.keep(bound["self"], f"{plain_name(node.name)}_source")}
    result = scans.scan_of(Call(node.target, bound, node.meta["val"]))  # type: ignore[arg-type]
    parts = result if isinstance(result, tuple) else (result,)
    kept = tuple(reader.keep(part, plain_name(node.name)) if part else None for part in parts)
    return kept if isinstance(result, tuple) else kept[0]  # type: ignore[return-value]  # a result that stands alone is there


def _result(value: Result, node: Node) -> Value:
    held = node.meta["val"]
    if not isinstance(value, Value) or value.dtype != held.dtype or value.shape != tuple(held.shape):
        raise Unsupported(f"{node.target} promises {held.dtype}{list(held.shape)} and its recipe gives another result")
    return value


def _part(values: Result, node: Node) -> Value | None:
    """A part of a result; None where it has no kernel, which matters only to who reads it."""
    assert isinstance(values, tuple)
    assert isinstance(node.args[1], int)
    part = values[node.args[1]]
    if part is None and node.users:
        raise Unsupported(f"result {node.args[1]} of {node.args[0]} has no kernel")
    return part
