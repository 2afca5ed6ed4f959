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
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fuse.graph.loop import Loop, LoopSpec
from fuse.kernel import ctypes, elementwise, lookups, movement, reductions  # noqa: F401  (importing registers the recipes)
from fuse.kernel.index import Affine, Stride, contiguous_strides, offset
from fuse.kernel.loop_sizes import strides_in
from fuse.kernel.recipes import Result, Unsupported, apply, bind, translate
from fuse.kernel.values import Input, Map, Reindex, Shape, Value
from fuse.kernel.walks import reductions_below

aten = torch.ops.aten

PANEL = 16
"""Columns of a product that are packed side by side: one AVX-512 register of floats."""

MOST_PANELS = 4
"""Panels in a block, at most."""

_WORDS = """
    alignas and asm auto bool break case catch char class const continue default delete do double else enum explicit
    export extern false float for friend goto if inline int long mutable namespace new not operator or private
    protected public register return short signed sizeof static struct switch template this throw true try typedef
    union unsigned using virtual void volatile while xor
    args block first_block first_row lane lanes last_block last_row last_unit member row sizes steps t team threads
    unit workspace
    all any argmax argmin inside max min padded piece position prod sum value
"""
RESERVED = frozenset(_WORDS.split())
"""Words of C++, then what loop kernels call things themselves, then what they call elements."""

RESERVED_FORMS = re.compile(
    r".*_(at|element|row|so_far|lane|value|start|steps|first|pace|stride|next|memory|last)"
    r"|(weights|sums)_\d+.*|[ip]\d.*|out\d.*|fuse_.*|u?int\d+_t|[A-Z0-9_]*_(MIN|MAX)"
)


@dataclass(frozen=True)
class Matrix:
    """An invariant as a right operand: element ``(k, n)`` lies at ``start + k * strides[0] + n * strides[1]``.

    These are numbers, sizes among them.
    """

    source: Input
    start: Affine
    strides: tuple[Affine, Affine]


@dataclass(frozen=True)
class Product:
    """``result = left @ right`` in float32; ``left`` is in memory, dense along its second dimension."""

    left: Input
    right: Matrix
    result: Input


@dataclass(frozen=True)
class Kept:
    """``value`` is computed for all of its elements before what reads ``result``."""

    value: Value
    result: Input


@dataclass(frozen=True)
class Step:
    """What a step reads, computes and stores.

    ``inputs`` by position: the operands' parts that a step reads (states, step inputs, invariants), then results of
    stages. ``results``: the next states, then what is collected. ``names`` are C++ names by position of an input,
    ``result_names`` those of the results, ``value_names`` those of values by ``id``; ``lines`` the user's lines.
    """

    inputs: tuple[Input, ...]
    stages: tuple[Product | Kept, ...]
    results: tuple[Value, ...]
    names: Mapping[int, str]
    result_names: tuple[str, ...]
    value_names: Mapping[int, str]
    lines: tuple[str, ...]


@dataclass
class _Reader:
    """State while the body's nodes are read in order."""

    spec: LoopSpec
    cut: bool
    operands: int
    inputs: list[Input] = field(default_factory=list)
    stages: list[Product | Kept] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    value_names: dict[int, str] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)

    def name(self, wanted: str) -> str:
        """A C++ name for memory, never one that an element computed in a kernel may get."""
        stem = plain_name(wanted)
        if stem in RESERVED or RESERVED_FORMS.fullmatch(stem):
            stem += "_input"
        self.taken[stem] = self.taken.get(stem, 0) + 1
        return stem if self.taken[stem] == 1 else f"{stem}_{self.taken[stem]}"

    def hint(self, node: Node) -> str:
        """The name of elements that ``node`` computes."""
        stem = plain_name(node.name)
        return f"{stem}_value" if stem in self.taken else stem

    def input(self, shape: Shape, dtype: torch.dtype, strides: tuple[Stride, ...], name: str) -> Input:
        """Memory called ``name``, which is taken."""
        value = Input(shape, dtype, len(self.inputs), strides)
        self.inputs.append(value)
        self.names[value.position] = name
        return value

    def keep(self, value: Value, name: str) -> Input:
        """``value`` in memory."""
        result = self.input(value.shape, value.dtype, contiguous_strides(value.shape), self.name(name))
        self.stages.append(Kept(value, result))
        return result

    def product(self, node: Node, left: Value, right: Value) -> Input:
        if left.dtype is not torch.float32 or right.dtype is not torch.float32:
            raise Unsupported(f"a product of {left.dtype} in a loop")
        matrix = matrix_of(right)
        if not self.spec.carries + len(self.spec.step_inputs) <= matrix.source.position < self.operands:
            raise Unsupported("the right operand of a product changes from step to step")
        if not isinstance(left, Input) or left.strides[1] != 1:
            left = self.keep(left, f"{plain_name(node.name)}_left")
        rows, columns = left.shape[0], right.shape[1]
        strides = (padded_columns(columns), 1)
        name = self.name(f"{plain_name(node.name)}_sums")
        result = self.input((rows, columns), torch.float32, strides, name)
        self.stages.append(Product(left, matrix, result))
        return result


