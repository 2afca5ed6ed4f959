"""Equal steps of long loops are left out of the graph that passes see, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fuse
from fuse.graph.capture import capture, capture_short
from fuse.graph.functional.short_graphs import StepsNeeded, is_short, whole_graph
from fuse.testing import assert_fuses

STEPS, BATCH, WIDTH = 40, 3, 6
Step = Callable[["Cell", Tensor, Tensor, int], Tensor]


class Cell(nn.Module):
    """A loop over the time of ``x``; ``ends`` makes the results of all states."""

    def __init__(self, step: Step, ends: Callable[[list[Tensor]], Any] | None = None) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(WIDTH, WIDTH), step
        self.ends = ends or (lambda states: (torch.stack(states, 1), states[-1]))
        self.register_buffer("table", torch.linspace(-1, 1, STEPS * WIDTH).view(STEPS, WIDTH))

    def forward(self, x: Tensor) -> Any:
        h = x.new_zeros(x.shape[0], WIDTH)
        states = []
        for t in range(x.shape[1]):
            h = self.step(self, x, h, t)
            states.append(h)
        return self.ends(states)


def plain(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    return torch.tanh(x[:, t] + cell.linear(h))


def backwards(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    return torch.tanh(x[:, -1 - t] + cell.linear(h))


def of_a_view(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    return torch.tanh(x.transpose(0, 1)[t] + cell.linear(h))


def of_a_buffer(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    return torch.tanh(x[:, t] + cell.table[t] * h)


def in_a_list(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    return cell.linear(torch.cat([x[:, t, :2], h[:, 2:]], 1)).sigmoid()


def gated(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    a, b = cell.linear(h + x[:, t]).chunk(2, 1)
    return torch.cat([torch.tanh(a), b.sigmoid() * 2.0], 1)


def branches(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    return plain(cell, x, h, t) if t != 25 else h + x[:, t]


def another_number(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    return plain(cell, x, h, t) * (0.5 if t == 30 else 0.75)


def another_place(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    return plain(cell, x, h, t if t != 33 else 2)


def reads_an_early_state(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    cell.early = h if t == 20 else cell.early if t else h
    return plain(cell, x, h, t) + (cell.early if t == 35 else h)


def writes(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    h = plain(cell, x, h, t)
    return h.mul_(0.5) if t == 28 else h


def writes_a_state_before(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    new = plain(cell, x, h, t)
    if t == STEPS - 1:
        h.add_(1)
    return new


def writes_the_input(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    if t == 30:
        x.mul_(0.5)
    return plain(cell, x, h, t)


def reads_a_value(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    h = plain(cell, x, h, t)
    return h + 1 if t == 29 and h.sum() > -100 else h


def counts(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    return h + 1


def counts_to_twenty(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    return torch.clamp(h + 1, max=20)


def begins_with_zeros(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    if not t:
        cell.rows = torch.zeros(STEPS, BATCH, WIDTH, dtype=x.dtype)
        cell.rows[30:] = x[:, :10].transpose(0, 1)
    return torch.tanh(cell.rows[t] + cell.linear(h))


def masked_by_numbers(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    if not t:
        cell.rows = torch.tensor([0.0] * 25 + [1.0] * 15, dtype=x.dtype)
    return h + x[:, t] * cell.rows[t]


def other_numbers(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    return plain(cell, x, h, t) * (1 / (t + 1))


def another_sign_of_zero(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    return plain(cell, x, h, t) + torch.sign(1 / (h.exp() * (0.0 if t != 30 else -0.0)))


def in_pairs(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    h = plain(cell, x, h, t)
    return h.relu() if t % 2 else h


LOOPS = [
    plain,
    backwards,
    of_a_view,
    of_a_buffer,
    in_a_list,
    gated,
]
NEAR_MISSES = [
    branches,
    another_number,
    another_place,
    reads_an_early_state,
    writes,
    writes_a_state_before,
    writes_the_input,
    reads_a_value,
    counts,
    counts_to_twenty,
    begins_with_zeros,
    masked_by_numbers,
    other_numbers,
    another_sign_of_zero,
    in_pairs,
]


def all_of(states: list[Tensor]) -> Any:
    return states


def one_of_them(states: list[Tensor]) -> Any:
    return states[20] * 2


def early_ones(states: list[Tensor]) -> Any:
    return torch.stack(states), states[3] + states[1], states[-1]


def last_two(states: list[Tensor]) -> Any:
    return states[-1] * 2, states[-2], states[-1]


def the_other_way(states: list[Tensor]) -> Any:
    return torch.stack(states[::-1], 1), torch.cat(states, 1)


def with_more(states: list[Tensor]) -> Any:
    zeros = torch.zeros_like(states[0])
    return torch.cat([zeros, *states, zeros], 1), torch.stack([states[1], *states])


def most(states: list[Tensor]) -> Any:
    return torch.stack(states[:-1]), torch.stack(states[2:])


def unsqueezed(states: list[Tensor]) -> Any:
    return torch.cat([state.unsqueeze(1) for state in states], 1)


def written_afterwards(states: list[Tensor]) -> Any:
    states[-1].add_(1)
    return torch.stack(states), states[-1]


def reshaped_afterwards(states: list[Tensor]) -> Any:
    return states[-1].unsqueeze_(0), states[-2].t()


def a_second_loop(states: list[Tensor]) -> Any:
    h, seen = states[-1], []
    for state in states:
        h = torch.tanh(h + state)
        seen.append(h)
    return torch.stack(seen)


def a_loop_over_the_stack(states: list[Tensor]) -> Any:
    h, seen, stacked = states[-1], [], torch.stack(states)
    for t in range(STEPS):
        h = torch.tanh(h + stacked[t])
        seen.append(h)
    return torch.stack(seen), h


def nothing_of_it(states: list[Tensor]) -> Any:
    torch.stack(states)
    return states[0] * 2


ENDS = [
    all_of,
    one_of_them,
    early_ones,
    last_two,
    the_other_way,
    with_more,
    most,
    unsqueezed,
    written_afterwards,
    reshaped_afterwards,
    a_second_loop,
    a_loop_over_the_stack,
    nothing_of_it,
]


def results(graph: GraphModule, model: nn.Module, x: Tensor) -> list[Tensor]:
    """What a captured graph computes, in PyTorch."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    given = [
        x.clone() if spec.kind == "argument" else state[spec.name] if spec.value is None else spec.value
        for spec in graph.meta["signature"].inputs
    ]
    return list(graph(*given))


