"""``torch.compile(model, backend="fuse")``: the same program through Dynamo's door.

    Dynamo graph -> AOTAutograd -> functional ATen graph -> capture, passes, program

Dynamo guards the model and its arguments; shapes that it leaves symbolic are specialised here, one variant for each.
Graphs of a training step run as AOTAutograd made them, with one warning.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from fuse.runtime.engine import Engine

Boxed = Callable[[list[Any]], Any]


def fuse_backend(graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The backend, as ``torch.compile`` calls it.

    >>> import torch
    >>> compiled = torch.compile(nn.Tanh(), backend="fuse")
    >>> with torch.no_grad():
    ...     compiled(torch.zeros(2))
    tensor([0., 0.])
    """
    compiler = aot_autograd(fw_compiler=_as_it_is, inference_compiler=_fused)
    result: Callable[..., Any] = compiler(graph, example_inputs)
    return result


def _fused(graph: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
    engine = Engine(GraphModule(graph, graph.graph), freeze=False, passes=None)

    def run(inputs: list[Any]) -> Any:
        arguments = tuple(inputs)
        inputs.clear()  # the caller's way of giving the tensors up
        return engine.call(arguments, {})

    return _boxed(run)


def _as_it_is(graph: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
    _warn_of_training()
    forward: Callable[..., Any] = nn.Module.__call__

    def run(inputs: list[Any]) -> Any:
        arguments = tuple(inputs)
        inputs.clear()
        return forward(graph, *arguments)

    return _boxed(run)


@functools.cache
def _warn_of_training() -> None:
    warnings.warn("the backend fuse runs calls that need gradients as eager would", stacklevel=2)


def _boxed(run: Boxed) -> Boxed:
    run._boxed_call = True  # type: ignore[attr-defined]
    return run
