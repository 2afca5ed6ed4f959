"""What the modules of the zoo share: cases by name, for packages that are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

Case = Callable[[int], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]
"""Builds a model and the arguments of a call for a batch size."""

_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
try:
    importlib.import_module("torchvision")
except ModuleNotFoundError:
    pass
except RuntimeError:  # from PyPI, torchvision's library needs CUDA's; its models here need none of it
    for _name in ("nms", "qnms"):
        _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def package(name: str, absent: dict[str, str]) -> ModuleType | None:
    """The package, or None with a reason in ``absent``."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a package may need what is not here, in ways of its own
        absent[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
        return None


def image(make: Callable[[], nn.Module], size: int = 224, channels: int = 3) -> Case:
    """A model of one image batch."""
    return lambda batch: (make(), (torch.randn(batch, channels, size, size),), {})


def tensor(make: Callable[[], nn.Module], *shape: int) -> Case:
    """A model of one tensor [batch, *shape]."""
    return lambda batch: (make(), (torch.randn(batch, *shape),), {})


def tokens(make: Callable[[], nn.Module], length: int = 32, vocabulary: int = 1000) -> Case:
    """A model of token numbers [batch, length]."""
    return lambda batch: (make(), (torch.randint(0, vocabulary, (batch, length)),), {})


class Over(nn.Module):
    """A function of a model and the inputs."""

    def __init__(self, function: Callable[..., Any], *models: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.models = nn.ModuleList(models)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*self.models, *inputs)


def over(function: Callable[..., Any], *make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Case:
    """:class:`Over` of models and one tensor [batch, *shape]."""
    return lambda batch: (Over(function, *(one() for one in make)), (torch.randn(batch, *shape),), {})


def prefixed(name: str, cases: dict[str, Case]) -> Iterator[tuple[str, Case]]:
    for case, make in cases.items():
        yield f"{name}:{case}", make
