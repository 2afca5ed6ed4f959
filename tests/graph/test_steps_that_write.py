"""Steps that write: to memory of their own, or one place each of a tensor that nothing else reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule

import fuse
from fuse.graph.capture import capture, capture_short
from fuse.graph.functional.short_graphs import StepsNeeded, whole_graph
from fuse.testing import assert_fuses
from tests.graph.test_short_graphs import BATCH, STEPS, WIDTH, Cell, Step, agree, plain, results
from tests.graph.test_short_graphs import ENDS as READS_OF_STATES

Ends = Callable[[list[Tensor]], Any]
HALF = WIDTH // 2


# ---- memory of a step ------------------------------------------------------------------------------------------------


def in_place(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    new = cell.linear(h)
    new += x[:, t]
    return new.tanh_()


def parts_in_place(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    a, b = torch.unsafe_chunk(cell.linear(h) + x[:, t], 2, 1)
    return torch.cat([a.tanh_(), b.sigmoid_().mul_(a)], 1)


def base_read_afterwards(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    whole = cell.linear(h) + x[:, t]
    a, b = torch.unsafe_chunk(whole, 2, 1)
    a.sigmoid_()
    b.mul_(a)
    return whole.tanh()


def part_read_after_its_base_was_written(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    whole = cell.linear(h)
    part = whole[:, :HALF]
    early = part * 1.0
    whole.add_(x[:, t]).tanh_()
    return whole * 0.5 + torch.cat([part, early], 1)


def part_is_the_state(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    whole = torch.cat([cell.linear(h), x[:, t]], 1)
    state = whole[:, :WIDTH]
    whole.tanh_()
    return state


def part_of_the_step_before(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    before = cell.part if t else h[:, :HALF]
    new = torch.tanh(x[:, t] + cell.linear(h))
    cell.part = new[:, HALF:]
    new.mul_(0.5)
    return torch.cat([new[:, :HALF], new[:, HALF:] * before], 1).add_(0.25)


def copies_a_part(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    new = cell.linear(h).tanh()
    new[:, :HALF] = x[:, t, :HALF]
    new[:, HALF:].copy_(h[:, HALF:])
    return new * 0.5


def zeros_of_its_own(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    new = torch.zeros_like(h)
    new += x[:, t]
    new += cell.linear(h)
    return new.tanh_()


def clone_of_the_state(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    new = h.clone()
    return new.mul_(0.5).add_(cell.linear(x[:, t])).clamp_(-1, 1)


def skips_a_write(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    new = cell.linear(h).add_(x[:, t])
    return new.tanh_() if t != 30 else new


def writes_another_number(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    return in_place(cell, x, h, t).mul_(0.5 if t == 30 else 0.75)


def writes_another_part(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    new = plain(cell, x, h, t)
    new[:, (0 if t != 33 else 1) :: 2].mul_(0.5)
    return new


def writes_what_was_there_once_more(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    new = in_place(cell, x, h, t)
    if t == 25:
        cell.kept = new
    if t == 35:
        cell.kept.add_(1)  # a state that was stacked, and is no longer read by steps
    return new


def writes_the_state_before(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    h.mul_(0.5)
    return in_place(cell, x, h, t)


def writes_a_part_of_the_state_before(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    new = in_place(cell, x, h, t)
    h[:, :1].zero_()
    return new


def writes_what_it_views_of_the_state_before(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    new = in_place(cell, x, h, t)
    h.view(-1).add_(1)
    return new


def writes_the_first_state_only(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    if not t:
        h.add_(1)
    return in_place(cell, x, h, t)


def adds_to_what_is_kept(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    if not t:
        cell.sum = torch.zeros_like(h)
    new = in_place(cell, x, h, t)
    cell.sum.add_(new)
    return new if t < STEPS - 1 else new + cell.sum


def reads_what_it_adds_to(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    if not t:
        cell.sum = torch.zeros_like(h)
    cell.sum.add_(x[:, t])
    return in_place(cell, x, h, t) * cell.sum


def writes_the_input_as_it_goes(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    x[:, t].mul_(0.5)
    return in_place(cell, x, h, t)


def overlaps(cell: Cell, x: Tensor, h: Tensor, t: int) -> Tensor:
    new = cell.linear(h).tanh()
    new[:, :HALF].add_(new[:, HALF:])
    new.mul_(new)
    return new + x[:, t]


OWN = [
    in_place,
    parts_in_place,
    base_read_afterwards,
    part_read_after_its_base_was_written,
    copies_a_part,
    clone_of_the_state,
    overlaps,
]
OTHERS = [
    zeros_of_its_own,
    part_is_the_state,
    part_of_the_step_before,
    skips_a_write,
    writes_another_number,
    writes_another_part,
    writes_what_was_there_once_more,
    writes_the_state_before,
    writes_a_part_of_the_state_before,
    writes_what_it_views_of_the_state_before,
    writes_the_first_state_only,
    adds_to_what_is_kept,
    reads_what_it_adds_to,
    writes_the_input_as_it_goes,
]


@pytest.mark.parametrize("step", OWN)
def test_steps_that_write_memory_of_their_own_become_a_loop(step: Step) -> None:
    assert agree(step) == "rolled"


@pytest.mark.parametrize("step", OTHERS)
def test_a_write_that_differs_or_goes_elsewhere_stays_right(step: Step) -> None:
    agree(step)


@pytest.mark.parametrize("ends", READS_OF_STATES)
@pytest.mark.parametrize("step", [parts_in_place, part_is_the_state])
def test_whatever_reads_steps_that_write_reads_what_they_are(step: Step, ends: Ends) -> None:
    agree(step, ends)


def views_of_the_last(states: list[Tensor]) -> Any:
    last = states[-1]
    return last[:, 1], last, last.t()


def written_twice(states: list[Tensor]) -> Any:
    last, view = states[-1], states[-1][:, :2]
    last.mul_(2).add_(1)
    view.add_(3)
    return torch.stack(states), last, view, states[-2] * 2


def written_and_others_read(states: list[Tensor]) -> Any:
    states[-1].mul_(2).add_(1).sub_(0.5)
    return states[-1], states[18] + states[-1]


@pytest.mark.parametrize("ends", [views_of_the_last, written_twice, written_and_others_read])
@pytest.mark.parametrize("step", [in_place, base_read_afterwards, part_is_the_state])
def test_what_is_written_behind_the_loop_counts_on(step: Step, ends: Ends) -> None:
    agree(step, ends)


@pytest.mark.parametrize("step", [parts_in_place, base_read_afterwards])
def test_steps_that_write_launch_as_the_whole_graph_does(step: Step) -> None:
    assert_fuses(Cell(step), torch.randn(BATCH, STEPS, WIDTH))


class Cells(nn.Module):
    """A cell of PyTorch's, step by step; ``results`` is what the call returns."""

    def __init__(self, cell: nn.Module, hook: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.cell = cell
        if hook is not None:
            cell.register_forward_hook(hook)

    def forward(self, x: Tensor) -> Any:
        state: Any = None
        states = []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            states.append(state if isinstance(state, Tensor) else state[0])
        return torch.stack(states, 1), state


CELLS = [nn.RNNCell, nn.GRUCell, nn.LSTMCell]


@pytest.mark.parametrize("cell", CELLS)
def test_cells_of_pytorch_are_left_out(cell: type[nn.Module]) -> None:
    model = Cells(cell(WIDTH, WIDTH))
    with torch.no_grad():
        sizes = [len(capture_short(model, (torch.zeros(2, n, WIDTH),), {}).graph.nodes) for n in (100, 400)]
    assert sizes[0] == sizes[1]
    assert_fuses(model, torch.randn(BATCH, STEPS, WIDTH), launches=1)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("last", [False, True])
def test_a_hook_that_writes_late_is_followed(cell: type[nn.Module], last: bool) -> None:
    def halve(module: nn.Module, args: Any, result: Any) -> None:
        if args[0].storage_offset() == WIDTH * (STEPS - 1 if last else 30):
            (result if isinstance(result, Tensor) else result[1]).mul_(0.5)

    torch.manual_seed(0)
    model, x = Cells(cell(WIDTH, WIDTH), halve).double(), torch.randn(BATCH, STEPS, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        expected = model(x)
        found = results(capture(model, (x,)), model, x)
        short = capture_short(model, (x,), {})
        rewritten(short, model, x, found)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-12)


@given(
    st.sampled_from(CELLS),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(32, 70),
    st.integers(0, 69),
    st.sampled_from(["write", "number", "part", "nothing"]),
)
@settings(max_examples=20, deadline=None)
def test_any_late_difference_of_a_cell_is_seen(
    cell: type[nn.Module], batch: int, width: int, steps: int, odd: int, how: str
) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell(width, width)

        def forward(self, x: Tensor) -> Any:
            state: Any = None
            states = []
            for t in range(steps):
                state = self.cell(x[t], state)
                h = state if isinstance(state, Tensor) else state[0]
                if t == odd:
                    if how == "write":
                        h.mul_(0.5)
                    elif how == "number":
                        h = h * 0.5
                    elif how == "part":
                        h[:, 0] = 0.25
                states.append(h)
            return torch.stack(states), state

    torch.manual_seed(0)
    model, x = Odd().double(), torch.randn(steps, batch, width, dtype=torch.float64)
    with torch.no_grad():
        expected = results(capture(model, (x,)), model, x)
        rewritten(capture_short(model, (x,), {}), model, x, expected)
        torch.testing.assert_close(expected[0], model(x)[0], rtol=1e-9, atol=1e-12)


def rewritten(graph: GraphModule, model: nn.Module, x: Tensor, expected: list[Tensor]) -> None:
    """Rewrite a graph, short or not; it computes what is expected."""
    whole = graph
    try:
        fuse.run_passes(graph)
    except StepsNeeded:
        whole = whole_graph(graph)
        fuse.run_passes(whole)
    torch.testing.assert_close(results(whole, model, x), expected, rtol=1e-9, atol=1e-12)
