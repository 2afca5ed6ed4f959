"""Integers that tensors hold are positions of look-ups: a graph serves whatever they are. Where eager's view matters,
they are learned."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check
from fuse.testing import assert_fuses


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = [function]

    def forward(self, *args: Tensor) -> Any:
        return self.function[0](*args)


class Hidden(nn.Module):
    """The forward algorithm of a hidden Markov model."""

    def __init__(self) -> None:
        super().__init__()
        self.moves, self.emits = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 10))

    def forward(self, seen: Tensor) -> Tensor:
        moves, emits = torch.softmax(self.moves, -1), torch.softmax(self.emits, -1)
        alpha = emits[:, seen[0]]
        for t in range(1, len(seen)):
            alpha = (alpha @ moves) * emits[:, seen[t]]
            alpha = alpha / alpha.sum()
        return alpha


class Score(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.randn(8, 8))

    def forward(self, emissions: Tensor, tags: Tensor) -> Tensor:
        score = emissions[0, tags[0]]
        for t in range(1, len(tags)):
            score = score + self.transitions[tags[t - 1], tags[t]] + emissions[t, tags[t]]
        return score


class Greedy(nn.Module):
    """Each token is the likeliest after the one before."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.embedding, self.out = nn.Parameter(torch.randn(20, 8)), nn.Linear(8, 20)

    def forward(self, h: Tensor) -> Tensor:
        for _ in range(self.steps):
            h = torch.tanh(h + self.embedding[self.out(h).argmax()])
        return h


X, T = torch.randn(5, 4, 6), torch.tensor([3, 1, -2])
ANY_VALUE: dict[str, Callable[..., Tensor]] = {
    "a row": lambda x, t: x[t[0]] * 2,
    "two": lambda x, t: x[t[0], t[1]] * 2,
    "a slice of a row": lambda x, t: x[t[0], 1:3].exp(),
    "behind a number": lambda x, t: x[2, t[1]] + 1,
    "the last": lambda x, t: x[0, ..., t[0]] + 1,
    "item": lambda x, t: x[t[0].item()] * 2,
    "list": lambda x, t: x[t.tolist()[1]] * 2,
    "int32": lambda x, t: x[t.int()[1]] * 2,
    "computed": lambda x, t: x[(t[0] + t[1]) % 3] * 2,
    "its likeliest": lambda x, t: x[x[:, 0, 0].argmax()] * t[0],
}
LEARNED: dict[str, Callable[..., Any]] = {
    "the row is returned": lambda x, t: x[t[0]],
    "a view of the row is returned": lambda x, t: x[t[0]][1:],
    "the row is written": lambda x, t: x[t[0]].add_(1) * 2,
    "a row of a result is written": lambda x, t: _written(x * 2, t),
    "the table is written afterwards": lambda x, t: _later(x * 2, t),
    "the argument is written afterwards": lambda x, t: _later(x, t),
    "an element is added to": lambda x, t: _added(x * 2, t),
    "a new dimension between": lambda x, t: x[t[0], None, t[1]] + 1,
    "columns whose rows lie apart": lambda x, t: x[:, t[0]] * 2,
}

WINDOWS: dict[str, Callable[..., Tensor]] = {
    "rows": lambda x, t: x[t[0] : t[0] + 2] * 2,
    "columns": lambda x, t: x[:, :, t[0] : t[0] + 3].exp(),
    "rows and columns": lambda x, t: torch.stack([x[i, t[1] : t[1] + 2, t[0] : t[0] + 2] for i in range(2)]),
    "item": lambda x, t: x[t[0].item() : t[0].item() + 2].view(-1) * 2,
    "behind a new dimension": lambda x, t: x[None, t[0] : t[1] + t[0] - t[1] + 1] * 2,
    "empty": lambda x, t: torch.cat([x[t[0] : t[0]], x]) * 2,
}
LEARNED_WINDOWS: dict[str, Callable[..., Any]] = {
    "the rows are returned": lambda x, t: x[t[0] : t[0] + 2],
    "the rows are written": lambda x, t: x[t[0] : t[0] + 2].add_(1) * 2,
    "a table with gaps": lambda x, t: x[:, :3][t[0] : t[0] + 2] * 2,
    "every second row": lambda x, t: x[t[0] : t[0] + 2 : 2] * 2,
    "no end": lambda x, t: x[t[0] :] * 2,
}
TWO_READS = ("an element is added to", "a new dimension between")


def _written(y: Tensor, t: Tensor) -> Tensor:
    y[t[0]].mul_(3)
    return y


def _later(y: Tensor, t: Tensor) -> Tensor:
    row = y[t[0]]
    y.add_(1)
    return row * 2


def _added(y: Tensor, t: Tensor) -> Tensor:
    y[t[0]] += 1
    return y


def captures(fused: Any) -> int:
    return sum(len(state.variants) for state in fused._own()._known.states)


@pytest.mark.parametrize("name", ANY_VALUE)
def test_one_graph_serves_all_positions(name: str) -> None:
    model = Calls(ANY_VALUE[name])
    fused = fuse.compile(model)
    for t in (T, torch.tensor([0, 2, 1]), torch.tensor([-1, -4, 0])):
        for x in (X, torch.randn(5, 4, 6)):
            torch.testing.assert_close(fused(x, t), model(x, t))
            assert not fused.last_run.fallbacks
    assert captures(fused) == 1
    assert {read.guard for read in fused.last_run.reads} == {"none"}
    assert check(model, (X.clone().requires_grad_(), T), train=True).passed


