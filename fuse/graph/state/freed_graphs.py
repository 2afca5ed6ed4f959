"""Results whose graph of gradients is freed: ``forward`` took gradients of them itself.

    energy = net(positions).sum()                                             energy.requires_grad
    force = -torch.autograd.grad(energy, positions)[0]                        frees the graph behind energy
    return energy, force                                                      energy.backward() raises

In eager mode, such a result has a gradient function that raises. A compiled call gives it one, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuse.errors import CaptureError
from fuse.graph.state.saved_by_autograd import autograd_nodes, error_of_saved

MESSAGE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)
"""Of PyTorch (torch/csrc/autograd/saved_variable.cpp)."""


class GraphFreed(CaptureError):
    """Gradients are asked of a result whose graph is freed, in whole or in part."""


def is_freed_error(error: BaseException) -> bool:
    """Whether PyTorch raised ``error`` because a graph is freed."""
    return isinstance(error, RuntimeError) and str(error).startswith(MESSAGE[:50])


def is_freed(leaf: Tensor) -> bool:
    """Whether every path from ``leaf`` to a tensor that collects gradients leads through freed memory.

    >>> x = torch.ones(2, requires_grad=True)
    >>> y, z = x.exp(), x.sin()
    >>> _ = torch.autograd.grad(y.sum(), x)
    >>> is_freed(y), is_freed(z), is_freed(y + z), is_freed(x)
    (True, False, False, False)
    """
    nodes = autograd_nodes([leaf], lambda node: not _has_freed(node))
    return not leaf.is_leaf and all(node.next_functions for node in nodes)


def _has_freed(node: Any) -> bool:
    error = error_of_saved(node)
    return error is not None and is_freed_error(error)


def freed(value: Tensor) -> Tensor:
    """``value`` as a result whose gradients raise as those of a freed graph do."""
    function = torch._C._functions.DelayedError(MESSAGE.encode(), 1)
    with torch.enable_grad():
        result: Tensor = function(value.detach().requires_grad_())
    return result
