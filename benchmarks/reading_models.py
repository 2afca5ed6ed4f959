"""Models that read values of tensors, each kind with inputs between which the values stay, alternate or never repeat.

The same without the read is what a model is timed against.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 64


class Block(nn.Module):
    """Layers around a read; ``read`` says what the model does with a value, ``without`` the same without asking."""

    def __init__(self, read: Callable[[Tensor, Tensor], Any], depth: int = 4) -> None:
        super().__init__()
        self.read = read
        self.before = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(depth))
        )
        self.after = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(depth))
        )

    def forward(self, x: Tensor, told: Tensor) -> Any:
        return self.read(self.after(self.before(x)), told)


@dataclass(frozen=True)
class Kind:
    """One kind of read. ``values`` gives the tensor that is read in the call of that number, for values that stay (0),
    alternate (1) or never repeat (2); ``fuses``: it runs fused where they never repeat, too."""

    read: Callable[[Tensor, Tensor], Any]
    without: Callable[[Tensor, Tensor], Any]
    values: Callable[[int], Tensor]
    fuses: bool = False


def _sign(number: int) -> Tensor:
    return torch.tensor([1.0, -1.0])[number % 2] * torch.ones(8)


def _ramp(number: int) -> Tensor:
    return torch.arange(8.0) * (number % 7 + 1)


def _size(number: int) -> Tensor:
    return torch.tensor([3, 2 + number % 5])


def _float(number: int) -> Tensor:
    return torch.linspace(-1.0, 1.5 + 0.01 * number, 8)


def check(y: Tensor, told: Tensor) -> Tensor:
    assert (told[1:] > told[:-1]).all(), "times must increase"
    return y * 2


def raising(y: Tensor, told: Tensor) -> Tensor:
    if not (told > -100).all():
        raise ValueError("too small")
    return y * 2


def branch(y: Tensor, told: Tensor) -> Tensor:
    return y * 2 if told.sum() > 0 else y - 1


def branch_of_number(y: Tensor, told: Tensor) -> Tensor:
    return y * 2 if told.mean().item() > 0.0 else y - 1


def nested(y: Tensor, told: Tensor) -> Tensor:
    if told[0] > 0:
        return y * 2 if told.max() > 0.5 else y * 3
    return y - 1


def early_exit(y: Tensor, told: Tensor) -> Tensor:
    for step in range(4):
        if told[0] * step > 1:
            break
        y = torch.tanh(y) + 1
    return y


def scaled(y: Tensor, told: Tensor) -> Tensor:
    return y / told.abs().max().item()


def reported(y: Tensor, told: Tensor) -> tuple[Tensor, float]:
    return y * 2, told.max().item()


def computed(y: Tensor, told: Tensor) -> Tensor:
    scale = 2 * told.max().item() + 1
    return y * scale if scale > 0 else y


def sliced(y: Tensor, told: Tensor) -> Tensor:
    return y[: int(told.max())] * 2


def sliced_by_item(y: Tensor, told: Tensor) -> Tensor:
    return y[:, : told.max().item()] * 2


def repeated(y: Tensor, told: Tensor) -> Tensor:
    for _ in range(int(told[1])):
        y = y * 1.5
    return y


def listed(y: Tensor, told: Tensor) -> list[Tensor]:
    return [y[:n] * 2 for n in told.tolist()]


def list_of_numbers(y: Tensor, told: Tensor) -> list[Tensor]:
    return [y * weight for weight in told[:3].tolist()]


def array(y: Tensor, told: Tensor) -> Tensor:
    return y * float(told.numpy().max())


def chosen(y: Tensor, told: Tensor) -> Tensor:
    return torch.cond(told.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (y,))


def equal(y: Tensor, told: Tensor) -> Tensor:
    return y * 2 if torch.equal(told, told.abs()) else y - 1


def close(y: Tensor, told: Tensor) -> Tensor:
    return y * 2 if torch.allclose(told, told.abs()) else y - 1


def late(y: Tensor, told: Tensor) -> Tensor:
    """The value read depends on the whole model."""
    return y * 2 if (y * y * told[0]).sum() > 0 else y - 1


def counted(y: Tensor, told: Tensor) -> Tensor:
    steps = 0
    while told[0] * steps < 2 and steps < 3:
        y, steps = y + 1, steps + 1
    return y * steps


def clipped(y: Tensor, told: Tensor) -> Tensor:
    norm = y.norm().item()
    return y * (told[0].item() / (norm + 1e-6)) if norm > 1e9 else y * 2


def doubled(y: Tensor, told: Tensor) -> Tensor:
    return y * 2


KINDS: dict[str, Kind] = {
    "check": Kind(check, doubled, _ramp, True),
    "raising": Kind(raising, doubled, _float, True),
    "branch": Kind(branch, doubled, _sign, True),
    "branch_of_number": Kind(branch_of_number, doubled, _sign, True),
    "nested": Kind(nested, doubled, _sign, True),
    "early_exit": Kind(early_exit, lambda y, told: torch.tanh(torch.tanh(y) + 1) + 1, _sign, True),
    "scaled": Kind(scaled, lambda y, told: y / told.abs().max(), _float, True),
    "reported": Kind(reported, lambda y, told: (y * 2, told.max()), _float, True),
    "computed": Kind(computed, lambda y, told: y * (2 * told.max() + 1), _float, True),
    "sliced": Kind(sliced, lambda y, told: y[:3] * 2, _size),
    "sliced_by_item": Kind(sliced_by_item, lambda y, told: y[:, :3] * 2, _size),
    "repeated": Kind(repeated, lambda y, told: y * 1.5 * 1.5, _size),
    "listed": Kind(listed, lambda y, told: [y[:3] * 2, y[:2] * 2], _size),
    "list_of_numbers": Kind(list_of_numbers, lambda y, told: [y * told[0], y * told[1], y * told[2]], _float, True),
    "array": Kind(array, lambda y, told: y * told.max(), _float),
    "chosen": Kind(chosen, lambda y, told: y.sin(), _sign, True),
    "equal": Kind(equal, doubled, _sign, True),
    "close": Kind(close, doubled, _sign, True),
    "late": Kind(late, doubled, _sign, True),
    "counted": Kind(counted, lambda y, told: (y + 1 + 1) * 2, _sign, True),
    "clipped": Kind(clipped, doubled, _float, True),
}

PATTERNS: dict[str, Callable[[int], int]] = {
    "stay": lambda number: 0,
    "alternate": lambda number: number % 2,
    "never repeat": lambda number: number,
}
