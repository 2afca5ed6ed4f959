"""Whether tensors that autograd saved can still be read: it raises for those that were freed or written since.

    out[t + 1] = tanh(linear(out[t]))      linear saves out[t], whose memory the next steps write: backward raises

A functional graph keeps every value, so that gradients taken of it would not raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_SAVED: dict[str, tuple[str, ...]] = {}
"""Name of one of PyTorch's own autograd nodes -> its attributes that may hold saved tensors."""


def error_of_saved(node: Any) -> RuntimeError | None:
    """The error that autograd raises when it reads the tensors that ``node`` saved; None if it raises none."""
    with _disable_current_modes():
        return _error(node)


def _error(node: Any) -> RuntimeError | None:
    try:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            _ = node.saved_tensors
            return None
        if (name := node.name()) not in _SAVED:
            found = [one for one in dir(node) if one.startswith("_saved_")]
            _SAVED[name] = tuple(one for one in found if _may_be_tensors(getattr(node, one)))
        for attribute in _SAVED[name]:
            getattr(node, attribute)
    except RuntimeError as error:
        return error
    return None


def _may_be_tensors(value: object) -> bool:
    """Whether a node of the same name may save a tensor where one saved ``value``."""
    return (
        value is None
        or isinstance(value, Tensor)
        or (isinstance(value, tuple) and (not value or _may_be_tensors(value[0])))
    )


def reads_overwritten(leaves: Sequence[Any]) -> bool:
    """Whether gradients of ``leaves`` may read a tensor that was written after autograd saved it.

    >>> x = torch.ones(2, requires_grad=True)
    >>> y, z = x.exp(), x * 2
    >>> _ = y.add_(1), z.add_(1)
    >>> reads_overwritten([y]), reads_overwritten([z, 3])
    (True, False)
    """
    with _disable_current_modes():
        errors = (str(_error(node)) for node in autograd_nodes(leaves))
        return any("modified by an inplace operation" in error for error in errors)


def autograd_nodes(leaves: Iterable[Any], enters: Callable[[Any], bool] = lambda node: True) -> Iterator[Any]:
    """The nodes of the autograd graph of ``leaves``, each once; ``enters`` may refuse some, and the nodes
    that only these lead to."""
    seen: set[Any] = set()
    worklist = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor)]
    while worklist:
        node = worklist.pop()
        if node is not None and node not in seen and enters(node):
            seen.add(node)
            yield node
            worklist.extend(following for following, _ in node.next_functions)
