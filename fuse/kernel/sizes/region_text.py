"""Split a region into a text without numbers, and its numbers; copy a region with other numbers.

add.Tensor(%0 [5, 64], %1 [5, 64])      ->      "add.Tensor(%0 float32 2, %1 float32 2)",   (5, 64, 64, 1, ...)
text, (7, 64, 64, 1, ...)               ->      a copy whose tensors have these sizes, and no memory
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

from fuse.kernel.arithmetic.extents import plain

Numbers = tuple[Any, ...]
"""The integers of a region in order, and the floats among its arguments."""

_OF_ANY_SIGN = frozenset({torch.ops.aten.constant_pad_nd.default, torch.ops.aten.slice.Tensor})
"""Operators whose numbers may be negative, zero or one in some calls, and larger in others."""
_ALSO_SIZES = {torch.ops.aten.unfold.default: ("size", "step")}
"""Arguments that may be sizes, although schemas do not let them be symbolic."""
MOVED = 1 << 20
"""Offset of these numbers: numbers below two count as constants, so that these would in some calls."""


def is_moved(column: Sequence[Any]) -> bool:
    """Whether a number with these values in several calls is one to which ``MOVED`` was added."""
    return all(type(number) is int and number > MOVED // 2 for number in column)


def text_and_numbers(
    region: GraphModule, name_of: Callable[[Node], str], extra: Any = (), reals: bool = False
) -> tuple[str, Numbers]:
    """A text of a region and of ``extra`` (tensors and numbers) without integers; and the integers in order.

    With ``reals``, the floats among the arguments are taken out of the text too.
    """
    numbers: list[Any] = []

    def take(number: Any) -> Any:
        numbers.append(number)
        return number

    lines = []
    numbers_of = {node: number for number, node in enumerate(region.graph.nodes)}
    for node in region.graph.nodes:
        args = [_text_of(argument, numbers_of, varies, reals) for argument, varies in arguments_of(node)]
        mapped_arguments(node, take, reals=reals)
        layouts = [_layout_text(value) for value in parts_of(node.meta.get("val"))]
        for value in parts_of(node.meta.get("val")):
            _sized(value, take)
        source = node.meta.get("source", "")
        # A module's name counts the modules that passes made, of which they may have dropped some.
        target = "" if node.op in ("placeholder", "call_module") else node.target
        lines.append(f"{node.op} {name_of(node)} {target} {args} {layouts} {source}")
    lines.append(_text_of(extra, numbers_of))
    mapped(extra, take)
    return "\n".join(lines), tuple(numbers)


def with_numbers(
    region: GraphModule, numbers: Numbers, extra: Any = (), reals: bool = False
) -> tuple[GraphModule, Any]:
    """A copy of a region and of ``extra`` with other numbers; its tensors have no memory."""
    rest = iter(numbers)

    def take(_: Any) -> Any:
        return next(rest)

    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in region.graph.nodes:
        given = mapped_arguments(node, take, copies, reals)
        args, kwargs = tuple(given[: len(node.args)]), dict(zip(node.kwargs, given[len(node.args) :], strict=True))
        made = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        made.meta = dict(node.meta)
        if "val" in node.meta:
            value = node.meta["val"]
            parts = [_sized(part, take) for part in parts_of(value)]
            made.meta["val"] = type(value)(parts) if isinstance(value, (tuple, list)) else parts[0]
        copies[node] = made
    # The copy generates no Python code, because an extent would be printed with its value in the current call.
    return _LazyGraphModule(torch.nn.Module(), graph), mapped(extra, take)


def arguments_of(node: Node) -> list[tuple[Any, bool]]:
    """The arguments of a node, each with whether its integers may be sizes (a dimension, for instance, may not)."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return [(argument, node.op == "output") for argument in (*node.args, *node.kwargs.values())]
    sizes = _takes_sizes(node.target)
    by_position = zip(node.args, sizes.values(), strict=False)
    return [*by_position, *((argument, sizes[name]) for name, argument in node.kwargs.items())]


@cache
def _takes_sizes(op: torch._ops.OpOverload) -> dict[str, bool]:
    """Arguments of an operator by name: False for whole numbers that its schema does not let be symbolic.

    >>> _takes_sizes(torch.ops.aten.select.int)
    {'self': True, 'dim': False, 'index': True}
    """
    also = _ALSO_SIZES.get(op, ())
    return {one.name: one.name in also or _innermost(one.real_type) != "IntType" for one in op._schema.arguments}


