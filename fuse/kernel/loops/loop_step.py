"""One step of a loop as values and stages: what a loop kernel computes in every step, in order.

    gates = h @ W.t() + x_t         product: h x W -> gates
    c = f(gates) * c + ...     ->   results: values over gates, x_t and c
    h = o(gates) * tanh(c)

A product with a weight stores its result, which is an input of later values. So does every value that must be in memory
before others are computed: the left operand of a product, or the result of a reduction. These are the *stages*.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fuse import ops
from fuse.graph.loop import Loop
from fuse.graph.strides import contiguous_strides
from fuse.kernel.loops.loop_products import FACTORS, convolution_of, gradient_of_convolution, product_of
from fuse.kernel.loops.loop_sizes import strides_in
from fuse.kernel.loops.loop_stages import Cut, StepReader, StepValues
from fuse.kernel.names import plain_name
from fuse.kernel.nests import ranking, scans, small_matrices
from fuse.kernel.packing import Packing
from fuse.kernel.placement import as_memory
from fuse.kernel.recipes.reading import check, maps_in, parts_of, read
from fuse.kernel.recipes.registry import Call, Result, Unsupported, arguments_of, bind, translate
from fuse.kernel.traversals import WORTH_KEEPING, cost_within_stage, reductions_below
from fuse.kernel.values import Concat, Constant, Input, Map, Value

aten = torch.ops.aten

EMPTY = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default)
"""Operators whose elements are arbitrary; kernels take zeros."""

COLLECTORS = (
    aten.cat.default,
    aten.stack.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
)
"""Operators whose results are concatenations."""

TABLES = (
    aten.gather.default,
    aten.index_select.default,
    aten.index.Tensor,
    aten.embedding.default,
    aten.nll_loss_forward.default,
    aten.index_put.default,
    aten._index_put_impl.default,
    aten._unsafe_index_put.default,
    aten.index_copy.default,
    aten.index_add.default,
    aten.index_fill.int_Scalar,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
)
"""Operators that read or write their first argument at positions; it must be in memory."""

WRITTEN = frozenset({"source", "src", "values"})
"""Their arguments with values that are written: every element of the result that may get one computes it."""


def read_step(
    loop: Loop, operands: Sequence[Tensor], cut: Cut, packing: Packing, is_reserved: Callable[[str], bool]
) -> StepValues:
    """The body of ``loop`` as values and stages.

    Args:
        loop: its body is a captured graph of one step.
        operands: the tensors that the loop is called with.
        cut: which values are stored besides those that must be.
        packing: that of the target; results of products are padded to whole blocks.
        is_reserved: whether the target reserves a name.

    Raises:
        Unsupported: an operator, dtype or layout that loop kernels do not handle.
    """
    reader = StepReader(loop.spec, cut, len(operands), packing, is_reserved)

    def given(node: Node) -> Input:
        return _placeholder(reader, node, operands[len(reader.inputs)])

    found = read(loop.body.graph, given, lambda node, values: _call(reader, node, values))
    return StepValues(
        tuple(reader.inputs),
        tuple(reader.stages),
        found.results,
        reader.names,
        tuple(reader.name(f"{plain_name(node.name)}_result") for node in found.nodes),
        reader.value_names,
        found.lines,
    )


def _placeholder(reader: StepReader, node: Node, operand: Tensor) -> Input:
    """The input of a placeholder: a state in dense memory of the kernel, any other operand in the caller's memory."""
    position, spec = len(reader.inputs), reader.spec
    check(operand)
    name, shape, dim = reader.name(node.name), tuple(operand.shape), None
    if spec.carries <= position < spec.carries + len(spec.step_inputs):
        dim = spec.step_inputs[position - spec.carries].dim
        shape = shape[:dim] + shape[dim + 1 :]
    held = node.meta["val"]
    if tuple(held.shape) != shape or held.dtype != operand.dtype:
        body, outside = f"{held.dtype}{list(held.shape)}", f"{operand.dtype}{list(shape)}"
        raise Unsupported(f"{node.name} is {body} in the loop's body and {outside} outside")
    strides = contiguous_strides(shape) if position < spec.carries else strides_in(operand, name, dim)
    return reader.input(shape, operand.dtype, strides, name)


