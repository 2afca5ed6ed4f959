"""Steps roll up only when every operand of every step proves to be the same kind of thing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fuse.graph.capture import capture
from fuse.graph.loop import StepInput
from fuse.graph.periods import find_repetitions
from fuse.loops import rolling
from fuse.loops.building import build
from fuse.loops.moving_reads import Moved
from fuse.loops.reads import Obstacle, anchors, token
from fuse.rewrite.pipeline import run_passes

STEPS, WIDTH = 6, 5


class Model(nn.Module):
    def __init__(self, forward: Callable[..., object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.run = forward

    def forward(self, *args: Tensor) -> object:
        return self.run(self.weight, *args)


def proved(forward: Callable[..., object], *args: Tensor) -> rolling.Rolled | Obstacle:
    graph = capture(Model(forward), args)
    run_passes(graph, ["common_subexpressions", "view_chains", "no_ops", "dead_code"])
    nodes = anchors(graph.graph)
    runs = find_repetitions([token(node) for node in nodes], 4)
    assert runs, "no repeated stretch"
    run = runs[0]
    return rolling.prove([nodes[at : at + run.period] for at in range(run.start, run.end, run.period)])


def recurrence(step: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def forward(weight: Tensor, x: Tensor) -> Tensor:
        h = x[0]
        for t in range(1, STEPS + 1):
            h = step(weight, x, h, t)
        return h

    return forward


X = torch.randn(STEPS + 2, 3, WIDTH)


@pytest.mark.parametrize(
    ("step", "how"),
    [
        (lambda w, x, h, t: torch.tanh(x[t] + h @ w), StepInput(0, 1, 1)),
        (lambda w, x, h, t: torch.tanh(x[-1 - t] + h @ w), StepInput(0, STEPS, -1)),
        (lambda w, x, h, t: torch.tanh(x.view(-1, 3 * WIDTH).view(-1, 3, WIDTH)[t] + h @ w), StepInput(0, 1, 1)),
        (lambda w, x, h, t: torch.tanh(x[t : t + 1].squeeze(0) + h @ w), StepInput(0, 1, 1)),
    ],
    ids=["forward", "reversed", "through views", "slices"],
)
def test_an_input_that_moves_evenly_is_read_per_step(step: Callable[..., Tensor], how: StepInput) -> None:
    rolled = proved(recurrence(step), X)
    assert isinstance(rolled, rolling.Rolled)
    assert [m.how for m in rolled.inputs] == [how]
    assert len(rolled.carries) == 1


def test_no_input_per_step_is_fine() -> None:
    rolled = proved(recurrence(lambda w, x, h, t: torch.tanh(h @ w) * 0.5), X)
    assert isinstance(rolled, rolling.Rolled)
    assert not rolled.inputs


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda w, x, h, t: torch.tanh(x[t if t != 4 else 0] + h @ w), "not evenly spaced"),
        (lambda w, x, h, t: torch.tanh(x[t * t % 7] + h @ w), "another part in some steps"),
    ],
    ids=["one other step", "not affine"],
)
def test_near_misses_do_not_roll(step: Callable[..., Tensor], reason: str) -> None:
    rolled = proved(recurrence(step), X)
    assert isinstance(rolled, Obstacle)
    assert reason in rolled.reason


def test_independent_steps_are_no_loop() -> None:
    rolled = proved(lambda weight, x: [torch.tanh(x[t] @ weight) for t in range(STEPS)], X)
    assert isinstance(rolled, Obstacle)
    assert "no value is carried" in rolled.reason


def test_a_carry_swapped_at_one_step_does_not_roll() -> None:
    def forward(weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x[0], x[1]
        for t in range(STEPS):
            a, b = torch.tanh(a @ weight), torch.tanh(b @ weight + x[t])
            if t == 3:
                a, b = b, a
        return a, b

    assert isinstance(proved(forward, X), Obstacle)


def test_operands_in_another_order_do_not_correspond() -> None:
    def forward(weight: Tensor, x: Tensor) -> Tensor:
        h = x[0]
        for t in range(STEPS):
            d = h - x[t] if t != 3 else x[t] - h
            h = torch.tanh(d)
        return h

    assert isinstance(proved(forward, X), Obstacle)


def test_a_loop_gives_what_its_steps_give() -> None:
    def forward(weight: Tensor, x: Tensor) -> Tensor:
        return recurrence(lambda w, x, h, t: torch.tanh(x[t] + h @ w))(weight, x)

    rolled = proved(forward, X)
    assert isinstance(rolled, rolling.Rolled)
    built = build(rolled)
    weight = torch.randn(WIDTH, WIDTH)
    values = [X if isinstance(o, Moved) else X[0] if o.name.startswith("select") else weight for o in built.operands]
    torch.testing.assert_close(built.loop(*values)[0], forward(weight, X))


def test_a_slice_without_a_start_does_not_correspond() -> None:
    def forward(weight: Tensor, x: Tensor) -> Tensor:
        h = x[:3]
        for t in range(STEPS):
            h = torch.tanh(h + torch.ops.aten.slice.Tensor(x, 0, None if t == 3 else t, 3 if t == 3 else t + 3))
        return h

    assert isinstance(proved(forward, X), Obstacle)
