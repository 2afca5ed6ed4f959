"""Look-ups by several tensors of positions at once, ``table[first, second]``: one load an element, also in loops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check
from fuse.testing import assert_fuses

FIRST, SECOND = torch.tensor([4, 0, -5]), torch.tensor([-1, 2, 0])
TABLE = torch.randn(5, 3, 6)
LOOKUPS: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "neighbours": (lambda t, i, j: t[i, j], TABLE),
    "the last two": (lambda t, i, j: t[:, j, i], TABLE),
    "apart": (lambda t, i, j: t[i, :, j], TABLE),
    "all three": (lambda t, i, j: t[i, j, j * 2], TABLE),
    "turned over": (lambda t, i, j: t[i, j], TABLE.transpose(0, 2)[:, :, :5].transpose(0, 2)),
    "every second": (lambda t, i, j: t[i, j], torch.randn(10, 6, 4)[::2, ::2]),
    "broadcast": (lambda t, i, j: t[i[:, None], j], TABLE),
    "one position for all": (lambda t, i, j: t[i, j[:1]], TABLE),
}


class Looking(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = [function]

    def forward(self, table: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return torch.tanh(self.function[0](table, first, second)) * 2


class Score(nn.Module):
    """Of the tags of a conditional random field."""

    def __init__(self) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.randn(8, 8))

    def forward(self, emissions: Tensor, tags: Tensor) -> Tensor:
        score = emissions[0].gather(1, tags[0].unsqueeze(1)).squeeze(1)
        for t in range(1, len(tags)):
            score = score + self.transitions[tags[t - 1], tags[t]]
            score = score + emissions[t].gather(1, tags[t].unsqueeze(1)).squeeze(1)
        return score


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_look_up_by_several_tensors_is_part_of_a_kernel(name: str) -> None:
    function, table = LOOKUPS[name]
    assert_fuses(Looking(function), table, FIRST, SECOND, launches=1)
    report = check(Looking(function), (table.clone().requires_grad_(), FIRST, SECOND), train=True)
    assert report.passed, report


class Beam(nn.Module):
    """The best of all continuations of each sentence's beams; a state is looked up by the beam that it continues."""

    def __init__(self, beams: int = 3, tokens: int = 10) -> None:
        super().__init__()
        self.beams, self.tokens = beams, tokens
        self.embedding, self.cell = nn.Embedding(tokens, 8), nn.GRUCell(8, 8)
        self.scores = nn.Linear(8, tokens)

    def forward(self, h: Tensor, steps: int) -> tuple[Tensor, ...]:
        rows = len(h) // self.beams
        token, total = torch.zeros(len(h), dtype=torch.long), torch.zeros(rows, self.beams)
        first, parents = self.beams * torch.arange(rows).unsqueeze(1), []
        for _ in range(steps):
            h = self.cell(self.embedding(token), h)
            each = total.view(-1, 1) + self.scores(h).log_softmax(-1)
            total, best = each.view(rows, -1).topk(self.beams)
            parent, token = torch.div(best, self.tokens, rounding_mode="floor"), (best % self.tokens).view(-1)
            h = h.index_select(0, (parent + first).view(-1))
            parents.append(parent)
        return torch.stack(parents), total, h, token


@pytest.mark.parametrize("steps", [5, 12])
def test_a_loop_that_looks_up_by_reshaped_positions_is_one_kernel(steps: int) -> None:
    with torch.no_grad():
        assert_fuses(Beam(), torch.randn(6, 8), steps, launches=1)


def test_a_reshaped_position_out_of_range_raises() -> None:
    model = Looking(lambda t, i, j: t.index_select(0, (i.view(3, 2) * 2 + j.view(3, 2)).view(-1)))
    fused, i, j = fuse.compile(model), torch.tensor([0, 1, 0, 1, 1, 0]), torch.tensor([0, 1, 1, 0, 1, 0])
    table = torch.randn(4, 3)
    assert torch.equal(fused(table, i, j), model(table, i, j))
    assert fused.last_run.launches == 1
    with pytest.raises(IndexError):
        fused(table, i + 1, j)


def in_a_piece(x: Tensor, i: Tensor) -> tuple[Tensor]:
    return (torch.cat([torch.ones(5).index_select(0, i), x[:3]]).tanh(),)


def in_a_padding(x: Tensor, i: Tensor) -> tuple[Tensor]:
    return (F.pad(torch.full((5,), 2.0)[i], (1, 2)) * x,)


@pytest.mark.parametrize("function", [in_a_piece, in_a_padding], ids=lambda one: one.__name__)
def test_a_look_up_in_equal_numbers_under_a_condition_has_a_kernel(
    function: Callable[..., tuple[Tensor]], run: Callable[..., Any]
) -> None:
    run(function, torch.randn(6), torch.tensor([4, 0, 2])).check()


def test_a_mask_is_no_look_up() -> None:
    with torch.no_grad():
        assert_fuses(Looking(lambda t, i, j: t[i, j > 0]), torch.randn(5, 3, 6), torch.tensor([4]), SECOND)


@pytest.mark.parametrize(("first", "second"), [(5, 0), (-6, 2), (0, 3), (4, -4), (0, 2**40), (2**62, 0)])
def test_a_position_out_of_range_raises_though_the_place_is_within_the_table(first: int, second: int) -> None:
    model = Looking(lambda t, i, j: t[i, j])
    fused = fuse.compile(model)
    fused(TABLE, FIRST, SECOND)
    positions = FIRST.clone(), SECOND.clone()
    positions[0][1], positions[1][1] = first, second
    with pytest.raises(IndexError) as eager:
        model(TABLE, *positions)
    with pytest.raises(IndexError) as ours:
        fused(TABLE, *positions)
    assert str(ours.value) == str(eager.value)


@pytest.mark.parametrize("steps", [9, 30])
def test_the_score_of_tags_is_one_launch_and_its_gradient_one_for_each_table(steps: int) -> None:
    arguments: tuple[Any, ...] = torch.randn(steps, 4, 8), torch.randint(0, 8, (steps, 4))
    assert_fuses(Score(), *arguments, launches=1)
    model = Score()
    report = check(model, arguments, train=True)
    assert report.passed, report
    fused = fuse.compile(copy.deepcopy(model))
    fused(*arguments).square().sum().backward()
    assert fused.last_run.launches == 1
    assert fused.last_run.backward.launches == 2  # all steps, and what is added for each table


@pytest.mark.parametrize("apart", [False, True])
def test_gradients_of_tables_are_added_up_for_all_steps_at_once(apart: bool) -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 4, 6))

        def forward(self, h: Tensor, first: Tensor, second: Tensor) -> Tensor:
            for i, j in zip(first, second, strict=True):
                h = torch.tanh(h + (self.table[i, :, j] if apart else self.table[i, j][:, :4]))
            return h

    for steps in (8, 24):
        arguments = torch.randn(3, 4), torch.randint(-5, 5, (steps, 3)), torch.randint(-4, 4, (steps, 3))
        report = check(Steps(), arguments, train=True)
        assert report.passed, report
        fused = fuse.compile(Steps())
        fused(*arguments).square().sum().backward()
        assert fused.last_run.launches == 1
        assert fused.last_run.backward.launches <= 5
