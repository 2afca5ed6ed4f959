"""A tensor that steps of a loop fill, one place each, is a stack of what they write, wherever that can be proved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuse
from fuse.graph.capture import capture, capture_short
from fuse.testing import assert_fuses
from tests.graph.test_short_graphs import agreed, results

STEPS, BATCH, WIDTH = 40, 3, 6
Write = Callable[["Filling", Tensor, Tensor, int], None]


def by_time(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape[1], x.shape[0], WIDTH)


def by_batch(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def with_the_first_state(x: Tensor) -> Tensor:
    return torch.full((x.shape[1] + 1, x.shape[0], WIDTH), 0.5, dtype=x.dtype)


def the_input(x: Tensor) -> Tensor:
    return x


def a_view(x: Tensor) -> Tensor:
    return x.new_ones(x.shape[0], x.shape[1], WIDTH).transpose(0, 1)


def wider(x: Tensor) -> Tensor:
    return x.new_ones(x.shape[1], x.shape[0], WIDTH + 2)


def narrow(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[1], x.shape[0], WIDTH, dtype=torch.float32)


def long(x: Tensor) -> Tensor:
    return x.new_ones(2 * x.shape[1], x.shape[0], WIDTH)


class Filling(nn.Module):
    """A loop over the time of ``x`` that fills what ``made`` makes by ``write``; ``ends`` makes the results."""

    def __init__(self, made: Callable[[Tensor], Tensor], write: Write, ends: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.cell, self.made, self.write = nn.GRUCell(WIDTH, WIDTH), made, write
        self.ends = ends or (lambda out, h, states: (out, h))

    def forward(self, x: Tensor) -> Any:
        h = x.new_zeros(x.shape[0], WIDTH)
        out, states = self.made(x), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t].clone(), h)
            self.write(self, out, h, t)
            states.append(h)
        return self.ends(out, h, states)


def forwards(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[t] = h


def backwards(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[-1 - t] = h


def downwards(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[STEPS - 1 - t].copy_(h)


def second(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[:, t] = h


def behind_the_first(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[t + 1] = h


def computed(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[t] = (h * 2).tanh_()


def around(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[t - 1] = h


def always_the_same(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[0] = h


def the_same_at_the_end(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[min(t, 35)] = h


def skips_one(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    if t != 30:
        out[t] = h


def another_value(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[t] = h if t != 33 else h * 2


def swaps(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[t ^ 1] = h


def every_other(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[2 * t] = h


def two_places(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[2 * t] = h
    out[2 * t + 1] = -h


def a_slice(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[t : t + 1] = h


def a_part(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[t, :, :WIDTH] = h


def broadcast(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[t] = h[0]


def a_number(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[t] = 2.5


def adds(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[t] += h


def reads_the_place(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    place = out[t]
    place.copy_(h)
    place.mul_(2)


def writes_the_state_later(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[t] = h
    h.mul_(0.5)


def writes_what_is_read_later(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[t] = h
    if t:
        h.add_(out[t - 1])


def reads_all_in_a_late_step(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[t] = h
    if t == 34:
        h.add_(out.sum(0))


def fills_all_in_a_late_step(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[t] = h
    if t == 34:
        out.zero_()


def the_input_of_later_steps(model: Filling, out: Tensor, h: Tensor, t: int) -> None:
    out[:, (t + 1) % STEPS] = h


USUAL = [
    (by_time, forwards),
    (by_time, backwards),
    (by_time, downwards),
    (by_batch, second),
    (with_the_first_state, behind_the_first),
    (with_the_first_state, forwards),
    (by_time, computed),
    (by_time, writes_the_state_later),
]
OTHERS = [
    (by_time, around),
    (by_time, always_the_same),
    (by_time, the_same_at_the_end),
    (by_time, skips_one),
    (by_time, another_value),
    (by_time, swaps),
    (long, every_other),
    (long, two_places),
    (long, forwards),
    (by_time, a_slice),
    (wider, a_part),
    (by_time, broadcast),
    (by_time, a_number),
    (by_time, adds),
    (by_time, reads_the_place),
    (by_time, writes_what_is_read_later),
    (by_time, reads_all_in_a_late_step),
    (by_time, fills_all_in_a_late_step),
    (the_input, second),
    (the_input, the_input_of_later_steps),
    (a_view, forwards),
    (narrow, forwards),
]


def as_it_is(out: Tensor, h: Tensor, states: list[Tensor]) -> Any:
    return out


def with_all_states(out: Tensor, h: Tensor, states: list[Tensor]) -> Any:
    return out, torch.stack(states), torch.cat(states, 1), h


def a_state_in_the_middle(out: Tensor, h: Tensor, states: list[Tensor]) -> Any:
    return out * states[20]


def a_place(out: Tensor, h: Tensor, states: list[Tensor]) -> Any:
    return out[20], out


def turned(out: Tensor, h: Tensor, states: list[Tensor]) -> Any:
    return out.transpose(0, 1)


def written_once_more(out: Tensor, h: Tensor, states: list[Tensor]) -> Any:
    out[1] = 5
    out.mul_(2)
    out[-1].add_(1)
    h.add_(3)
    return out, h


def written_and_a_state_read(out: Tensor, h: Tensor, states: list[Tensor]) -> Any:
    out.mul_(2)
    out[3] = h
    return out, states[25] + 1, out[25]


def states_written(out: Tensor, h: Tensor, states: list[Tensor]) -> Any:
    for state in states[-2:]:
        state.zero_()
    return out, h


def filled_again(out: Tensor, h: Tensor, states: list[Tensor]) -> Any:
    for t in range(STEPS):
        h = torch.tanh(h + states[t])
        out[t] = h
    return out, h


def read_by_a_loop(out: Tensor, h: Tensor, states: list[Tensor]) -> Any:
    more = torch.empty_like(out)
    for t in range(STEPS):
        h = torch.tanh(h * out[t])
        more[t] = h
    return more, h, out


def unread(out: Tensor, h: Tensor, states: list[Tensor]) -> Any:
    return h


ENDS = [
    as_it_is,
    with_all_states,
    a_state_in_the_middle,
    a_place,
    turned,
    written_once_more,
    written_and_a_state_read,
    states_written,
    filled_again,
    read_by_a_loop,
    unread,
]


def model_of(
    made: Callable[[Tensor], Tensor], write: Write, ends: Callable[..., Any] | None = None
) -> tuple[Filling, Tensor]:
    torch.manual_seed(0)
    return Filling(made, write, ends).double(), torch.randn(BATCH, STEPS, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize(("made", "write"), USUAL)
def test_a_filled_tensor_is_a_stack_of_the_loop(made: Callable[[Tensor], Tensor], write: Write) -> None:
    model, x = model_of(made, write)
    assert agreed(model, x) == "rolled"


@pytest.mark.sampled
@pytest.mark.parametrize(("made", "write"), OTHERS)
def test_what_is_filled_in_another_way_stays_right(made: Callable[[Tensor], Tensor], write: Write) -> None:
    agreed(*model_of(made, write))


@pytest.mark.sampled
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("write", [forwards, backwards])
def test_whatever_reads_a_filled_tensor_reads_what_it_holds(write: Write, ends: Callable[..., Any]) -> None:
    agreed(*model_of(by_time, write, ends))


@pytest.mark.parametrize(
    ("made", "write", "ends"),
    [
        (by_time, forwards, written_once_more),
        (by_time, backwards, written_and_a_state_read),
        (with_the_first_state, behind_the_first, filled_again),
        (the_input, second, as_it_is),
        (the_input, the_input_of_later_steps, as_it_is),
    ],
)
def test_a_call_returns_and_writes_what_eager_does(
    made: Callable[[Tensor], Tensor], write: Write, ends: Callable[..., Any]
) -> None:
    model, x = model_of(made, write, ends)
    given, other = x.clone(), x.clone()
    with torch.no_grad():
        torch.testing.assert_close(fuse.compile(model)(given), model(other), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(given, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ends", [as_it_is, a_place, turned, unread])
def test_usual_ends_leave_steps_out(ends: Callable[..., Any]) -> None:
    assert agreed(*model_of(by_time, forwards, ends)) == "rolled"


@pytest.mark.parametrize(("made", "write"), [(by_time, downwards), (with_the_first_state, behind_the_first)])
def test_a_filled_tensor_launches_as_in_the_whole_graph(made: Callable[[Tensor], Tensor], write: Write) -> None:
    assert_fuses(Filling(made, write), torch.randn(BATCH, STEPS, WIDTH))


def test_a_short_graph_of_a_filled_tensor_does_not_grow() -> None:
    with torch.no_grad():
        model, sizes = Filling(by_time, forwards), []
        for steps in (100, 400):
            short = capture_short(model, (torch.zeros(2, steps, WIDTH),), {})
            fuse.run_passes(short)
            sizes.append(len(short.graph.nodes))
    assert sizes[0] == sizes[1]


def test_two_names_of_one_tensor_are_not_filled_apart() -> None:
    class Shared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            held = torch.zeros(2 * STEPS, BATCH, WIDTH, dtype=x.dtype)
            out, read = held[:STEPS], held.flip(0) * 0 + held
            late, h = held[STEPS - 2 :], x[:, 0]
            for t in range(STEPS):
                h = torch.tanh(h + x[:, t] + read[t] + late[0])
                held[t] = h
            return torch.cat([held, out])

    torch.manual_seed(0)
    x = torch.randn(BATCH, STEPS, WIDTH, dtype=torch.float64)
    agreed(Shared(), x)


@given(
    st.integers(33, 60),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(0, 20),
    st.integers(0, 20),
    st.sampled_from(["up", "down", "negative"]),
    st.integers(0, 200),
)
@settings(max_examples=10, deadline=None)
def test_any_places_one_behind_another(
    steps: int, batch: int, dim: int, before: int, behind: int, order: str, odd: int
) -> None:
    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.RNNCell(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            sizes = [batch, WIDTH]
            sizes.insert(dim, before + steps + behind)
            out, h = x.new_full(sizes, 0.5), x.new_zeros(batch, WIDTH)
            for t in range(steps):
                h = self.cell(x[t], h)
                at = {"up": before + t, "down": before + steps - 1 - t, "negative": -1 - behind - t}[order]
                out.select(dim, at if t != odd else 0).copy_(h)
            return out, h

    torch.manual_seed(0)
    model, x = Places().double(), torch.randn(steps, batch, WIDTH, dtype=torch.float64)
    agreed(model, x)
    with torch.no_grad():
        torch.testing.assert_close(results(capture(model, (x,)), model, x), list(model(x)), rtol=1e-9, atol=1e-12)
