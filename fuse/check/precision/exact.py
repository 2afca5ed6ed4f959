"""Operators, regions and loops in float64: the same graph, with every dtype that it names widened."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from fuse.graph.loop import Loop
from fuse.graph.loop_with_ends import LoopWithEnds

aten = torch.ops.aten

_WIDE = {
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}

_WITH_FLAG = (aten._softmax.default, aten._log_softmax.default)
"""Operators whose third argument says that the input is float16 and the result float32."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The widest dtype of the same kind.

    >>> wide_dtype(torch.bfloat16), wide_dtype(torch.int32)
    (torch.float64, torch.int32)
    """
    return _WIDE.get(dtype, dtype)


def wide(value: Any) -> Any:
    """Floating-point tensors in float64 with the same strides; other values unchanged.

    >>> wide([torch.ones(2), 3])
    [tensor([1., 1.], dtype=torch.float64), 3]
    """

    def widened(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == wide_dtype(tensor.dtype) else tensor.detach().to(wide_dtype(tensor.dtype))

    return pytree.tree_map_only(Tensor, widened, value)


def wide_call(target: Any, args: Any, kwargs: Any) -> Any:
    """``target(*args, **kwargs)`` for float64 operands, with dtypes among the arguments widened."""
    args, kwargs = _wide_arguments(target, args, kwargs)
    return target(*args, **kwargs)


def wide_module(module: nn.Module) -> nn.Module:
    """A copy of a region or loop that computes in float64."""
    if isinstance(module, (Loop, LoopWithEnds)):
        inside = wide_module(module.body)
        assert isinstance(inside, GraphModule)
        return module.with_body(inside)
    if not isinstance(module, GraphModule):
        return module
    graph = Graph()
    copies: dict[Node, Node] = {}
    root = nn.Module()
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "call_function":
            copies[node].args, copies[node].kwargs = _wide_arguments(
                node.target, copies[node].args, copies[node].kwargs
            )
        elif node.op == "call_module" and not hasattr(root, str(node.target)):
            root.add_module(str(node.target), wide_module(module.get_submodule(str(node.target))))
    return GraphModule(root, graph)


def _wide_arguments(target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    def translated(argument: Any) -> Any:
        return wide_dtype(argument) if isinstance(argument, torch.dtype) else argument

    args = map_aggregate(tuple(args), translated)
    kwargs = map_aggregate(dict(kwargs), translated)
    if target in _WITH_FLAG and len(args) > 2:
        args = (*args[:2], False)
    return args, kwargs
