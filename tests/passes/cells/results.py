"""Cells: steps that differ at the ends or in turns, what is kept of the steps, and masks."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.passes.cells.table import Model, States, cell, zeros

# ---- steps at the ends that differ -----------------------------------------------------------------------------------


@cell(4, "input at t - 1")
def input_of_the_step_before(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t] - x[t - 1]),)


@cell(5)
def input_clamped_at_the_end(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t] - x[min(t + 2, x.shape[0] - 1)]),)


@cell(3, "first step peeled")
def first_step_of_another_form(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]) if t else torch.sigmoid(m.third(x[0])),)


@cell(3, "last step peeled")
def last_step_of_another_form(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]) if t < x.shape[0] - 1 else torch.sigmoid(m.third(h)),)


@cell(1, "period of two", times=lambda count: range(2 * count))
def alternating_forms(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t // 2]) if t % 2 else torch.sigmoid(m.second(h)),)


@cell(1, "period of two", times=lambda count: range(2 * count))
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


@cell(1, "kept by cat", finish=side_by_side)
def kept_by_cat(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]),)


@cell(1, "kept in place", finish=written_in_place)
def kept_in_place(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]),)


@cell(2, finish=backwards_too)
def kept_backwards_too(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]),)


@cell(2, "kept in a list", finish=lambda kept: torch.stack([*every_state(kept), kept[-1][0] * 2]))
def kept_in_a_list_that_goes_on(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]),)


@cell(1, "only the last", finish=last)
def only_the_last_kept(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.square(h) + x[t]),)


@cell(1, "summed", start=lambda x: (zeros(x), x.new_zeros(())), finish=lambda kept: kept[-1][1])
def summed_over_steps(m: Model, x: Tensor, t: int, h: Tensor, loss: Tensor) -> States:
    h = torch.tanh(m.square(h) + x[t])
    return h, loss + (h * h).mean()


# ---- masks -----------------------------------------------------------------------------------------------------------


@cell(2, "mask by where", prepare=lambda x: (x, x[:, :, :1] > 0))
def masked_by_where(m: Model, given: tuple[Tensor, Tensor], t: int, h: Tensor) -> States:
    x, keep = given
    return (torch.where(keep[t], torch.tanh(m.square(h) + x[t]), h),)


@cell(2, "mask by product", prepare=lambda x: (x, (x[:, :, :1] > 0).to(x.dtype)))
def masked_by_product(m: Model, given: tuple[Tensor, Tensor], t: int, h: Tensor) -> States:
    x, keep = given
    return (keep[t] * torch.tanh(m.square(h) + x[t]) + (1 - keep[t]) * h,)
