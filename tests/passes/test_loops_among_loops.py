"""Loops one after another and loops within loops: all of them roll, whatever their length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor, nn

from fuse.testing import assert_fuses

BATCH, WIDTH, LAYERS = 3, 20, 5
LENGTHS = (7, 12)
Steps = Sequence[Tensor] | Tensor


class Model(nn.Module):
    def __init__(self, run: Callable[[Model, Tensor], object]) -> None:
        super().__init__()
        self.run = run
        self.inputs = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        self.states = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        self.wide = nn.ModuleList(nn.Linear(2 * WIDTH, 4 * WIDTH) for _ in range(2))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> object:
        return self.run(self, x)


def zeros(x: Steps) -> Tensor:
    return torch.zeros(BATCH, WIDTH, dtype=x[0].dtype)


def lstm(x: Steps, inputs: nn.Module, states: nn.Module, order: Iterable[int]) -> list[Tensor]:
    h = c = zeros(x)
    outputs = []
    for t in order:
        i, f, g, o = (inputs(x[t]) + states(h)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return outputs


def both_ways(m: Model, x: Steps, inputs: Sequence[nn.Module]) -> list[Tensor]:
    steps = range(len(x))
    forward = lstm(x, inputs[0], m.states[0], steps)
    backward = lstm(x, inputs[1], m.states[1], reversed(steps))
    return [torch.cat(pair, 1) for pair in zip(forward, backward[::-1], strict=True)]


def bidirectional(m: Model, x: Tensor) -> object:
    return torch.stack(both_ways(m, x, m.inputs[:2]))


def bidirectional_in_two_layers(m: Model, x: Tensor) -> object:
    return torch.stack(both_ways(m, both_ways(m, x, m.inputs[:2]), m.wide))


def other_weights_on_the_same_input(m: Model, x: Tensor) -> object:
    h, g = zeros(x), zeros(x)
    for step in x:
        h = torch.tanh(step + m.first(h))
    for step in x:
        g = torch.tanh(step + m.second(g))
    return h, g


def other_weights_on_the_last_state(m: Model, x: Tensor) -> object:
    h = x[0]
    for _ in x:
        h = h + 0.1 * torch.tanh(m.first(h))
    for _ in x:
        h = h + 0.1 * torch.tanh(m.second(h))
    return h


def layers_of_lists(m: Model, x: Tensor) -> object:
    outputs: Steps = x
    for inputs, states in zip(m.inputs, m.states, strict=True):
        outputs = lstm(outputs, inputs, states, range(len(x)))
    return torch.stack(list(outputs))


def layers_of_tensors(m: Model, x: Tensor) -> object:
    last = []
    for inputs, states in zip(m.inputs, m.states, strict=True):
        x = torch.stack(lstm(x, inputs, states, range(len(x))))
        last.append(x[-1])
    return x, torch.stack(last)


def layers_within_a_step(m: Model, x: Tensor) -> object:
    h, outputs = [zeros(x) for _ in range(LAYERS)], []
    for step in x:
        for layer, (inputs, states) in enumerate(zip(m.inputs, m.states, strict=True)):
            h[layer] = step = torch.tanh((inputs(step) + states(h[layer]))[:, :WIDTH])
        outputs.append(step)
    return torch.stack(outputs)


def equal_steps_within_a_step(m: Model, x: Tensor) -> object:
    h, outputs = zeros(x), []
    for step in x:
        for _ in range(5):
            h = torch.tanh(m.first(h) + step)
        outputs.append(h)
    return torch.stack(outputs)


def equal_steps_and_another(m: Model, x: Tensor) -> object:
    h, outputs = zeros(x), []
    for step in x:
        for _ in range(5):
            h = h + 0.1 * torch.tanh(m.first(h))
        h = torch.sigmoid(m.second(h) + step)
        outputs.append(h)
    return torch.stack(outputs)


def encoder_and_decoder_with_a_loss(m: Model, x: Tensor) -> object:
    """A step of the decoder begins with a whole step of the encoder, of other inputs and weights."""
    h, loss = zeros(x), 0.0
    for step in x:
        h = torch.tanh(m.first(step) + h)
    for t in range(len(x) - 1):
        h = torch.tanh(m.second(x[t].neg()) + h)
        loss = loss + nn.functional.mse_loss(h, x[t + 1])
    return loss


MODELS = {
    bidirectional: (2, 2),
    bidirectional_in_two_layers: (6, 4),
    other_weights_on_the_same_input: (2, 2),
    other_weights_on_the_last_state: (2, 2),
    layers_of_lists: (5, LAYERS),
    layers_of_tensors: (5, LAYERS),
    layers_within_a_step: (1, 1),
    equal_steps_within_a_step: (1, 1),
    equal_steps_and_another: (1, 1),
    encoder_and_decoder_with_a_loss: (4, 2),
}


@pytest.mark.sampled
@pytest.mark.parametrize("run", MODELS, ids=lambda run: run.__name__)
def test_every_loop_rolls_and_launches_do_not_grow(run: Callable[[Model, Tensor], object]) -> None:
    torch.manual_seed(0)
    launches, loops = MODELS[run]
    model = Model(run).eval()
    for length in LENGTHS:
        with torch.no_grad():
            report = assert_fuses(model, torch.randn(length, BATCH, WIDTH), launches=launches)
        assert report.after.by_kind["loop"] == loops


def test_one_step_unlike_the_others_between_two_loops_leaves_both_to_themselves() -> None:
    def run(m: Model, x: Tensor) -> object:
        h = zeros(x)
        for t in range(len(x)):
            h = torch.tanh(x[t] + (m.second if t == 6 else m.first)(h))
        return h

    with torch.no_grad():
        report = assert_fuses(Model(run).eval(), torch.randn(14, BATCH, WIDTH))
    assert report.after.by_kind["loop"] == 2
