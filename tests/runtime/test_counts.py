"""Loops whose steps compare their number with the number of all steps: graphs are shared between lengths."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse
from tests.runtime.test_reaching import captures

WIDTH = 8
SIZES = (11, 3), (27, 5), (19, 4), (31, 3), (5, 7), (4, 2), (23, 6), (3, 5), (14, 9), (2, 4), (9, 10), (29, 3), (1, 2)

__all__ = ["captures"]  # a fixture

Step = Callable[[int, int, int], bool]
SHARED: dict[str, Step] = {
    "t == T - 1": lambda t, length, batch: t == length - 1,
    "t != T - 1": lambda t, length, batch: t != length - 1,
    "t < T - 1": lambda t, length, batch: t < length - 1,
    "t >= T - 1": lambda t, length, batch: t >= length - 1,
    "T - 1 == t": lambda t, length, batch: length - 1 == t,
    "T - 1 > t": lambda t, length, batch: length - 1 > t,
    "t + 1 < T": lambda t, length, batch: t + 1 < length,
    "1 + t == T": lambda t, length, batch: 1 + t == length,
    "T <= t + 1": lambda t, length, batch: length <= t + 1,
    "t - 1 == T - 2": lambda t, length, batch: t - 1 == length - 2,
}
OWN: dict[str, Step] = {
    "t > 0": lambda t, length, batch: t > 0,
    "t == T - 2": lambda t, length, batch: t == length - 2,
    "t < T // 2": lambda t, length, batch: t < length // 2,
    "t == B - 1": lambda t, length, batch: t == batch - 1,
    "t < B": lambda t, length, batch: t < batch,
    "T - t == B": lambda t, length, batch: length - t == batch,
    "2 * t == T - 1": lambda t, length, batch: 2 * t == length - 1,
    "t in (T - 1, 3)": lambda t, length, batch: t in (length - 1, 3),
}


class Loop(nn.Module):
    """A loop of a cell, whose steps are counted by ``numbers``; ``chosen`` steps do something else."""

    def __init__(self, chosen: Step, numbers: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.given, self.state = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.chosen, self.numbers = chosen, numbers

    def forward(self, x: Tensor) -> Tensor:
        h, states = torch.zeros_like(x[0]), [torch.empty(0)] * len(x)
        for t in self.numbers(x):
            h = torch.tanh(self.given(x[t]) + self.state(h))
            if self.chosen(t, x.shape[0], x.shape[1]):
                h = h * 2 + 1
            states[t] = h
        return torch.stack(states)


NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "range": lambda x: range(len(x)),
    "range from zero": lambda x: range(0, x.size(0), 1),
    "enumerate a tensor": lambda x: (t for t, _ in enumerate(x)),
    "enumerate a list": lambda x: (t for t, _ in enumerate(x.unbind())),
    "zip": lambda x: (t for t, _ in zip(range(x.shape[0]), x, strict=True)),
    "reversed": lambda x: reversed(range(x.shape[0])),
}


def held(model: nn.Module, training: bool) -> int:
    """Calls at all sizes, compared with those in double precision, gradients included; returns how many of them were
    captured again."""
    double, fused, captured = copy.deepcopy(model).double(), fuse.compile(model), 0
    for steps, batch in SIZES:
        x = torch.randn(steps, batch, WIDTH)
        results = []
        for called, of in ((fused, model), (double, double)):
            of.zero_grad()
            given = x.to(next(of.parameters()).dtype, copy=True).requires_grad_(training)
            with torch.set_grad_enabled(training):
                result = called(given)
            if training:
                result.square().mean().backward()
            results.append([result, given.grad, *(p.grad for p in of.parameters())])
        for one, other in zip(*results, strict=True):
            if one is not None:
                torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5)
        captured += bool(fused.last_run.recaptured)
    return captured


@pytest.mark.sampled
@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("name", SHARED)
def test_the_last_step_is_known_at_every_length(name: str) -> None:
    assert held(Loop(SHARED[name], NUMBERS["range"]), training=False) <= 7  # four of them are too short for a loop


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("name", NUMBERS)
def test_however_steps_are_counted(name: str) -> None:
    captured = held(Loop(SHARED["t == T - 1"], NUMBERS[name]), training=False)
    assert captured <= 7 or name == "reversed"


@pytest.mark.sampled
@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("name", OWN)
def test_other_comparisons_are_right(name: str) -> None:
    held(Loop(OWN[name], NUMBERS["range"]), training=False)


@pytest.mark.usefixtures("captures")
def test_training_is_right() -> None:
    held(Loop(SHARED["t + 1 < T"], NUMBERS["range"]), training=True)


class Remembers(Loop):
    """A count outlives its step, which is the last one at another length."""

    def __init__(self, step: int) -> None:
        super().__init__(lambda t, length, batch: False, lambda x: range(len(x)))
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        counts = list[int]()
        for t in range(len(x)):
            counts.append(t)
        y = super().forward(x)
        return -y if counts[self.step] == x.shape[0] - 1 else y


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("step", [3, 8])
def test_a_count_is_known_in_its_step_only(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SIZES", [(n, b) for n, b in SIZES if n > step])
    held(Remembers(step), training=False)


class Padded(nn.Module):
    """A length that is computed from ``len``, in whole windows."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(x, (0, 0, 0, 0, 0, -len(x) % 8))
        return x.view(-1, 8, *x.shape[1:]).softmax(1)


@pytest.mark.usefixtures("captures")
def test_the_length_of_a_tensor_is_a_size() -> None:
    model = Padded()
    fused, captured = fuse.compile(model), 0
    for length in (33, 59, 41, 27, 35, 51, 22, 46, 39, 57):
        x = torch.randn(length, 3, WIDTH)
        torch.testing.assert_close(fused(x), model(x))
        captured += bool(fused.last_run.recaptured)
    assert captured <= 6  # as with x.shape[0]
