"""Cells: what is carried from step to step, what a step reads, and the numbers that change with it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.passes.cells.table import BATCH, WIDTH, Model, States, cell, zeros

# ---- states ----------------------------------------------------------------------------------------------------------


@cell(1, "input by indexing", "input at t")
def one_state(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + m.second(x[t])),)


@cell(1, "several states", "states that are results", "input at t", "kept by stack", states=2)
def two_states(m: Model, x: Tensor, t: int, h: Tensor, c: Tensor) -> States:
    i, f, g, o = (m.inputs(x[t]) + m.hidden(h)).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


@cell(1, "lag of several steps", start=lambda x: (x[0], x[1]))
def lag_of_two(m: Model, x: Tensor, t: int, h: Tensor, before: Tensor) -> States:
    return torch.tanh(m.square(h) + 0.5 * before + x[t]), h


@cell(1, "lag of several steps", start=lambda x: (x[0], x[1], x[2]))
def lags_with_different_firsts(m: Model, x: Tensor, t: int, a: Tensor, b: Tensor, c: Tensor) -> States:
    return torch.tanh(m.square(a) - 0.3 * c + 0.2 * b), a, b


@cell(1, "lag of several steps", start=lambda x: (x[0], x[1], x[2]))
def lag_of_three_alone(m: Model, x: Tensor, t: int, a: Tensor, b: Tensor, c: Tensor) -> States:
    return torch.tanh(m.square(c) + x[t]), a, b


@cell(1, "lag of several steps", states=3)
def lag_of_three_from_zeros(m: Model, x: Tensor, t: int, a: Tensor, b: Tensor, c: Tensor) -> States:
    return torch.tanh(m.square(c) + x[t]), a, b


@cell(1, states=2)
def state_that_starts_from_a_function_of_zeros(m: Model, x: Tensor, t: int, h: Tensor, c: Tensor) -> States:
    h = torch.tanh(m.square(torch.sigmoid(c) * h) + x[t])
    return h, torch.tanh(c * 0.5) + h


@cell(1, start=lambda x: (zeros(x), torch.ones(BATCH, WIDTH, dtype=x.dtype)))
def state_known_beforehand(m: Model, x: Tensor, t: int, h: Tensor, s: Tensor) -> States:
    return torch.tanh(m.square(h) * s + x[t]), s * 0.9


@cell(1, start=lambda x: (zeros(x), torch.arange(WIDTH)))
def table_known_beforehand(m: Model, x: Tensor, t: int, h: Tensor, places: Tensor) -> States:
    return torch.tanh(m.square(h) + x[t] * (0.1 * places).sin()), places + 3


@cell(1, start=lambda x: (zeros(x), torch.zeros((), dtype=torch.long)))
def counter(m: Model, x: Tensor, t: int, h: Tensor, n: Tensor) -> States:
    return torch.tanh(m.square(h) / (n + 1) + x[t]), n + 1


@cell(1, "swapped states", start=lambda x: (x[0], x[1]))
def states_swapped(m: Model, x: Tensor, t: int, a: Tensor, b: Tensor) -> States:
    return torch.tanh(m.square(b) + x[t]), a * 0.5


@cell(1, "layers in a step", "several states", states=3)
def layers_inside_the_time_loop(m: Model, x: Tensor, t: int, a: Tensor, b: Tensor, c: Tensor) -> States:
    a = torch.tanh(m.square(a) + x[t])
    b = torch.tanh(m.second(b) + a)
    return torch.tanh(m.third(c) + b), a, b


@cell(1, "shared weights", start=lambda x: (x[0],))
def layers_that_share_weights(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (h + m.second(torch.relu(m.square(m.norm(h)))),)


# ---- what a step reads -----------------------------------------------------------------------------------------------


@cell(2, "input reversed", prepare=lambda x: x.flip(0))
def backwards(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[-1 - t]),)


@cell(2, "input strided", prepare=lambda x: torch.cat([x, x.exp()]))
def every_second(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[2 * t]),)


@cell(1, "input by unbind", prepare=lambda x: x.unbind())
def unbound(m: Model, x: list[Tensor], t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]),)


@cell(1, "input by iteration", prepare=lambda x: list(reversed([*x])))
def iterated(m: Model, x: list[Tensor], t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]),)


@cell(2, "input by split", prepare=lambda x: x.transpose(0, 1).flatten(1).split(WIDTH, 1))
def split(m: Model, x: list[Tensor], t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]),)


@cell(2, "input by chunk", prepare=lambda x: x.permute(0, 2, 1).flatten(0, 1).chunk(x.shape[0]))
def chunked(m: Model, x: list[Tensor], t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t].t()),)


@cell(2, prepare=lambda x: torch.cat([x, x.sin(), x.cos()]))
def windows_side_by_side(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[3 * t : 3 * t + 3].sum(0)),)


@cell(2, prepare=lambda x: torch.cat([x, x[:2]]).transpose(0, 1))
def windows_that_overlap(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[:, t : t + 3].amax(1)),)


@cell(1, "no input", start=lambda x: (x[0],))
def nothing(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (h + 0.1 * torch.tanh(m.square(h)),)


# ---- numbers that change from step to step ---------------------------------------------------------------------------


@cell(1, "affine constants")
def affine_numbers(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) * (t / 20) + (x[t] - 0.01 * t)),)


@cell(1, "looked-up constants")
def looked_up_numbers(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(math.sin(t) - m.square(h) * 0.9 ** (t * t) + x[t]),)


@cell(1, "affine constants")
def time_that_two_steps_share(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    def slope(h: Tensor, time: float) -> Tensor:
        return torch.tanh(m.square(h) + time * m.norm.weight)

    first = slope(h, 0.3 * t)
    return (h + 0.05 * (first + slope(h + 0.1 * first, 0.3 * (t + 1))),)


@cell(2, prepare=lambda x: (x, x.transpose(0, 1).contiguous()))
def inputs_put_together(m: Model, given: tuple[Tensor, Tensor], t: int, h: Tensor) -> States:
    x, other = given
    return (torch.tanh(m.square(h) + m.second(torch.cat([x[t][:, :5].sin(), other[:, t, 5:]], 1))),)


@cell(1, prepare=lambda x: (x, (x[0, :, 0].abs() * x.shape[0]).long()))
def lengths_of_sequences(m: Model, given: tuple[Tensor, Tensor], t: int, h: Tensor) -> States:
    x, lengths = given
    return (torch.where((t < lengths).unsqueeze(1), torch.tanh(m.square(h) + x[t]), h),)