def double(step: Step, ends: Callable[[list[Tensor]], Any] | None = None) -> tuple[Cell, Tensor]:
    torch.manual_seed(0)
    return Cell(step, ends).double(), torch.randn(BATCH, STEPS, WIDTH, dtype=torch.float64)


def agree(step: Step, ends: Callable[[list[Tensor]], Any] | None = None) -> str:
    return agreed(*double(step, ends))


def agreed(model: nn.Module, x: Tensor) -> str:
    """What became of the short graph; whole and rewritten, it computes in float64 what a plain capture does."""
    with torch.no_grad():
        expected = results(capture(model, (x,)), model, x)
        short = capture_short(model, (x,), {})
        if not is_short(short):
            found = results(short, model, x)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            return "whole"
        whole = whole_graph(capture_short(model, (x,), {}))
        whole.graph.lint()
        torch.testing.assert_close(results(whole, model, x), expected, rtol=0, atol=0)
        try:
            fuse.run_passes(short)
        except StepsNeeded:
            return "needed"
        found = results(short, model, x)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        assert [one.stride() for one in found] == [one.stride() for one in expected]
        return "rolled"


@pytest.mark.parametrize("step", LOOPS)
def test_equal_steps_become_a_loop(step: Step) -> None:
    assert agree(step) == "rolled"


class Lstm(nn.Module):
    """Two weights of one shape, and two states of which several cuts carry as many bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.states = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], WIDTH)
        states = []
        for t in range(x.shape[1]):
            i, f, g, o = (self.inputs(x[:, t]) + self.states(h)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        return torch.stack(states, 1)


def test_steps_begin_where_the_loop_begins() -> None:
    model, x = Lstm(), torch.randn(BATCH, 4 * STEPS, WIDTH)
    with torch.no_grad():
        short = capture_short(model, (x,), {})
        fuse.run_passes(short)
        torch.testing.assert_close(results(short, model, x), [model(x)])
    assert_fuses(model, x, launches=1)


@pytest.mark.parametrize("step", NEAR_MISSES)
def test_a_step_that_differs_stays_right(step: Step) -> None:
    agree(step)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("step", [plain, gated])
def test_whatever_reads_the_steps_reads_what_they_are(step: Step, ends: Callable[[list[Tensor]], Any]) -> None:
    agree(step, ends)


@pytest.mark.parametrize("ends", [early_ones, last_two, a_loop_over_the_stack])
def test_usual_ends_leave_steps_out(ends: Callable[[list[Tensor]], Any]) -> None:
    assert agree(plain, ends) == "rolled"


@pytest.mark.parametrize("step", [counts, counts_to_twenty, begins_with_zeros, masked_by_numbers])
def test_what_holds_of_the_first_steps_is_not_taken_to_hold_of_all(step: Step) -> None:
    model, x = double(step)
    with torch.no_grad():
        found = fuse.compile(model)(x)
        torch.testing.assert_close(found, model(x), rtol=1e-9, atol=1e-12)


def test_a_short_graph_does_not_grow_with_the_loop() -> None:
    model = Cell(gated)
    with torch.no_grad():
        sizes = [len(capture_short(model, (torch.zeros(2, n, WIDTH),), {}).graph.nodes) for n in (100, 1000)]
    assert sizes[0] == sizes[1]


def test_the_whole_graph_is_that_of_a_plain_capture() -> None:
    model, x = double(gated)
    with torch.no_grad():
        plainly, whole = capture(model, (x,)), whole_graph(capture_short(model, (x,), {}))
    assert len(plainly.graph.nodes) == len(whole.graph.nodes)
    for one, other in zip(plainly.graph.nodes, whole.graph.nodes, strict=True):
        assert (one.op, one.target, one.meta["source"]) == (other.op, other.target, other.meta["source"])


@pytest.mark.parametrize("step", [plain, gated, in_a_list])
def test_a_long_loop_runs_as_one_kernel_and_as_predicted(step: Step) -> None:
    model = Cell(step)
    assert_fuses(model, torch.randn(BATCH, STEPS, WIDTH), launches=1)
