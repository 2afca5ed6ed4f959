"""Sizes that need kernels of their own: compiled while there are few, eager until it is worth it, right at any time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.runtime.sizes import patience
from tests.fuzz.sizes import Model, attention, infer, mean_by_hand, several, train


@pytest.mark.parametrize("judge", [infer, train])
def test_a_model_with_as_many_results_as_steps_is_compiled_twice(
    judge: Callable[..., None], empty_cache: Path, compiled_sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "SETTLED", 1_000_000)
    torch.manual_seed(0)
    model = Model(several).train(judge is train)
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    compiled = []
    for steps, batch in ((99, 7), (11, 5), (131, 8), (20, 3), (9, 11)):
        before = len(compiled_sources)
        judge(model, double, fused, torch.randn(steps, batch, 8))
        compiled.append(len(compiled_sources) > before)
        assert not fused.last_run.fallbacks
        assert fused.last_run.launches == 2  # the product, and all steps
    assert compiled == [True, True, False, False, False]


@pytest.mark.parametrize(
    "sizes", [[(99, 7), (11, 5), (4, 2), (2, 5), (9, 11), (3, 4)], [(4, 7), (6, 5), (2, 3), (3, 9), (11, 5), (4, 4)]]
)
def test_training_with_few_or_many_results_is_compiled_twice(
    sizes: list[tuple[int, int]], empty_cache: Path, compiled_sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of few results are summed where they are stacked, as long as their number is not known to vary."""
    monkeypatch.setattr(patience, "SETTLED", 1_000_000)
    torch.manual_seed(0)
    model = Model(several).train()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    compiled, launches = [], []
    for steps, batch in sizes:
        before = len(compiled_sources)
        train(model, double, fused, torch.randn(steps, batch, 8))
        compiled.append(len(compiled_sources) > before)
        assert not fused.last_run.fallbacks
        assert fused.last_run.backward
        launches.append(fused.last_run.backward.launches)
    assert compiled == [True] * 2 + [False] * 4
    apart = 4  # the stack, its sum, two products
    assert launches == [apart - (sizes[0][0] == 4), *[apart] * 5]


def test_a_stack_of_two_is_reduced_in_one_kernel_at_a_batch_of_two(empty_cache: Path) -> None:
    class Largest(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.stack([x * x, y * y]).view(-1, 8).amax(0)

    fused = fuse.compile(model := Largest())
    for batch in (5, 7, 2, 3):
        x, y = torch.randn(2, batch, 8)
        torch.testing.assert_close(fused(x, y), model(x, y))
        assert not fused.last_run.fallbacks
        assert fused.last_run.launches == 1, batch


def test_few_results_have_the_kernel_of_many_where_their_number_varies(
    empty_cache: Path, compiled_sources: list[str]
) -> None:
    torch.manual_seed(0)
    model = Model(several).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    compiled = []
    for steps in range(3, 11):
        before = len(compiled_sources)
        infer(model, double, fused, torch.randn(steps, 5, 8))
        compiled.append(len(compiled_sources) > before)
        assert not fused.last_run.fallbacks
    assert compiled == [True] * 2 + [False] * 6
    infer(model, double, fused, torch.randn(11, 5, 8))
    assert "sizes keep changing" in fused.last_run.fallbacks[0].reason  # each number of results is captured


def test_a_size_of_one_with_kernels_of_its_own_waits_for_the_compiler(
    empty_cache: Path, compiled_sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Model(mean_by_hand).train()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for steps, batch in ((9, 7), (11, 5)):
        train(model, double, fused, torch.randn(steps, batch, 8))
        assert not fused.last_run.fallbacks
    before = len(compiled_sources)
    for steps in (1, 1, 12):
        train(model, double, fused, torch.randn(steps, 5, 8))
        assert bool(fused.last_run.fallbacks) == (steps == 1)
    assert len(compiled_sources) == before
    monkeypatch.setattr(patience, "median", lambda seconds: 1e-9)  # what it has taken so far is enough
    train(model, double, fused, torch.randn(1, 5, 8))
    assert not fused.last_run.fallbacks
    assert len(compiled_sources) > before


def test_a_program_of_kernels_that_others_have_is_not_compiled(empty_cache: Path, compiled_sources: list[str]) -> None:
    torch.manual_seed(0)
    model = Model(attention).train()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for shape in ((9, 7), (11, 5)):
        train(model, double, fused, torch.randn(*shape, 8))
    before = len(compiled_sources)
    train(model, double, fused, torch.randn(13, 1, 8))  # the heads of one sequence are not copied
    assert not fused.last_run.fallbacks
    assert len(compiled_sources) == before


def test_a_change_of_the_model_is_compiled_however_many_sizes_were(empty_cache: Path) -> None:
    class Scaled(nn.Module):
        scale = 1.0

        def forward(self, x: Tensor) -> list[Tensor]:
            return [torch.exp(row * (self.scale + i)) for i, row in enumerate(x)]  # another number in each result

    fused = fuse.compile(model := Scaled())
    for steps in range(3, 9):
        fused(torch.randn(steps, 5))
    assert fused.last_run.fallbacks
    model.scale = 3.0
    for steps in (3, 4):
        x = torch.randn(steps, 5)
        torch.testing.assert_close(fused(x), model(x))
        assert not fused.last_run.fallbacks


def test_another_plain_argument_is_another_way_of_calling_the_model() -> None:
    class Powers(nn.Module):
        def forward(self, x: Tensor, times: int) -> Tensor:
            for _ in range(times):
                x = torch.tanh(x) * times
            return x.softmax(-1)

    fused = fuse.compile(model := Powers())
    for times in range(1, 7):
        for rows in (3, 5):
            x = torch.randn(rows, 40)
            torch.testing.assert_close(fused(x, times), model(x, times))
            if times < 4:
                assert not fused.last_run.fallbacks


def test_a_cache_that_grows_from_nothing_is_compiled_for_all_lengths(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "SETTLED_UNLIKE", patience.SETTLED)  # seven and one more are the width

    class Cached(nn.Module):
        def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
            cache = torch.cat([cache, torch.tanh(x)], 1)
            return (cache * cache.sum(1, keepdim=True)).softmax(-1), cache

    torch.manual_seed(0)
    fused, model = fuse.compile(Cached()), Cached()
    cache = torch.zeros(3, 0, 8)
    for length in range(8):
        x = torch.randn(3, 1, 8)
        (got, _), (expected, longer) = fused(x, cache), model(x, cache)
        torch.testing.assert_close(got, expected)
        cache = longer
        assert bool(fused.last_run.fallbacks) == (length == 1), length  # no program for one row serves others


def test_sizes_of_one_that_come_one_after_another_are_compiled(empty_cache: Path) -> None:
    """As a prompt is read in one call, and then token by token."""
    torch.manual_seed(0)
    model = Model(mean_by_hand).train()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for steps, batch in ((9, 7), (11, 5)):
        train(model, double, fused, torch.randn(steps, batch, 8))
    eager = []
    for batch in (5, 6, 7, 8):
        train(model, double, fused, torch.randn(1, batch, 8))
        eager.append(bool(fused.last_run.fallbacks))
    assert eager == [True, True, False, False]
