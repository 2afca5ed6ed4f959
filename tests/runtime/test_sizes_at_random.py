"""Models that decide by sizes, at many sizes, in inference and training: right, and compiled for few of them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuse

WIDTH = 8


class Model(nn.Module):
    """A function of an input [length, batch, 8] and some weights."""

    def __init__(self, function: Callable[[Model, Tensor], Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.function = function
        self.first, self.all = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(self, x)


def branch(m: Model, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x)) if x.shape[0] > 12 else torch.sigmoid(m.first(x)) * x.shape[0]


def windows(m: Model, x: Tensor) -> Tensor:
    padded = F.pad(m.first(x), (0, 0, 0, 0, 0, -x.shape[0] % 16))
    parts = padded.view(-1, 16, *x.shape[1:])
    return (parts - parts.mean(1, keepdim=True)).reshape(padded.shape)[: x.shape[0]]


def mean_by_hand(m: Model, x: Tensor) -> Tensor:
    return m.first(x).sum(0) * (1 / x.shape[0]) - x[-1]


def several(m: Model, x: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.exp(step) for step in m.first(x))


def attention(m: Model, x: Tensor) -> Tensor:
    steps, batch, _ = x.shape
    q, k, v = m.all(x).view(steps, batch, 3, 2, WIDTH // 2).permute(2, 1, 3, 0, 4)
    later = torch.ones(steps, steps, dtype=torch.bool).triu(1)
    return (q @ k.transpose(-1, -2)).masked_fill(later, float("-inf")).softmax(-1) @ v


def counter(m: Model, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[1], WIDTH)
    for t, step in enumerate(x):
        h = torch.tanh(m.first(h) + step)
        if t == 9:
            h = h * 0.5
    return h


def coincidence(m: Model, x: Tensor) -> Tensor:
    return m.first(x).relu() if x.shape[0] == x.shape[1] else m.first(x).transpose(0, 1).exp()


def slices(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    return torch.cat([y[:9].sum(0), y[-5:].mean(0), y[2 : x.shape[0] - 1 : 2].sum(0), y[x.shape[0] // 2 :].amax(0)])


MODELS = [branch, windows, mean_by_hand, several, attention, counter, coincidence, slices]


def shapes(count: int, seed: int) -> list[tuple[int, int]]:
    numbers = random.Random(seed)
    found = [(numbers.randint(2, 30), numbers.randint(1, 6)) for _ in range(count)]
    return [*found, (5, 5), (1, 4)]


def leaves(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


@pytest.mark.usefixtures("captured_at_once")
@pytest.mark.parametrize("function", MODELS)
def test_inference_is_right_at_every_size(function: Callable[..., Tensor]) -> None:
    model = Model(function).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    with torch.no_grad():
        for shape in shapes(7, seed=1):
            x = torch.randn(*shape, WIDTH)
            for got, eager, exact in zip(leaves(fused(x)), leaves(model(x)), leaves(double(x.double())), strict=True):
                torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)
                assert (got.dtype, got.stride()) == (eager.dtype, eager.stride())
            assert not fused.last_run.fallbacks


@pytest.mark.usefixtures("captured_at_once")
@pytest.mark.parametrize("function", MODELS)
def test_training_is_right_at_every_size(function: Callable[..., Tensor]) -> None:
    model = Model(function)
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for shape in shapes(3, seed=2):
        x = torch.randn(*shape, WIDTH, requires_grad=True)
        exact = x.detach().double().requires_grad_()
        for one, given_x in ((fused, x), (double, exact)):
            one.zero_grad()
            sum((r * torch.linspace(0, 1, r.numel()).view(r.shape)).sum() for r in leaves(one(given_x))).backward()
        torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-3, atol=1e-4)
        for mine, other in zip(model.parameters(), double.parameters(), strict=True):
            if other.grad is not None:
                torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-3, atol=1e-3)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), min_size=4, max_size=8),
    start=st.integers(-9, 9),
    end=st.integers(-9, 15),
    step=st.integers(1, 3),
    lies=st.sampled_from(["dense", "transposed", "strided", "expanded"]),
)
@settings(max_examples=6, deadline=None)
def test_slices_of_inputs_of_all_layouts(
    sizes: list[tuple[int, int]], start: int, end: int, step: int, lies: str
) -> None:
    class Sliced(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            part = x[start:end:step]
            return torch.tanh(part) * 2 + 1, part.sum(0) - x.shape[0]

    fused = fuse.compile(Sliced())
    for rows, columns in sizes:
        x = {
            "dense": lambda r, c: torch.randn(r, c),
            "transposed": lambda r, c: torch.randn(c, r).t(),
            "strided": lambda r, c: torch.randn(2 * r, 3 * c)[::2, ::3],
            "expanded": lambda r, c: torch.randn(1, c).expand(r, c),
        }[lies](rows, columns)
        for got, expected in zip(fused(x), Sliced()(x), strict=True):
            torch.testing.assert_close(got, expected)
            assert got.stride() == expected.stride()


class Decoder(nn.Module):
    """One token at a time, with a cache of what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.all(x).chunk(3, -1)
        keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        return self.out(torch.softmax(q @ keys.transpose(1, 2), -1) @ values), keys, values


@pytest.mark.parametrize("settled", [8, 1_000_000])
def test_tokens_with_a_cache_that_grows_are_compiled_for_few_lengths(
    settled: int, compiled_sources: list[str], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuse.runtime.patience.SETTLED", settled)
    model = Decoder().eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    caches = torch.randn(2, 3, 0, WIDTH)
    mine, theirs, compiling = tuple(caches), tuple(caches.double()), 0
    with torch.no_grad():
        for _ in range(64):
            x = torch.randn(3, 1, WIDTH)
            before = len(compiled_sources)
            got, *mine = fused(x, *mine)
            compiling += len(compiled_sources) > before
            expected, *theirs = double(x.double(), *theirs)
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    assert compiling <= 4
