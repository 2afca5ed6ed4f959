"""Each element is held to the last places of what was added up to it: tiny ones to theirs, sums to the terms'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuse.check.compare import compare
from fuse.check.draws import RecordedDraws, Replayed
from fuse.check.oracle import check
from fuse.check.sizes import ALL, FEW, Jittered, sizes
from fuse.graph.function import Function

UNIT = torch.finfo(torch.float32).eps


def sizes_of(function: Callable[..., Tensor], *given: Tensor, runs: int = ALL) -> tuple[Tensor, Tensor]:
    """The result of ``function`` in float64, and the size of its elements."""
    exact = function(*(one.double() for one in given))

    def run(mode: Jittered) -> list[Tensor | None]:
        moved = [one.double() for one in given]
        mode.move(moved)
        with mode:
            return [function(*moved)]

    (size,) = sizes(run, [exact], UNIT, runs)
    return exact, size


def test_a_wrong_tiny_element_is_found_beside_a_large_one() -> None:
    x = torch.tensor([1e6, 1e-3])
    exact, size = sizes_of(torch.exp2, torch.log2(x))
    wrong = torch.tensor([1e6, 1.01e-3])
    assert "at (1,)" in compare("y", wrong, x, exact, size=lambda _: size).problem
    assert not compare("y", wrong, x, exact).problem  # without sizes all are held to the largest


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_error_of_a_tenth_is_found_in_half_precision(dtype: torch.dtype) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    eager = torch.tanh(x) * 2
    exact, size = torch.tanh(x.double()) * 2, 2 * torch.tanh(x.double()).abs()
    assert not compare("y", (torch.tanh(x.float()) * 2).to(dtype), eager, exact, size=lambda _: size).problem
    assert compare("y", torch.tanh(x) * 2.2, eager, exact, size=lambda _: size).problem


def test_a_sum_whose_terms_cancel_is_held_to_the_terms() -> None:
    exact, size = sizes_of(lambda x: x.sum(0), torch.tensor([[1e3, 1.0], [-1e3, 1.0]]))
    assert exact.tolist() == [0.0, 2.0]
    assert 300 < size[0] < 3000
    assert 1 < size[1] < 10
    off = torch.tensor([1e-4, 2.0])
    assert not compare("y", off, exact.float(), exact, size=lambda _: size).problem
    assert "at (0,)" in compare("y", torch.tensor([1e-2, 2.0]), exact.float(), exact, size=lambda _: size).problem
    assert "at (1,)" in compare("y", torch.tensor([0.0, 2.0001]), exact.float(), exact, size=lambda _: size).problem


def test_a_gradient_that_is_exactly_zero_may_be_computed_as_rounding() -> None:
    """Of a softmax over one key: grad * y - y * sum(grad * y)."""

    def gradient(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        with torch.enable_grad():
            loss = (torch.softmax(x * 3, -1) * 1.7).sum()
            return torch.autograd.grad(loss, x)[0]

    exact, size = sizes_of(gradient, torch.tensor([[0.3], [0.7]]))
    assert (exact == 0).all()
    near = torch.full((2, 1), 1e-7)
    assert not compare("gradient", near, exact.float(), exact, size=lambda _: size).problem
    assert compare("gradient", near * 1000, exact.float(), exact, size=lambda _: size).problem


def test_what_a_batch_norm_saves_for_its_gradient_is_rounded() -> None:
    """Of two rows: the terms of the gradient cancel, and each holds the deviation that the forward pass saved."""

    def gradient(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        mean, variance = torch.zeros(1, dtype=x.dtype), torch.ones(1, dtype=x.dtype)
        with torch.enable_grad():
            y = nn.functional.batch_norm(x, mean, variance, training=True)
            return torch.autograd.grad((y * torch.tensor([[1.0], [3.0]], dtype=x.dtype)).sum(), x)[0]

    exact, size = sizes_of(gradient, torch.tensor([[-1.0], [1.0]]))
    assert (exact.abs() < 1e-4).all()
    assert (size > 0.5).all()


def test_sizes_are_asked_only_where_magnitudes_and_eagers_error_do_not_explain_an_error() -> None:
    def never(_: int) -> Tensor | None:
        raise AssertionError

    x = torch.tensor([1e6, 1e-3])
    assert not compare("y", x * (1 + UNIT), x, x.double(), size=never).problem
    eager, exact = torch.tensor([1e-3, 1.0]), torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert not compare("y", torch.tensor([1.9e-3, 1.0]), eager, exact, size=never).problem
    with pytest.raises(AssertionError):
        compare("y", torch.tensor([2.1e-3, 1.0]), eager, exact, size=never)


def test_few_runs_tell_rounding_and_all_are_made_before_an_error_is_named() -> None:
    x = torch.randn(50, 200, generator=torch.Generator().manual_seed(0))
    x[:, 0] -= x.sum(1)
    exact, all_runs = sizes_of(lambda x: x.sum(1), x)
    _, few = sizes_of(lambda x: x.sum(1), x, runs=FEW)
    assert (few <= all_runs).all()
    asked: list[int] = []

    def size(runs: int) -> Tensor:
        asked.append(runs)
        return few if runs == FEW else all_runs

    eager = exact.float()
    assert not compare("y", eager + UNIT, eager, exact, size=size).problem
    assert asked == [FEW]
    assert "at (3,)" in compare("y", eager + 1e-3 * (torch.arange(50) == 3), eager, exact, size=size).problem
    assert asked == [FEW, FEW, ALL]


@pytest.mark.parametrize("train", [False, True])
def test_the_oracle_asks_for_sizes(train: bool) -> None:
    class OneKey(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return torch.softmax(q @ k.mT, -1) @ v, (q * 1e4 + k - q * 1e4) * 3

    given = [torch.randn(2, 4, 1, 8, requires_grad=train) for _ in range(3)]
    report = check(OneKey(), tuple(given), train=train)
    assert report.passed, str(report)


def test_what_is_written_in_place_is_moved_too_and_views_are_not() -> None:
    x = torch.full((4,), 100.0, dtype=torch.float64)
    with Jittered(1e-3, 0):
        y = torch.zeros(4, dtype=torch.float64)
        y.add_(x)
        view = y[:2]
    assert ((y - 100).abs() > 0.01).all()
    assert torch.equal(view, y[:2])
    assert check(Function(lambda x: x.add_(1)), (torch.ones(3),)).passed


def test_moving_numbers_draws_nothing_that_a_run_replays() -> None:
    with RecordedDraws() as draws:
        pass
    x = torch.rand(4, dtype=torch.float64)
    with Replayed(draws), Jittered(UNIT, 0) as mode:
        mode.move([x])
        moved = x + 1
    assert moved.shape == x.shape


def test_elements_that_a_kink_cuts_off_have_the_size_of_their_terms() -> None:
    """Sums just below zero, by up to two units of their rounding: ``relu`` makes zero of them, or rounding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, 64, generator=generator).double()
    x[:, 0] -= x.sum(1) + torch.linspace(0, 2, len(x), dtype=torch.float64) * UNIT * x.square().sum(1).sqrt()
    exact = torch.relu(x.sum(1))

    def run(mode: Jittered) -> list[Tensor | None]:
        moved = x.clone()
        mode.move([moved])
        with mode:
            return [torch.relu(moved.sum(1))]

    (size,) = sizes(run, [exact], UNIT)
    assert not exact.any()
    assert (size > 0.5).float().mean() > 0.999  # with moves of one unit that are not turned round 0.74