def read_step(loop: Loop, operands: Sequence[Tensor], cut: bool) -> Step:
    """The step that ``loop``'s body describes; with ``cut``, the result of every reduction is kept.

    Raises:
        Unsupported: an operator, dtype or layout that loops do not handle.
    """
    spec = loop.spec
    reader = _Reader(spec, cut, len(operands))
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
    return Step(
        tuple(reader.inputs),
        tuple(reader.stages),
        tuple(results),
        reader.names,
        tuple(reader.name(f"{plain_name(n)}_result") for n in result_names),
        reader.value_names,
        tuple(f"{source}  {', '.join(dict.fromkeys(names))}" for source, names in lines.items()),
    )


def _placeholder(reader: _Reader, node: Node, operand: Tensor) -> Input:
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
    if not ctypes.supported(value.dtype):
        raise Unsupported(f"dtype {value.dtype} is not supported in kernels")
    if value.numel() == 0:
        raise Unsupported("a tensor has no elements")
    if value.layout is not torch.strided or value.is_conj() or value.is_neg():
        raise Unsupported("a tensor is sparse or lazily conjugated or negated")
    if value.device.type != "cpu":
        raise Unsupported(f"device {value.device.type} has no loop kernels yet")


def _call(reader: _Reader, node: Node, values: Mapping[Node, Result]) -> Result:
    held = node.meta["val"]
    for part in held if isinstance(held, (tuple, list)) else (held,):
        _check(part)
    if node.target in (aten.mm.default, aten.addmm.default):
        return _product(reader, node, values)
    result = translate(node, values)
    parts = result if isinstance(result, tuple) else (result,)
    for part in parts:
        if isinstance(part, Map):
            reader.value_names.setdefault(id(part), reader.hint(node))
    if not reader.cut or not reductions_below(p for p in parts if p is not None):
        return result
    name = f"{plain_name(node.name)}_kept"
    if not isinstance(result, tuple):
        return reader.keep(result, name)
    used = {user.args[1] for user in node.users}
    return tuple(reader.keep(p, name) if p is not None and i in used else None for i, p in enumerate(result))


def _product(reader: _Reader, node: Node, values: Mapping[Node, Result]) -> Value:
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])  # type: ignore[arg-type,return-value]
    bound = bind(node.target, args, kwargs)  # type: ignore[arg-type]
    if node.target is aten.mm.default:
        return reader.product(node, bound["self"], bound["mat2"])
    if bound["alpha"] != 1 or bound["beta"] != 1:
        raise Unsupported("addmm with factors")
    product = reader.product(node, bound["mat1"], bound["mat2"])
    return apply("({0} + {1})", [product, bound["self"]], torch.float32, product.shape)


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


def matrix_of(value: Value) -> Matrix:
    """Where an operand's elements lie, through views.

    Raises:
        Unsupported: it is computed inside the step.
    """
    index = (Affine.of("k"), Affine.of("n"))
    extents = {"k": value.shape[0], "n": value.shape[1]}
    while isinstance(value, Reindex):
        index = value.where(index, extents)  # type: ignore[assignment]
        value = value.source
    if not isinstance(value, Input):
        raise Unsupported("the right operand of a product is computed in the step")
    where = offset(index, value.strides)
    return Matrix(value, where.start(), (where.step("k"), where.step("n")))


def panels_in_block(columns: int) -> int:
    """How many panels of a wide product are computed at once: as many as possible while few are padding.

    >>> [panels_in_block(n) for n in (16, 80, 128, 400)]
    [1, 3, 4, 4]
    """
    panels = -(-columns // PANEL)
    return min(range(1, MOST_PANELS + 1), key=lambda n: (-(-panels // n) * n / panels > 1.3, -n))


def padded_columns(columns: int) -> int:
    """Columns of a product's result with the padding of its last block.

    >>> padded_columns(5), padded_columns(128)
    (16, 128)
    """
    width = PANEL * panels_in_block(columns)
    return -(-columns // width) * width


def plain_name(name: str) -> str:
    """A node's name without the number that makes it unique, fit for C++.

    >>> plain_name("sigmoid_1")
    'sigmoid'
    """
    return re.sub(r"\W", "_", re.sub(r"(_\d+)+$", "", name)).strip("_") or "value"
