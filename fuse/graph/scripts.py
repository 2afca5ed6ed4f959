"""Submodules that are TorchScript: their operators are recorded like any others; what else they do must be nothing.

TorchScript keeps parameters and attributes where Python's look at them does not reach. Tensors come to its operators as
they are, and are found by which they are. An attribute that its code assigns could be neither seen nor put back, so a
model with such code is not captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fuse.errors import CaptureError

_GROWS = (
    "append", "extend", "insert", "pop", "remove", "clear", "reverse", "sort", "_set_item", "Delete", "update",
    "setdefault", "popitem",
)  # fmt: skip
"""Operators of TorchScript that change a list or a dictionary."""


def scripts(model: nn.Module) -> Iterator[nn.Module]:
    """The submodules of ``model`` that are TorchScript."""
    return (module for module in model.modules() if isinstance(module, torch.jit.ScriptModule))


def refuse_trained_scripts(model: nn.Module) -> None:
    """Refuse a model whose TorchScript holds parameters that need gradients: it gives autograd the real ones, and the
    gradients of a capture are those of fake ones.

    Raises:
        CaptureError: it does, and the message names the module.
    """
    for module in scripts(model):
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise CaptureError(f"the TorchScript of {module.original_name} has parameters that need gradients")


def refuse_changing_scripts(model: nn.Module) -> None:
    """Refuse a model with TorchScript that changes attributes.

    Raises:
        CaptureError: it has, and the message names the module.

    >>> refuse_changing_scripts(nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))))
    """
    for module in scripts(model):
        code: Any = module._c
        for name in code._method_names():
            graph = code._get_method(name).inlined_graph
            changed = [node for kind in _GROWS for node in graph.findAllNodes(f"aten::{kind}")]
            changes_held = any(node.inputsAt(0).node().kind() == "prim::GetAttr" for node in changed)
            if graph.findAllNodes("prim::SetAttr") or changes_held:
                raise CaptureError(
                    f"the TorchScript of {module.original_name} changes attributes; it runs in eager mode"
                )
