"""What a random program is drawn with, and what it is: text, the calls it is run with, and how it is held to eager."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Choice = TypeVar("Choice")
Inputs = tuple[Tensor, ...]


class Draw:
    """Choices that follow from a seed alone, so that a failing program is named by its seed."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)

    def pick(self, choices: Iterable[Choice]) -> Choice:
        return self._random.choice(list(choices))

    def number(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def once_in(self, times: int) -> bool:
        return self._random.randrange(times) == 0


@dataclass(frozen=True)
class Program:
    """A model as text, whose ``forward`` it is.

    ``calls`` are the inputs of calls of one compiled model, in turn; ``train`` compares gradients as well. ``widths``
    are those of the weights, ``shared_out`` says that threads share small work, too.
    """

    seed: int
    text: str
    calls: tuple[Inputs, ...]
    tolerance: float
    train: bool = False
    widths: tuple[int, ...] = ()
    shared_out: bool = False

    def model(self) -> nn.Module:
        module = Model(self.text, self.widths).eval()
        return module.to(self.calls[0][0].dtype) if self.widths else module

    def __str__(self) -> str:
        lines = [f"# seed {self.seed}, tolerance {self.tolerance}"]
        lines += ["# trained"] if self.train else []
        lines += [f"# widths {self.widths}"] if self.widths else []
        lines += ["# shared out among threads"] if self.shared_out else []
        for inputs in self.calls:
            lines.append("# called with " + ", ".join(_described(t) for t in inputs))
        return "\n".join([*lines, self.text])


class Model(nn.Module):
    """Runs the text of a program as its forward.

    Of ``widths``, ``wij`` leads from width i to width j, ``bi`` is as wide as i and ``widei`` leads to three times i.
    """

    def __init__(self, text: str, widths: tuple[int, ...] = ()) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.count = 1
        if not widths:
            self.register_buffer("state", torch.randn(4, 4, generator=generator))
            self.square = nn.Parameter(torch.randn(4, 4, generator=generator) * 0.5)
            self.narrow = nn.Parameter(torch.randn(3, 4, generator=generator) * 0.5)
            self.bias = nn.Parameter(torch.randn(4, generator=generator))
        for i, rows in enumerate(widths):
            setattr(self, f"b{i}", nn.Parameter(torch.randn(rows, generator=generator) * 0.5))
            setattr(self, f"wide{i}", nn.Parameter(torch.randn(rows, 3 * rows, generator=generator) * rows**-0.5))
            for j, columns in enumerate(widths):
                setattr(self, f"w{i}{j}", nn.Parameter(torch.randn(rows, columns, generator=generator) * rows**-0.5))
        self.text = text

    def forward(self, *inputs: Tensor) -> Any:
        space: dict[str, Any] = {"torch": torch, "self": self}
        exec(compile(self.text, "<program>", "exec"), space)
        function: Callable[..., Any] = space["forward"]
        return function(*inputs)


def copies(inputs: Inputs) -> Inputs:
    """Tensors with the same values and strides, which share memory among each other where the given ones do."""
    return copy.deepcopy(inputs)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} strides {list(tensor.stride())}"
