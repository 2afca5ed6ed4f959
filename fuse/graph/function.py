"""Modules made of functions, for code that takes only modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn


class Function(nn.Module):
    """A module that calls ``function``.

    >>> import torch
    >>> Function(torch.neg)(torch.ones(1))
    tensor([-1.])
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class FunctionWithBuffers(nn.Module):
    """A module that calls ``function`` with tensors; those at ``positions`` are buffers of the module.

    >>> import torch
    >>> model = FunctionWithBuffers(torch.sub, [torch.ones(1), torch.ones(1) * 3], positions=[1])
    >>> model(torch.ones(1) * 5), list(model.state_dict())
    (tensor([2.]), ['argument_1'])
    """

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Tensor], positions: Collection[int]) -> None:
        super().__init__()
        self.function = function
        self.held = [position in positions for position in range(len(arguments))]
        for position in positions:
            self.register_buffer(f"argument_{position}", arguments[position])

    def forward(self, *given: Any) -> Any:
        rest = iter(given)
        own = (getattr(self, f"argument_{position}") if held else next(rest) for position, held in enumerate(self.held))
        return self.function(*own)
