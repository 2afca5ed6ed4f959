"""A function as a module, for whatever takes modules only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Function(nn.Module):
    """Calls ``function``.

    >>> import torch
    >>> Function(torch.neg)(torch.ones(1))
    tensor([-1.])
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)
