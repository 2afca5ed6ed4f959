"""``torch.compile(model, backend="fuse")``: the same engine through Dynamo's door, for inference and training.

    Dynamo graph -> capture (with gradients where a call needs them) -> passes -> programs

Dynamo guards the model and gives parameters as arguments; what it traced is run as any other model is, so that writes,
views, graph breaks and gradients are those of ``fuse.compile``. Gradients come from the same recorder, not from
AOTAutograd, which takes ten times as long on the loops that Dynamo unrolls. A size that Dynamo leaves symbolic is asked
of the tensor that has it, as ``forward`` does, so that sizes vary as in ``fuse.compile``. A checkpointed block is
checkpointed while it is recorded, so that its backward pass holds its operators a second time.
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
    """The backend, as ``torch.compile`` calls it.

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
            inputs = tuple(None if place in asked else value for place, value in enumerate(inputs))
        return engine.call(inputs, {})

    return run


class TracedByDynamo(nn.Module):
    """What Dynamo traced, as a model. While it is captured, each operator knows the user's line that it comes from."""

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
    """Let a graph ask its tensors for the sizes that Dynamo gives beside them; which inputs it then needs no more."""
    inputs = graph.graph.find_nodes(op="placeholder")
    values = [node.meta.get("example_value") for node in inputs]
    shapes: list[Sequence[Any]] = [value.shape if isinstance(value, Tensor) else () for value in values]
    sizes = {
        size.node.expr: (node, dim)
        for node, shape in zip(inputs, shapes, strict=True)
        for dim, size in enumerate(shape)
        if isinstance(size, torch.SymInt)
    }
    numbers = [place for place, value in enumerate(values) if isinstance(value, torch.SymInt)]
    for place in numbers:
        asked = sizes.get(values[place].node.expr)
        if asked is not None and inputs[place].users:
            with graph.graph.inserting_after(inputs[-1]):
                inputs[place].replace_all_uses_with(graph.graph.call_method("size", asked))
    if numbers:
        graph.recompile()
    return frozenset(place for place in numbers if not inputs[place].users)


def _checkpoint(graph: GraphModule) -> None:
    """Let blocks that Dynamo marked for checkpointing be checkpointed as eager does."""
    marked = graph.graph.find_nodes(op="call_function", target=_TAGGED)
    for node in marked:
        node.target = checkpointed
    if marked:
        graph.recompile()


def checkpointed(block: GraphModule, *args: Any, **kwargs: Any) -> Any:
    """``torch.utils.checkpoint`` of a traced block; a choice of what to store is made by no partitioner here."""
    options, given = TagActivationCheckpoint.divide_kwargs(kwargs)
    options = {name: value for name, value in options.items() if name != "use_reentrant"}
    return checkpoint(block, *args, use_reentrant=False, **options, **given)