def _call(reader: StepReader, node: Node, values: Mapping[Node, Result]) -> Result:
    if node.target in FACTORS:
        result: Result = product_of(reader, node, arguments_of(node, values))
    elif node.target is aten.convolution.default:
        result = convolution_of(reader, node, arguments_of(node, values))
    elif node.target is aten.convolution_backward.default:
        result = gradient_of_convolution(reader, node, arguments_of(node, values))
    elif node.target in scans.OPS:
        result = _scan(reader, node, arguments_of(node, values))
    elif node.target in ranking.OPS:
        result = ranking.ranked(_bound(node, values), _keeping(reader, node))
    elif node.target in small_matrices.OPS:
        read_parts = {user.args[1] for user in node.users if user.target is operator.getitem}
        result = small_matrices.solved(_bound(node, values), _keeping(reader, node), read_parts)
    elif node.target in EMPTY:
        held = node.meta["val"]
        result = Constant(tuple(held.shape), held.dtype, 0)
    else:
        result = translate(node, _with_tables(reader, node, values))
    for part in maps_in(result):
        reader.value_names.setdefault(id(part), reader.hint(node))
        reader.named.append(part)
    if reader.cut != "as needed" and isinstance(result, Map) and _worth_computing_once(node, result):
        return reader.keep(result, f"{plain_name(node.name)}_kept")
    if reader.cut != "as needed" and isinstance(result, Concat) and _worth_putting_together(node, result):
        return reader.keep(result, f"{plain_name(node.name)}_kept")
    if reader.cut != "reductions" or not reductions_below(p for p in parts_of(result) if p is not None):
        return result
    name = f"{plain_name(node.name)}_kept"
    if not isinstance(result, tuple):
        return reader.keep(result, name)
    used = {user.args[1] for user in node.users}
    return tuple(reader.keep(p, name) if p is not None and i in used else None for i, p in enumerate(result))


def _worth_computing_once(node: Node, value: Map) -> bool:
    """Whether to store a value before it becomes a piece of a concatenation and is read elsewhere, too: a concatenation
    that is stored would compute it, and all that it is made of, again. In a chain of such values, as of the cells of
    one row in soft-DTW, the work would grow with the square of its length."""
    readers = [user for user in node.users if user.op != "output"]
    collectors = [user for user in readers if _is_read_by_a_collector(user)]
    return 0 < len(collectors) < len(readers) and cost_within_stage(value) >= WORTH_KEEPING


def _is_read_by_a_collector(user: Node) -> bool:
    """Whether ``user`` makes a concatenation that is read in the step, or is a view for such a one."""
    if ops.is_view(user.target):
        return any(_is_read_by_a_collector(reader) for reader in user.users)
    return user.target in COLLECTORS and any(reader.op != "output" for reader in user.users)


def _worth_putting_together(node: Node, value: Concat) -> bool:
    """Whether to store a concatenation before it is read: a read of one element would compute all pieces at its
    index."""
    return any(user.op != "output" for user in node.users) and cost_within_stage(value) >= WORTH_KEEPING


def _with_tables(reader: StepReader, node: Node, values: Mapping[Node, Result]) -> Mapping[Node, Result]:
    """``values`` with those stored that an operator in ``TABLES`` reads at positions or, if they are costly, writes."""
    if node.target not in TABLES:
        return values
    table, written = node.args[0], _written(node)
    assert isinstance(table, Node)
    value = values[table]
    assert isinstance(value, Value)
    if not isinstance(value, Constant):
        in_memory = as_memory(value) or reader.keep(value, f"{plain_name(node.name)}_table")
        values = {**values, table: in_memory}
    if written is None or written is table:
        return values
    value = values[written]
    assert isinstance(value, Value)
    if cost_within_stage(value) >= WORTH_KEEPING:
        values = {**values, written: reader.keep(value, f"{plain_name(node.name)}_written")}
    return values


def _written(node: Node) -> Node | None:
    """The tensor with the values that an operator in ``TABLES`` writes."""
    bound = bind(node.target, node.args, node.kwargs)  # type: ignore[arg-type]  # FX types targets loosely
    return next((bound[name] for name in WRITTEN if isinstance(bound.get(name), Node)), None)


def _scan(reader: StepReader, node: Node, bound: Mapping[str, Any]) -> Result:
    """A scan (``cumsum``), stored in memory, so that later values may read any element."""
    if reductions_below([bound["self"]]):
        bound = {**bound, "self": reader.keep(bound["self"], f"{plain_name(node.name)}_source")}
    result = scans.scan_of(Call(node.target, bound, node.meta["val"]))  # type: ignore[arg-type]  # FX types targets loosely
    kept = tuple(reader.keep(part, plain_name(node.name)) if part else None for part in parts_of(result))
    return kept if isinstance(result, tuple) else kept[0]  # type: ignore[return-value]  # a single result is always kept


def _bound(node: Node, values: Mapping[Node, Result]) -> Call:
    return Call(node.target, arguments_of(node, values), node.meta["val"])  # type: ignore[arg-type]  # FX types targets loosely


def _keeping(reader: StepReader, node: Node) -> Callable[[Value], Input]:
    """A function that stores a value, unless it is in memory, to be read at any place."""

    def keep(value: Value) -> Input:
        in_memory = None if isinstance(value, Constant) else as_memory(value)
        return in_memory or reader.keep(value, plain_name(node.name))

    return keep
