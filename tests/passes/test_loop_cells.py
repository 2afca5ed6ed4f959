"""Loops as people write them, one for each thing that the prover understands, and near misses of each.

A cell is one step of a loop. It must be right by the oracle at three lengths, without fallback, and its launches must
not grow with the length. The same loop with one step unlike the others must not roll, and be right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from fuse.check.oracle import check
from fuse.graph.capture import capture
from fuse.rewrite.pipeline import run_passes

BATCH, WIDTH = 3, 20
LENGTHS = (9, 12, 19)
SHORT = 6  # one step in the middle that differs leaves no four equal ones on either side
States = tuple[Tensor, ...]
Step = Callable[..., States]


def zeros(x: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape or (BATCH, WIDTH), dtype=x.dtype)


def stacked(kept: list[States]) -> object:
    return torch.stack([states[0] for states in kept]), *kept[-1]


@dataclass(frozen=True)
class Cell:
    """``step(model, x, t, *states)`` with ``states`` of zeros at first; ``finish`` makes the result of all states."""

    step: Step
    launches: int
    states: int = 1
    finish: Callable[[list[States]], object] = stacked
    times: Callable[[int], Iterable[int]] = range
    prepare: Callable[[Tensor], object] = lambda x: x
    start: Callable[[Tensor], States] | None = None
    swaps: bool = False  # whether the states are of one shape, so that they could be swapped

    @property
    def name(self) -> str:
        return self.step.__name__


class Model(nn.Module):
    """Runs a cell, the step in the middle with what ``odd`` makes of the states before and after."""

    def __init__(self, cell: Cell, odd: Callable[[States, States], States] | None = None) -> None:
        super().__init__()
        self.cell, self.odd = cell, odd
        self.inputs = nn.Linear(WIDTH, 4 * WIDTH)
        self.hidden = nn.Linear(WIDTH, 4 * WIDTH)
        self.square, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> object:
        times = list(self.cell.times(x.shape[0]))
        states = self.cell.start(x) if self.cell.start else (zeros(x),) * self.cell.states
        given = self.cell.prepare(x)
        kept = []
        for t in times:
            before = states
            states = self.cell.step(self, given, t, *states)
            if self.odd and t == times[len(times) // 2 - 1]:
                states = self.odd(states, before)
            kept.append(states)
        return self.cell.finish(kept)


CELLS: list[Cell] = []


def cell(launches: int, **options: object) -> Callable[[Step], Step]:
    def register(step: Step) -> Step:
        CELLS.append(Cell(step, launches, **options))  # type: ignore[arg-type]
        return step

    return register


# ---- states ----------------------------------------------------------------------------------------------------------


@cell(2)
def one_state(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + m.second(x[t])),)


@cell(2, states=2, swaps=True)
def two_states(m: Model, x: Tensor, t: int, h: Tensor, c: Tensor) -> States:
    i, f, g, o = (m.inputs(x[t]) + m.hidden(h)).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


@cell(1, start=lambda x: (x[0], x[1]), swaps=True)
def lag_of_two(m: Model, x: Tensor, t: int, h: Tensor, before: Tensor) -> States:
    return torch.tanh(m.square(h) + 0.5 * before + x[t]), h


@cell(1, start=lambda x: (x[0], x[1], x[2]), swaps=True)
def lags_with_different_firsts(m: Model, x: Tensor, t: int, a: Tensor, b: Tensor, c: Tensor) -> States:
    return torch.tanh(m.square(a) - 0.3 * c + 0.2 * b), a, b


@cell(1, start=lambda x: (x[0], x[1], x[2]), swaps=True)
def lag_of_three_alone(m: Model, x: Tensor, t: int, a: Tensor, b: Tensor, c: Tensor) -> States:
    return torch.tanh(m.square(c) + x[t]), a, b


@cell(2, states=3, swaps=True)
def lag_of_three_from_zeros(m: Model, x: Tensor, t: int, a: Tensor, b: Tensor, c: Tensor) -> States:
    return torch.tanh(m.square(c) + x[t]), a, b


@cell(2, states=2, swaps=True)
def state_that_starts_from_a_function_of_zeros(m: Model, x: Tensor, t: int, h: Tensor, c: Tensor) -> States:
    h = torch.tanh(m.square(torch.sigmoid(c) * h) + x[t])
    return h, torch.tanh(c * 0.5) + h


@cell(3, start=lambda x: (zeros(x), torch.ones(BATCH, WIDTH, dtype=x.dtype)))
def state_known_beforehand(m: Model, x: Tensor, t: int, h: Tensor, s: Tensor) -> States:
    return torch.tanh(m.square(h) * s + x[t]), s * 0.9


@cell(3, start=lambda x: (zeros(x), torch.arange(WIDTH)))
def table_known_beforehand(m: Model, x: Tensor, t: int, h: Tensor, places: Tensor) -> States:
    return torch.tanh(m.square(h) + x[t] * (0.1 * places).sin()), places + 3


@cell(3, start=lambda x: (zeros(x), torch.zeros((), dtype=torch.long)))
def counter(m: Model, x: Tensor, t: int, h: Tensor, n: Tensor) -> States:
    return torch.tanh(m.square(h) / (n + 1) + x[t]), n + 1


@cell(1, start=lambda x: (x[0], x[1]), swaps=True)
def states_swapped(m: Model, x: Tensor, t: int, a: Tensor, b: Tensor) -> States:
    return torch.tanh(m.square(b) + x[t]), a * 0.5


@cell(2, states=3, swaps=True)
def layers_inside_the_time_loop(m: Model, x: Tensor, t: int, a: Tensor, b: Tensor, c: Tensor) -> States:
    a = torch.tanh(m.square(a) + x[t])
    b = torch.tanh(m.second(b) + a)
    return torch.tanh(m.third(c) + b), a, b


@cell(1, start=lambda x: (x[0],))
def layers_that_share_weights(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (h + m.second(torch.relu(m.square(m.norm(h)))),)


# ---- what a step reads -----------------------------------------------------------------------------------------------


@cell(3, prepare=lambda x: x.flip(0))
def backwards(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[-1 - t]),)


@cell(3, prepare=lambda x: torch.cat([x, x.exp()]))
def every_second(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[2 * t]),)


@cell(2, prepare=lambda x: x.unbind())
def unbound(m: Model, x: list[Tensor], t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]),)


@cell(2, prepare=lambda x: list(reversed([*x])))
def iterated(m: Model, x: list[Tensor], t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]),)


@cell(3, prepare=lambda x: x.transpose(0, 1).flatten(1).split(WIDTH, 1))
def split(m: Model, x: list[Tensor], t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]),)


@cell(3, prepare=lambda x: x.permute(0, 2, 1).flatten(0, 1).chunk(x.shape[0]))
def chunked(m: Model, x: list[Tensor], t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t].t()),)


@cell(3, prepare=lambda x: torch.cat([x, x.sin(), x.cos()]))
def windows_side_by_side(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[3 * t : 3 * t + 3].sum(0)),)


@cell(3, prepare=lambda x: torch.cat([x, x[:2]]).transpose(0, 1))
def windows_that_overlap(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[:, t : t + 3].amax(1)),)


@cell(1, start=lambda x: (x[0],))
def nothing(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (h + 0.1 * torch.tanh(m.square(h)),)


# ---- numbers that change from step to step ---------------------------------------------------------------------------


@cell(5)
def affine_numbers(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) * (t / 20) + (x[t] - 0.01 * t)),)


@cell(4)
def looked_up_numbers(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(math.sin(t) - m.square(h) * 0.9 ** (t * t) + x[t]),)


@cell(2)
def time_that_two_steps_share(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    def slope(h: Tensor, time: float) -> Tensor:
        return torch.tanh(m.square(h) + time * m.norm.weight)

    first = slope(h, 0.3 * t)
    return (h + 0.05 * (first + slope(h + 0.1 * first, 0.3 * (t + 1))),)


@cell(3, prepare=lambda x: (x, x.transpose(0, 1).contiguous()))
def inputs_put_together(m: Model, given: tuple[Tensor, Tensor], t: int, h: Tensor) -> States:
    x, other = given
    return (torch.tanh(m.square(h) + m.second(torch.cat([x[t][:, :5].sin(), other[:, t, 5:]], 1))),)


@cell(3, prepare=lambda x: (x, (x[0, :, 0].abs() * x.shape[0]).long()))
def lengths_of_sequences(m: Model, given: tuple[Tensor, Tensor], t: int, h: Tensor) -> States:
    x, lengths = given
    return (torch.where((t < lengths).unsqueeze(1), torch.tanh(m.square(h) + x[t]), h),)


# ---- steps at the ends that differ -----------------------------------------------------------------------------------


@cell(5)
def input_of_the_step_before(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t] - x[t - 1]),)


@cell(6)
def input_clamped_at_the_end(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t] - x[min(t + 2, x.shape[0] - 1)]),)


@cell(4)
def first_step_of_another_form(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]) if t else torch.sigmoid(m.third(x[0])),)


@cell(4)
def last_step_of_another_form(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]) if t < x.shape[0] - 1 else torch.sigmoid(m.third(h)),)


@cell(3, times=lambda count: range(2 * count))
def alternating_forms(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t // 2]) if t % 2 else torch.sigmoid(m.second(h)),)


@cell(3, times=lambda count: range(2 * count))
def alternating_weights(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh((m.second if t % 2 else m.square)(h)),)


# ---- what is kept ----------------------------------------------------------------------------------------------------


def side_by_side(kept: list[States]) -> object:
    return torch.cat([states[0].unsqueeze(1) for states in kept], 1)


def last(kept: list[States]) -> object:
    return kept[-1][0]


def backwards_too(kept: list[States]) -> object:
    return torch.stack([states[0] for states in reversed(kept)]), torch.stack([states[0] for states in kept], 1)


def written_in_place(kept: list[States]) -> object:
    h = kept[0][0]
    out = torch.empty(h.shape[0], len(kept), h.shape[1], dtype=h.dtype)
    for t, states in enumerate(kept):
        out[:, t] = states[0]
    return out


def every_state(kept: list[States]) -> object:
    return [states[0] for states in kept]


@cell(2, finish=side_by_side)
def kept_by_cat(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]),)


@cell(2, finish=written_in_place)
def kept_in_place(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]),)


@cell(3, finish=backwards_too)
def kept_backwards_too(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]),)


@cell(3, finish=lambda kept: torch.stack([*every_state(kept), kept[-1][0] * 2]))
def kept_in_a_list_that_goes_on(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]),)


@cell(2, finish=last)
def only_the_last_kept(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]),)


@cell(3, start=lambda x: (zeros(x), x.new_zeros(())), finish=lambda kept: kept[-1][1])
def summed_over_steps(m: Model, x: Tensor, t: int, h: Tensor, loss: Tensor) -> States:
    h = torch.tanh(m.square(h) + x[t])
    return h, loss + (h * h).mean()


# ---- masks -----------------------------------------------------------------------------------------------------------


@cell(3, prepare=lambda x: (x, x[:, :, :1] > 0))
def masked_by_where(m: Model, given: tuple[Tensor, Tensor], t: int, h: Tensor) -> States:
    x, keep = given
    return (torch.where(keep[t], torch.tanh(m.square(h) + x[t]), h),)


@cell(3, prepare=lambda x: (x, (x[:, :, :1] > 0).to(x.dtype)))
def masked_by_product(m: Model, given: tuple[Tensor, Tensor], t: int, h: Tensor) -> States:
    x, keep = given
    return (keep[t] * torch.tanh(m.square(h) + x[t]) + (1 - keep[t]) * h,)


# ---- tests -----------------------------------------------------------------------------------------------------------


def names(cell: Cell) -> str:
    return cell.name


def rolled(model: nn.Module, x: Tensor) -> int:
    ledger = run_passes(capture(model, (x,)))
    return sum(one.count for one in ledger.fired if one.pass_name in ("roll_loops", "roll_whole_loops"))


@pytest.mark.parametrize("cell", CELLS, ids=names)
def test_a_loop_is_right_and_its_launches_do_not_grow(cell: Cell) -> None:
    torch.manual_seed(0)
    model = Model(cell).eval()
    for length in LENGTHS:
        report = check(model, (torch.randn(length, BATCH, WIDTH),))
        assert report.passed, report
        assert not report.fallbacks
        assert report.observed[1] == cell.launches, report


def near_misses() -> Iterator[object]:
    for cell in CELLS:
        yield pytest.param(cell, lambda after, before: (torch.sin(after[0]), *after[1:]), id=f"{cell.name}-changed")
        yield pytest.param(
            cell, lambda after, before: (after[0] + before[0], *after[1:]), id=f"{cell.name}-state read again"
        )
        if cell.swaps:
            yield pytest.param(cell, lambda after, before: (*after[1:], after[0]), id=f"{cell.name}-states swapped")


@pytest.mark.parametrize(("cell", "odd"), near_misses())
def test_a_loop_with_one_step_unlike_the_others_stays(cell: Cell, odd: Callable[[States, States], States]) -> None:
    model = Model(cell, odd).eval()
    x = torch.randn(SHORT, BATCH, WIDTH)
    assert rolled(model, x) == 0
    report = check(model, (x,))
    assert report.passed, report
