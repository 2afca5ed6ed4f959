"""A branch on a size: the kernels of the side that no call has taken yet are compiled with those of the first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fuse
from fuse.runtime.making import ModelCall
from fuse.runtime.sizes import made_up_calls, other_sides, patience
from tests.fuzz.sizes import Model, branch, infer, mean_by_hand, train, windows


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of each made-up call of another side."""
    made: list[tuple[int, ...]] = []

    def graphs_of(maker: object, call: ModelCall, each: Callable[..., object]) -> object:
        made.append(tuple(call.leaves[0].shape[:2]))
        return made_up_calls.graphs_of(maker, call, each)  # type: ignore[arg-type]  # a stand-in with its arguments

    monkeypatch.setattr(other_sides, "graphs_of", graphs_of)
    monkeypatch.setattr(patience, "SETTLED", 1_000_000)
    return made


@pytest.mark.sampled
@pytest.mark.parametrize("judge", [infer, train])
@pytest.mark.parametrize(
    ("function", "sizes", "count"),
    [
        (branch, [(99, 7), (11, 5), (131, 9), (5, 3), (13, 2)], 1),
        (branch, [(11, 5), (99, 7), (7, 3), (131, 9), (12, 2)], 1),
        (branch, [(99, 7), (30, 5), (7, 3), (131, 9), (12, 2)], 2),
        (branch, [(11, 5), (9, 7), (99, 3), (131, 9), (12, 2)], 2),
        (windows, [(99, 7), (11, 5), (131, 9), (128, 7), (192, 3)], 2),
        (windows, [(128, 7), (192, 5), (131, 9), (75, 3), (320, 2)], 2),
    ],
)
def test_both_sides_are_compiled_with_the_second_size(
    function: Callable[[Model, Tensor], Tensor],
    sizes: list[tuple[int, int]],
    count: int,
    judge: Callable[..., None],
    empty_cache: Path,
    compiled_sources: list[str],
    made_up: list[tuple[int, ...]],
) -> None:
    torch.manual_seed(0)
    model = Model(function).train(judge is train)
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    compiled = []
    for size in sizes:
        before = len(compiled_sources)
        judge(model, double, fused, torch.randn(*size, 8))
        compiled.append(len(compiled_sources) > before)
        assert not fused.last_run.fallbacks
    assert compiled == [True, True, False, False, False]
    assert len(made_up) == count


def at_most(m: Model, x: Tensor) -> Tensor:
    if x.shape[0] > 40:
        raise ValueError("too long")
    return torch.tanh(m.first(x)) * 2


def equal(m: Model, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x)) * (3 if x.shape[0] == 40 else 2)


def counted(m: Model, x: Tensor) -> Tensor:
    t, h = 0, x[0]
    while t < x.shape[0] - 1:
        t += 1
        h = torch.tanh(m.first(h) + x[t])
    return h


@pytest.mark.parametrize(("function", "count"), [(at_most, 1), (equal, 0), (counted, 0), (mean_by_hand, 0)])
def test_no_side_is_made_up_for_one_size_or_for_counted_steps(
    function: Callable[[Model, Tensor], Tensor], count: int, made_up: list[tuple[int, ...]], empty_cache: Path
) -> None:
    torch.manual_seed(0)
    fused = fuse.compile(model := Model(function))
    for size in ((9, 7), (11, 5), (20, 3)):
        infer(model, copy.deepcopy(model).double(), fused, torch.randn(*size, 8))
        assert not fused.last_run.fallbacks
    assert len(made_up) == count  # forward fails there, and a second one is not tried
    if function is at_most:
        with pytest.raises(ValueError, match="too long"):
            fused(torch.randn(41, 3, 8))


def test_later_sizes_make_up_no_side(made_up: list[tuple[int, ...]], empty_cache: Path) -> None:
    fused = fuse.compile(model := Model(branch))
    with torch.no_grad():
        for size in ((99, 7), (11, 5)):
            fused(torch.randn(*size, 8))
        made_up.clear()
        for steps in range(2, 40):
            x = torch.randn(steps, 6, 8)
            torch.testing.assert_close(fused(x), model(x))
    assert not made_up