@pytest.mark.parametrize("name", LEARNED)
def test_a_view_that_matters_is_a_view(name: str) -> None:
    model = Calls(LEARNED[name])
    report = check(model, (X.clone(), T))
    assert report.passed, report
    fused = fuse.compile(model)
    for t in (T, torch.tensor([0, 2, 1])):
        mine, theirs = X.clone(), X.clone()
        torch.testing.assert_close(fused(mine, t), model(theirs, t))
        torch.testing.assert_close(mine, theirs)
    (read,) = fused.last_run.reads
    assert (read.guard, read.count) == ("number", 2 if name in TWO_READS else 1)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", WINDOWS)
def test_one_graph_serves_slices_of_one_length(name: str, training: bool) -> None:
    model = Calls(WINDOWS[name])
    fused = fuse.compile(model)
    for t in ((1, 0), (2, 1), (0, 2), (3, 1)):
        for x in (X, torch.randn(5, 4, 6)):
            mine, theirs = (x.clone().requires_grad_(training) for _ in range(2))
            ours, eagers = fused(mine, torch.tensor(t)), model(theirs, torch.tensor(t))
            torch.testing.assert_close(ours, eagers)
            assert ours.stride() == eagers.stride()
            assert not fused.last_run.fallbacks
            if training:
                ours.sum().backward()
                eagers.sum().backward()
                torch.testing.assert_close(mine.grad, theirs.grad)
    assert captures(fused) == 1
    assert check(model, (X.clone().requires_grad_(training), torch.tensor([1, 2])), train=training).passed


@pytest.mark.parametrize("t", [[-3, 1], [4, 1], [9, 1]], ids=["from the end", "cut off", "beyond the end"])
def test_a_slice_that_is_cut_off_is_eagers(t: list[int]) -> None:
    model = Calls(WINDOWS["rows"])
    fused = fuse.compile(model)
    for position in (torch.tensor([1, 1]), torch.tensor(t), torch.tensor([2, 1])):
        torch.testing.assert_close(fused(X, position), model(X, position))
    torch.testing.assert_close(fuse.compile(model)(X, torch.tensor(t)), model(X, torch.tensor(t)))


@pytest.mark.parametrize("name", LEARNED_WINDOWS)
def test_a_slice_that_matters_as_a_view_is_one(name: str) -> None:
    model = Calls(LEARNED_WINDOWS[name])
    assert check(model, (X.clone(), T)).passed
    fused = fuse.compile(model)
    for t in (T, torch.tensor([0, 2, 1])):
        mine, theirs = X.clone(), X.clone()
        torch.testing.assert_close(fused(mine, t), model(theirs, t))
        torch.testing.assert_close(mine, theirs)
    assert {read.guard for read in fused.last_run.reads} == {"number"}


@pytest.mark.parametrize("position", [5, -6, 2**40])
def test_a_position_out_of_range_raises_what_eager_raises(position: int) -> None:
    model = Calls(lambda x, t: torch.tanh(x[t[0]]) + 1)
    fused = fuse.compile(model)
    fused(X, T)
    for _ in range(2):
        with pytest.raises(IndexError) as eager:
            model(X, torch.tensor([position]))
        with pytest.raises(IndexError) as ours:
            fused(X, torch.tensor([position]))
        assert str(ours.value) == str(eager.value)
    fresh = fuse.compile(model)
    with pytest.raises(IndexError) as first:
        fresh(X, torch.tensor([position]))
    assert str(first.value) == str(eager.value)


def test_a_mask_of_no_dimensions_is_none() -> None:
    assert check(Calls(lambda x, t: x[t[0] > 0] * 2), (X, T)).passed


@pytest.mark.parametrize("steps", [9, 30])
def test_a_hidden_markov_model_is_a_loop(steps: int) -> None:
    model = Hidden()
    report = assert_fuses(model, torch.randint(0, 10, (steps,)), launches=1)
    assert len(report.loops) == 1
    assert check(model, (torch.randint(0, 10, (steps,)),), train=True).passed
    fused = fuse.compile(copy.deepcopy(model))
    for _ in range(3):
        seen = torch.randint(0, 10, (steps,))
        torch.testing.assert_close(fused(seen), model(seen))
    assert captures(fused) == 1


@pytest.mark.parametrize("steps", [9, 30])
def test_the_score_of_a_sentence_is_one_launch(steps: int) -> None:
    arguments = torch.randn(steps, 8), torch.randint(0, 8, (steps,))
    assert_fuses(Score(), *arguments, launches=1)
    model = Score()
    assert check(model, arguments, train=True).passed
    fused = fuse.compile(copy.deepcopy(model))
    fused(*arguments).backward()
    assert fused.last_run.backward.launches <= 4


def test_greedy_decoding_learns_no_token() -> None:
    model = Greedy(6)
    fused = fuse.compile(model)
    with torch.no_grad():
        for _ in range(4):
            h = torch.randn(8)
            torch.testing.assert_close(fused(h), model(h))
            assert not fused.last_run.fallbacks
    assert captures(fused) == 1
