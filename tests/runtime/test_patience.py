"""Sizes that keep changing: captured once they are worth it, right before and after."""

from __future__ import annotations

import copy
import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.graph.locks import ForkedLock
from fuse.runtime.autograd.training import Training
from fuse.runtime.making import Maker, ModelCall
from fuse.runtime.sizes import patience
from fuse.runtime.sizes.new_sizes import NewSizes
from fuse.runtime.sizes.patience import SETTLED, SETTLED_NUMBERS, Patience


class Looked(nn.Module):
    """Looks its number of rows up, so that no size has the graph of others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scales = nn.Linear(64, 64), dict.fromkeys(range(101), 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) * self.scales[x.shape[0]]


def test_the_first_sizes_are_captured_and_those_that_return() -> None:
    torch.manual_seed(0)
    model = Looked().eval()
    fused = fuse.compile(model)
    ran = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in range(2, 4 * SETTLED):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(fused(x), model(x))
            ran.append(fused.last_run.fallbacks == ())
        first = ran.index(False)  # captures further out are counted, too
        assert SETTLED - 2 <= first <= SETTLED
        assert not any(ran[SETTLED:])
        assert "sizes keep changing" in fused.last_run.fallbacks[0].reason
        x = torch.randn(2, 64)
        fused(x)
        assert not fused.last_run.fallbacks
        x, calls = torch.randn(100, 64), 0
        while calls == 0 or fused.last_run.fallbacks:
            torch.testing.assert_close(fused(x), model(x))
            calls += 1
            assert calls < 100_000
    assert calls > 1


def test_one_decision_stands_for_many_calls_that_run_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a size is worth a program takes as long as twenty operators. A size that returns, another dtype and
    another state of the model are decided about at once."""
    decided: list[object] = []
    own = NewSizes.too_early
    monkeypatch.setattr(NewSizes, "too_early", lambda *given: decided.append(given) or own(*given))
    torch.manual_seed(0)
    model = Looked().eval()
    fused = fuse.compile(model)
    with torch.no_grad():
        for rows in range(2, 60):
            fused(torch.randn(rows, 64))
        fused(torch.randn(3, 64))
        assert not fused.last_run.fallbacks
        decided.clear()
        eager = []
        for rows in (*range(60, 100), *range(60, 100)):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(fused(x), model(x))
            eager += [fallback.reason for fallback in fused.last_run.fallbacks]
        assert sum("sizes keep changing" in reason for reason in eager) > 70  # a made-up size is among them
        assert len(decided) < 40
        for change, dtype in (
            (model.double, torch.float64),
            (model.float, torch.float32),
            (model.train, torch.float32),
        ):
            change()
            decided.clear()
            x = torch.randn(60, 64, dtype=dtype)
            torch.testing.assert_close(fused(x), model(x))
            assert decided


@pytest.mark.parametrize("declared", [None, {"input": {0: torch.export.Dim.AUTO}}])
def test_who_says_which_sizes_vary_has_captures(declared: object) -> None:
    fused = fuse.compile(nn.Tanh(), dynamic_shapes=declared)
    for rows in range(1, SETTLED + 4):
        fused(torch.randn(rows, 8))
        assert not fused.last_run.fallbacks


def test_a_size_that_was_captured_is_captured_again_when_the_model_changes() -> None:
    class Scaled(nn.Module):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x) * self.scale

    fused = fuse.compile(model := Scaled())
    for rows in range(2, SETTLED + 4):
        fused(torch.randn(rows, 8))
    model.scale = 3.0
    x = torch.randn(3, 8)
    torch.testing.assert_close(fused(x), model(x))
    assert not fused.last_run.fallbacks


def test_calls_that_train_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "SETTLED", 2)
    fused = fuse.compile(model := nn.Linear(8, 8))
    for rows in (2, 3, 4):
        with torch.no_grad():
            fused(torch.randn(rows, 8))
    assert fused.last_run.fallbacks
    for rows, eager in ((4, False), (5, False), (6, True)):
        model.zero_grad()
        x = torch.randn(rows, 8)
        fused(x).square().sum().backward()
        got = model.weight.grad.clone()
        assert bool(fused.last_run.fallbacks) == eager
        model.zero_grad()
        model(x).square().sum().backward()
        torch.testing.assert_close(got, model.weight.grad)


