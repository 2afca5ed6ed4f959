"""The backend of ``torch.compile(model, backend="fuse")``, for inference and training.

    Dynamo graph -> capture (with gradients where a call needs them) -> passes -> programs

Dynamo guards the model and passes parameters as arguments. Its graph runs like any other model of ``fuse.compile``,
which handles writes, views, graph breaks and gradients. Gradients come from fuse's recorder and not from AOTAutograd,
which takes ten times as long on the loops that Dynamo unrolls. Symbolic sizes are read from the tensors that have them,
as in ``forward``, so that sizes vary as in ``fuse.compile``. A checkpointed block is checkpointed while it is recorded,
so that its backward graph contains its operators again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.wrap import TagActivationCheckpoint
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from fuse.runtime.engine import Engine

_TAGGED = torch.ops.higher_order.tag_activation_checkpoint


def fuse_backend(graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a Dynamo graph; ``torch.compile`` calls this function.

    >>> import torch
    >>> compiled = torch.compile(nn.Tanh(), backend="fuse")
    >>> x = torch.zeros(2, requires_grad=True)
    >>> compiled(x).sum().backward(); x.grad
    tensor([1., 1.])
    """
    asked = _sizes_asked(graph)
    engine = Engine(TracedByDynamo(graph), freeze=False, passes=None)

    def run(*inputs: Any) -> Any:
        if asked:
            inputs = tuple(None if position in asked else value for position, value in enumerate(inputs))
        return engine.call(inputs, {})

    return run


class TracedByDynamo(nn.Module):
    """A graph that Dynamo traced, as a model. While it is captured, operators have the user's source lines."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__()
        for inner in graph.modules():
            if isinstance(inner, GraphModule):
                _checkpoint(inner)
        self.graph = graph

    def forward(self, *args: Any) -> Any:
        captured = any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())
        return Interpreter(self.graph).run(*args) if captured else self.graph(*args)

    def _get_name(self) -> str:
        return "a graph of Dynamo"


def _sizes_asked(graph: GraphModule) -> frozenset[int]:
    """Replace symbolic sizes among a graph's inputs by ``size`` calls on tensors; returns the inputs that are unused
    then."""
    inputs = graph.graph.find_nodes(op="placeholder")
    values = [node.meta.get("example_value") for node in inputs]
    shapes: list[Sequence[Any]] = [value.shape if isinstance(value, Tensor) else () for value in values]
    sizes = {
        size.node.expr: (node, dim)
        for node, shape in zip(inputs, shapes, strict=True)
        for dim, size in enumerate(shape)
        if isinstance(size, torch.SymInt)
    }
    numbers = [position for position, value in enumerate(values) if isinstance(value, torch.SymInt)]
    for position in numbers:
        asked = sizes.get(values[position].node.expr)
        if asked is not None and inputs[position].users:
            with graph.graph.inserting_after(inputs[-1]):
                inputs[position].replace_all_uses_with(graph.graph.call_method("size", asked))
    if numbers:
        graph.recompile()
    return frozenset(position for position in numbers if not inputs[position].users)


def _checkpoint(graph: GraphModule) -> None:
    """Replace Dynamo's marks of checkpointed blocks by calls of ``torch.utils.checkpoint``."""
    marked = graph.graph.find_nodes(op="call_function", target=_TAGGED)
    for node in marked:
        node.target = checkpointed
    if marked:
        graph.recompile()


def checkpointed(block: GraphModule, *args: Any, **kwargs: Any) -> Any:
    """``torch.utils.checkpoint`` of a traced block, without the partitioner's choice of what to store."""
    options, given = TagActivationCheckpoint.divide_kwargs(kwargs)
    options = {name: value for name, value in options.items() if name != "use_reentrant"}
    return checkpoint(block, *args, use_reentrant=False, **options, **given)