def _innermost(kind: Any) -> str:
    while hasattr(kind, "getElementType"):  # of an option or a list
        kind = kind.getElementType()
    name: str = kind.kind()
    return name


def itself(number: Any) -> Any:
    return number


def mapped_arguments(
    node: Node, take: Callable[[Any], Any], nodes: Mapping[Node, Any] | None = None, reals: bool = False
) -> list[Any]:
    """The arguments of a node with every number ``n`` that may be a size replaced by ``take(n)``.

    A width of a padding, or an end of a slice, is ``take(n + MOVED) - MOVED``.
    """

    def moved(number: Any) -> Any:
        return take(number + MOVED) - MOVED if type(number) is int else take(number)

    of_node = moved if node.target in _OF_ANY_SIGN else take
    return [mapped(one, of_node if varies else itself, nodes, reals) for one, varies in arguments_of(node)]


def _is_real(argument: Any) -> bool:
    """Whether an argument is a float that may vary: finite, and not zero, whose sign matters."""
    return type(argument) is float and math.isfinite(argument) and argument != 0


def parts_of(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def mapped(
    argument: Any, take: Callable[[Any], Any], nodes: Mapping[Node, Any] | None = None, reals: bool = False
) -> Any:
    """An argument with every number ``n`` replaced by ``take(n)``, from left to right."""
    if type(argument) is int or (reals and _is_real(argument)):
        return take(argument)
    if isinstance(argument, Tensor):
        return _sized(argument, take)
    if isinstance(argument, Node):
        return nodes[argument] if nodes is not None else argument
    if isinstance(argument, (tuple, list)):
        return type(argument)([mapped(item, take, nodes, reals) for item in argument])
    if isinstance(argument, dict):
        return {key: mapped(item, take, nodes, reals) for key, item in argument.items()}
    return argument


def _text_of(argument: Any, numbers_of: dict[Node, int], varies: bool = True, reals: bool = False) -> str:
    if type(argument) is int:
        return "#" if varies else str(argument)
    if reals and varies and _is_real(argument):
        return "~"
    if isinstance(argument, Tensor):
        return _layout_text(argument)
    if isinstance(argument, Node):
        return f"%{numbers_of[argument]}"
    if isinstance(argument, (tuple, list)):
        return f"{type(argument).__name__}({', '.join(_text_of(item, numbers_of, varies, reals) for item in argument)})"
    if isinstance(argument, dict):
        return (
            f"{{{', '.join(f'{key}: {_text_of(item, numbers_of, varies, reals)}' for key, item in argument.items())}}}"
        )
    return repr(argument)


def _layout_text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{value.dtype} {value.dim()} {value.device} {value.layout} {value.is_conj()} {value.is_neg()}"


def _sized(value: Any, take: Callable[[Any], Any]) -> Any:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return value  # kernels take no such tensor, whatever its size
    shape = tuple(map(take, value.shape))
    return SizedTensor(value, shape, tuple(map(take, value.stride())))


@dataclass(frozen=True)
class NodeNumber:
    """A node by its number, in a text of arguments."""

    number: int

    def __repr__(self) -> str:
        return f"%{self.number}"


def layouts(node: Node) -> str:
    """The dtypes, sizes, strides and devices of a node's results as text."""
    return ",".join(
        f"{part.dtype}{tuple(part.shape)}{tuple(part.stride())}{part.device}"
        if isinstance(part, Tensor)
        else repr(part)
        for part in parts_of(node.meta.get("val"))
    )


class SizedTensor(Tensor):
    """A tensor without memory, whose shape and strides may be extents."""

    _shape: tuple[int, ...]
    _strides: tuple[int, ...]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own classes do

    @staticmethod
    def __new__(cls, like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> SizedTensor:
        made: SizedTensor = Tensor._make_wrapper_subclass(
            cls, list(map(plain, shape)), strides=list(map(plain, strides)), dtype=like.dtype, device=like.device
        )
        made._shape, made._strides = shape, strides
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @property
    def shape(self) -> Any:  # type: ignore[override]  # nobody sets it
        return self._shape

    def stride(self, dim: int | None = None) -> Any:
        return self._strides if dim is None else self._strides[dim]

    def size(self, dim: int | None = None) -> Any:
        return self._shape if dim is None else self._shape[dim]

    def numel(self) -> int:
        return math.prod(self._shape)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # as it is called
        raise TypeError(f"{op} of a tensor without memory")
