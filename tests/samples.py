"""Models that several tests use, and what a call of one leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Cell(nn.Module):
    """Three launches a step; what a step reads of ``x`` and the state are of equal shape."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.recurrent = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], x.shape[2])
        for t in range(x.shape[1]):
            h = torch.tanh(self.recurrent(h) + x[:, t])
        return h


class Holder(nn.Module):
    """A module that holds what it is given (``b_*`` as buffers) and runs a function of itself and the inputs."""

    def __init__(self, function: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.function = (function,)
        for name, value in held.items():
            if name.startswith("b_"):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.function[0](self, *args)


newer_torch = pytest.mark.skipif(torch.__version__ < "2.13", reason="tests what torch does since 2.13")


def outcome(model: Any, args: tuple[Any, ...]) -> Any:
    """What a call leaves: its result or error, the arguments, the model's tensors, the state of the generator."""
    torch.manual_seed(3)
    try:
        result = model(*args)
    except Exception as error:
        result = type(error).__name__, str(error)
    return result, args, {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
