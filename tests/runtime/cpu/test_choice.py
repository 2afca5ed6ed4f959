"""The kernels and libraries among which ``FUSE_TUNE=1`` chooses: all of them give the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fuse
from fuse.runtime.building import tuning
from fuse.runtime.cpu import blas_speed, candidates, choice
from fuse.testing import assert_fuses


def test_nothing_is_measured_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> str:
        raise AssertionError("measured")

    monkeypatch.setattr(tuning, "fastest", never)
    for value in (None, "", "0"):
        monkeypatch.delenv("FUSE_TUNE", raising=False)
        if value is not None:
            monkeypatch.setenv("FUSE_TUNE", value)
        with torch.no_grad():
            fuse.compile(nn.Linear(20, 70))(torch.randn(9, 20))


MODELS = {
    "a product on its own": (nn.Linear(20, 70), (9, 20), 1),
    "a product and what follows": (nn.Sequential(nn.Linear(20, 70), nn.GELU()), (9, 20), 1),
    "a convolution on its own": (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 9, 16), 1),
    "a convolution and what follows": (nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU()), (2, 3, 19, 19), 1),
    "a product and a norm": (nn.Sequential(nn.Linear(20, 70), nn.LayerNorm(70)), (80, 20), 1),
}


@pytest.mark.parametrize("model", MODELS)
def test_whatever_is_chosen_gives_the_same(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offered: list[list[str]] = []

    def chosen(subject: str, ways: dict[str, Callable[[], object]]) -> str:
        offered.append(list(ways))
        for way in ways.values():
            way()
        return offered[-1][0]

    monkeypatch.setenv("FUSE_TUNE", "1")
    monkeypatch.setattr(tuning, "fastest", chosen)
    module, shape, launches = MODELS[model]
    with torch.no_grad():
        assert_fuses(module.eval(), torch.randn(shape), launches=launches)
    assert offered
    assert all((choice.LIBRARY in ways) == ("its own" in model) for ways in offered)
    assert all((ways[0] == choice.LIBRARY) == ("its own" in model) for ways in offered)
    assert all("4 panels" in ways or "2 panels" in ways for ways in offered)


def test_a_library_that_wins_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSE_TUNE", "1")
    cases = (nn.Linear(20, 70), (9, 20)), (nn.Conv2d(3, 8, 3), (1, 3, 9, 18))
    for winner, kernels in ((choice.LIBRARY, 0), (candidates.USUAL, 1)):
        monkeypatch.setattr(tuning, "fastest", lambda subject, ways, w=winner: w)
        for module, shape in cases:
            fused = fuse.compile(module)
            with torch.no_grad():
                fused(torch.randn(shape))
            assert (fused.last_run.launches, fused.last_run.kernels) == (1, kernels)


def test_the_fastest_by_the_clock_is_taken(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    taken: dict[str, Callable[[], object]] = {}
    measure = tuning.fastest

    def measured(subject: str, ways: dict[str, Callable[[], object]]) -> str:
        now = [0.0]

        def run(name: str) -> None:
            taken[name] = ways[name]
            now[0] += 1.0 if name == winner else 2.0

        return measure(subject, {name: lambda n=name: run(n) for name in ways}, lambda: now[0])

    monkeypatch.setenv("FUSE_TUNE", "1")
    monkeypatch.setattr(tuning, "fastest", measured)
    for winner, ran in ((choice.LIBRARY, (0, 1, 0)), (candidates.USUAL, (1, 0, 0))):
        monkeypatch.setattr(tuning, "_known", {})
        monkeypatch.setattr(tuning, "kept", lambda key, known, measure, what: measure())
        fused = fuse.compile(nn.Linear(20, 70))
        with torch.no_grad():
            fused(torch.randn(9, 20))
        assert (fused.last_run.kernels, fused.last_run.libraries, fused.last_run.aten) == ran
        assert winner in taken


def test_measuring_draws_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSE_TUNE", "1")
    monkeypatch.setattr(tuning, "fastest", lambda subject, ways: next(iter(ways)))
    fused = fuse.compile(nn.Sequential(nn.Linear(20, 70), nn.GELU(), nn.Linear(70, 5)))
    x = torch.randn(9, 20)
    before = torch.get_rng_state()
    with torch.no_grad():
        fused(x)
    assert torch.equal(torch.get_rng_state(), before)


class Large(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(512, columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


CASES = [
    (True, 64, 512, 1),
    (True, 2, 64, 1),
    (True, 1, 512, 0),
    (True, 2, 63, 0),
    (True, 8, 31, 0),
    (False, 64, 512, 0),
]


@pytest.mark.parametrize(("slow", "rows", "columns", "kernels"), CASES)
def test_large_products_on_their_own_are_kernels_where_the_library_is_slow(
    slow: bool, rows: int, columns: int, kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FUSE_TUNE", raising=False)
    monkeypatch.setattr(blas_speed, "is_slow", lambda: slow)
    fused, x = fuse.compile(Large(columns)), torch.randn(rows, 512)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), x @ fused.weight, rtol=1e-4, atol=1e-4)
    assert (fused.last_run.launches, fused.last_run.kernels) == (1, kernels)


def test_equal_products_share_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas_speed, "is_slow", lambda: True)
    fused = fuse.compile(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)))
    with torch.no_grad():
        fused(torch.randn(32, 64))
    assert fused.compiled is not None
    assert (fused.last_run.kernels, len(fused.compiled.program.kernels)) == (3, 1)


def test_what_the_library_takes_is_measured_once_a_machine(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    measured = iter([2.0, 1.0])
    monkeypatch.setattr(blas_speed, "times_slower", lambda: next(measured))
    for _ in range(2):  # as in two processes: the second reads what the first has kept
        blas_speed.is_slow.cache_clear()
        assert blas_speed.is_slow()
    monkeypatch.setattr(torch, "__version__", "another")
    blas_speed.is_slow.cache_clear()
    assert not blas_speed.is_slow()
    blas_speed.is_slow.cache_clear()


def test_a_busy_machine_tells_nothing(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    """Threads that share a processor make a fast library seem slow: the next process measures again."""
    measured, taken_off = iter([2.0, 2.0]), iter([0, blas_speed.BUSY, 0, 0])
    monkeypatch.setattr(blas_speed, "times_slower", lambda: next(measured))
    monkeypatch.setattr(blas_speed, "_times_taken_off", lambda: next(taken_off))
    for slow in (False, True):
        blas_speed.is_slow.cache_clear()
        assert blas_speed.is_slow() == slow
    blas_speed.is_slow.cache_clear()