def test_a_size_whose_program_is_made_in_less_than_one_eager_call_never_runs_eager() -> None:
    patient = Patience()
    for size in range(SETTLED):
        patient.captured("kind", size, 0.5 if size < 4 else 0.02, resized=size >= 4)
    assert patient.expected("kind", 10, resized=True) == 0.02  # what an eager call takes is not known before one
    patient.ran_eager("kind", 10, 0.03)
    assert patient.expected("kind", 11, resized=True) is None
    assert patient.expected("other", 11, resized=True) is None
    assert patient.expected("kind", 11) == 0.5
    patient.ran_eager("kind", 12, 0.01)
    assert patient.expected("kind", 11, resized=True) == 0.02


def test_an_eager_training_step_counts_with_its_backward_pass() -> None:
    model = nn.Linear(4, 4)
    args = (torch.randn(2, 4),)
    call, sizes = ModelCall(args, {}, args, None), NewSizes(Maker(model, False, None, None, ForkedLock()), "auto")
    assert sizes.way(call, None).counted(0.5) == 1.0
    with torch.no_grad():
        assert sizes.way(call, None).counted(0.5) == 0.5


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.first(x))
        return y, y.square() * 2


def test_a_backward_program_for_another_loss_is_part_of_the_price(monkeypatch: pytest.MonkeyPatch) -> None:
    own, noted = Training._rewritten_backward, Patience.captured
    prices: dict[object, float] = {}

    def slow(training: Training, missing: frozenset[int]) -> Any:
        time.sleep(0.2 if missing else 0.0)
        return own(training, missing)

    def captured(known: Patience, kind: object, size: object, seconds: float, resized: bool = False) -> None:
        prices[size] = seconds
        noted(known, kind, size, seconds, resized)

    monkeypatch.setattr(Training, "_rewritten_backward", slow)
    monkeypatch.setattr(Patience, "captured", captured)
    model = Two()
    fused, other = fuse.compile(model), copy.deepcopy(model)
    for number, rows in enumerate((20, 30, 25, 22, 27, 24, 29, 21)):  # with one loss, others would not be expected
        x = torch.randn(rows, 8)
        fused(x)[number % 2].sum().backward()
        other(x)[number % 2].sum().backward()
        torch.testing.assert_close(model.first.weight.grad, other.first.weight.grad)
    assert len(prices) >= 8
    assert all(seconds >= 0.2 for seconds in list(prices.values())[:-1])


def test_what_is_remembered_is_bounded() -> None:
    patient = Patience()
    for size in range(10_000):
        patient.captured("kind", size, 1.0)
        patient.ran_eager(("other", size), ("other", size), 0.1)
    assert patient.expected("kind", 9_999) is None
    assert patient.expected("kind", 0) == 1.0
    assert sum(map(len, patient._captured.values())) + len(patient._eager) + len(patient._least) < 5_000


class Positioned(nn.Module):
    """Reads a cache up to a position that the caller counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.randn(64, 4))

    def forward(self, x: Tensor, position: int, mode: str = "sum") -> Tensor:
        return getattr(torch.tanh(self.cache[: position + 1] * x), mode)(0)


def test_a_number_that_counts_calls_is_captured_three_times_at_first() -> None:
    model = Positioned()
    fused, captures = fuse.compile(model), []
    for position in range(20):
        x = torch.randn(4)
        torch.testing.assert_close(fused(x, position), model(x, position))
        assert fused.last_run is not None
        captures.append(not fused.last_run.fallbacks)
    assert captures[:3] == [True] * 3
    assert sum(captures) <= SETTLED_NUMBERS + 1
    for mode in ("sum", "mean"):  # a word is no number
        fused(torch.randn(4), 1, mode)
        assert not fused.last_run.fallbacks
    for _ in range(200_000):  # as long as a capture takes
        fused(torch.randn(4), 19)
        if not fused.last_run.fallbacks:
            return
    raise AssertionError("a position that returns was never captured")
