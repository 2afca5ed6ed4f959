"""Read an FX graph as values: a region, or the step of a loop.

    placeholder      ->   an input: memory that the kernel reads
    call_function    ->   the value of its recipe (in a loop step, products are stages)
    getitem          ->   a part of a result
    output           ->   the values to store, with the dtypes and shapes of the graph's metadata

Nodes that nobody reads are left out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fuse.devices import has_kernels
from fuse.kernel.arithmetic.dtypes import supported
from fuse.kernel.arithmetic.extents import is_one
from fuse.kernel.arithmetic.index import Stride
from fuse.kernel.names import plain_name
from fuse.kernel.recipes import (  # noqa: F401  (importing registers the recipes)
    attention,
    computed_places,
    convolutions,
    elementwise,
    lookups,
    movement,
    pooling,
    products,
    reductions,
)
from fuse.kernel.recipes.registry import Result, Unsupported, translate
from fuse.kernel.values import Computation, Input, Map, Output, Value


@dataclass(frozen=True)
class GraphValues:
    """The results of a graph: their values, their nodes, and the user's lines for the comment in the kernel."""

    results: tuple[Value, ...]
    nodes: tuple[Node, ...]
    lines: tuple[str, ...]


def read(
    graph: Graph, given: Callable[[Node], Input], computed: Callable[[Node, Mapping[Node, Result]], Result]
) -> GraphValues:
    """The values of a graph: ``given`` makes those of placeholders, ``computed`` those of operators.

    Raises:
        Unsupported: an operator, dtype or layout that kernels do not handle; the message is a reason for the user.
    """
    values: dict[Node, Result] = {}
    lines: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = given(node)
        elif node.op == "output":
            nodes = tuple(node.args[0])
        elif not node.users:
            continue
        elif node.op != "call_function":
            raise Unsupported(f"{node.name} is a call of another graph")
        else:
            check(node.meta["val"])
            if node.target is operator.getitem:
                values[node] = _part(node, values)
                continue
            values[node] = computed(node, values)
            if source := node.meta.get("source"):
                lines.setdefault(source.replace("\\", "/"), []).append(plain_name(node.name))
    comment = (f"{source}  {', '.join(dict.fromkeys(names))}" for source, names in lines.items())
    return GraphValues(tuple(_promised(node, values[node]) for node in nodes), nodes, tuple(comment))


def check(value: object) -> None:
    """Raise ``Unsupported`` for a tensor that kernels neither read nor write."""
    if not isinstance(value, torch.Tensor):
        return
    if not supported(value.dtype):
        raise Unsupported(f"dtype {value.dtype} is not supported in kernels")
    if value.numel() == 0:
        raise Unsupported("a tensor has no elements")
    if value.layout is not torch.strided or value.is_conj() or value.is_neg():
        raise Unsupported("a tensor is sparse or lazily conjugated or negated")
    if not has_kernels(value):
        raise Unsupported(f"there are no kernels for device {value.device.type} yet")


def parts_of(result: Any) -> tuple[Any, ...]:
    """The parts of a tuple or list; any other result as a tuple of one."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def maps_in(result: Result) -> Iterable[Map]:
    """The maps among the parts of a result; kernels name their elements after the node."""
    return (part for part in parts_of(result) if isinstance(part, Map))


def _part(node: Node, values: Mapping[Node, Result]) -> Value:
    of, number = node.args
    part = values[of][number]  # type: ignore[index]  # a result with parts, and the number of one
    if part is None:
        raise Unsupported(f"result {number} of {of.target} has no kernel")  # type: ignore[union-attr]  # FX types targets loosely
    assert isinstance(part, Value)
    return part


def _promised(node: Node, value: Result) -> Value:
    held = node.meta["val"]
    if not isinstance(value, Value):
        raise Unsupported("an output of the region is a tuple")
    if value.dtype != held.dtype or value.shape != tuple(held.shape):
        recipe = f"{value.dtype}{list(value.shape)}"
        raise Unsupported(f"{node.target} returns {held.dtype}{list(held.shape)}, but its recipe returns {recipe}")
    return value


# ---- regions ---------------------------------------------------------------------------------------------------------


def _strides(value: torch.Tensor, name: str) -> tuple[Stride, ...]:
    return tuple(value.stride())


def computation_of(
    region: GraphModule, strides_of: Callable[[torch.Tensor, str], tuple[Stride, ...]] = _strides
) -> Computation:
    """A region as values; ``strides_of(tensor, name)`` gives the strides of an input (default: its own, in elements).

    Raises:
        Unsupported, NotAffine: an operator, dtype or layout that kernels do not handle.
    """
    inputs: list[Input] = []
    names: dict[int, str] = {}
    taken: dict[str, int] = {}
    value_names: dict[int, str] = {}
    named: list[Value] = []  # kept alive: no other value may get the ``id`` of one

    def given(node: Node) -> Input:
        held = node.meta["val"]
        check(held)
        name = names[len(inputs)] = _unique(plain_name(node.name), taken)
        inputs.append(Input(tuple(held.shape), held.dtype, len(inputs), strides_of(held, name)))
        return inputs[-1]

    def computed(node: Node, values: Mapping[Node, Result]) -> Result:
        result = translate(node, values)
        for part in maps_in(result):
            value_names.setdefault(id(part), plain_name(node.name))
            named.append(part)
        return result

    found = read(region.graph, given, computed)
    outputs = tuple(map(_output, found.nodes, found.results))
    return Computation(tuple(inputs), outputs, names, value_names, found.lines)


def values_of(node: Node) -> list[Value]:
    """The values of one operator whose operands are all in memory."""
    values: dict[Node, Result] = {}
    for position, argument in enumerate(node.all_input_nodes):
        held = argument.meta["val"]
        check(held)
        values[argument] = Input(tuple(held.shape), held.dtype, position, tuple(held.stride()))
    return [value for value in parts_of(translate(node, values)) if value is not None]


def _output(node: Node, value: Value) -> Output:
    held = node.meta["val"]
    strides = tuple(held.stride())
    if any(s == 0 and not is_one(e) for s, e in zip(strides, held.shape, strict=True)):
        raise Unsupported("an output of the region is a broadcast view")
    return Output(value, strides)


def _unique(name: str, taken: dict[str, int]) -> str:
    taken[name] = taken.get(name, 0) + 1
    return name if taken[name] == 1 else f"{name}_{taken[name]}"
