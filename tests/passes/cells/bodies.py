"""Cells: loops beside and within loops, integer states, states of other forms, operators that are no arithmetic."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.cells.table import BATCH, WIDTH, Loops, Model, States, cell, whole, zeros


def firsts(kept: list[States]) -> list[Tensor]:
    return [states[0] for states in kept]


# ---- loops beside and within loops -----------------------------------------------------------------------------------


def lstm(m: Model, x: Tensor, h: Tensor, c: Tensor) -> States:
    i, f, g, o = (m.inputs(x) + m.hidden(h)).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


@whole(2, "bidirectional", loops=2)
def bidirectional(m: Model, x: Tensor, loops: Loops) -> object:
    times = range(x.shape[0])
    forward = firsts(loops(lambda t, h, c: lstm(m, x[t], h, c), (zeros(x), zeros(x)), times))
    backward = firsts(loops(lambda t, h: (torch.tanh(m.square(h) + m.second(x[t])),), (zeros(x),), reversed(times)))
    return torch.stack([torch.cat(pair, 1) for pair in zip(forward, backward[::-1], strict=True)])


@whole(2, "stacked", "one after another", loops=2)
def stacked_layers(m: Model, x: Tensor, loops: Loops) -> object:
    layer = firsts(loops(lambda t, h, c: lstm(m, x[t], h, c), (zeros(x), zeros(x)), range(x.shape[0])))
    kept = loops(lambda t, h: (torch.tanh(m.square(h) + m.second(layer[t])),), (zeros(x),), range(x.shape[0]))
    return torch.stack(firsts(kept))


@whole(2, "one after another", loops=2)
def encoder_and_decoder(m: Model, x: Tensor, loops: Loops) -> object:
    encoded = loops(lambda t, h: (torch.tanh(m.square(h) + x[t]),), (zeros(x),), range(x.shape[0]))[-1]
    decoded = loops(lambda t, h: (h + 0.1 * torch.tanh(m.second(h)),), encoded[:1], range(x.shape[0]))
    return torch.stack(firsts(decoded))


@cell(1, "nested")
def nested(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    for _ in range(3):
        h = torch.tanh(m.square(h) + x[t])
    return (h,)


@cell(1, "nested")
def nested_within_another_step(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    for _ in range(3):
        h = h + 0.1 * torch.tanh(m.square(h))
    return (torch.sigmoid(m.second(h) + x[t]),)


# ---- states of integers ----------------------------------------------------------------------------------------------


@cell(1, "argmax fed back", start=lambda x: (zeros(x), torch.zeros(BATCH, dtype=torch.long)))
def greedy_decoder(m: Model, x: Tensor, t: int, h: Tensor, token: Tensor) -> States:
    h = torch.tanh(m.square(h) + m.tokens(token))
    return h, m.second(h).argmax(1)


@cell(1, "Viterbi back-pointers", start=lambda x: (x[0], torch.zeros(BATCH, WIDTH, dtype=torch.long)))
def best_paths(m: Model, x: Tensor, t: int, score: Tensor, pointers: Tensor) -> States:
    best, pointers = (score.unsqueeze(2) + m.square.weight).max(1)
    return best + x[t], pointers


@whole(3, "Viterbi back-pointers", "backward trace by gather", loops=2)
def best_paths_traced(m: Model, x: Tensor, loops: Loops) -> object:
    def forward(t: int, score: Tensor, _: Tensor) -> States:
        best, pointers = (score.unsqueeze(2) + m.square.weight).max(1)
        return best + x[t], pointers

    def backward(t: int, tag: Tensor) -> States:
        return (kept[t][1].gather(1, tag.unsqueeze(1)).squeeze(1),)

    times = range(x.shape[0])
    kept = loops(forward, (x[0], torch.zeros(BATCH, WIDTH, dtype=torch.long)), times)
    path = loops(backward, (kept[-1][0].argmax(1),), reversed(times))
    return torch.stack(firsts(path)[::-1])


# ---- states of other forms -------------------------------------------------------------------------------------------


@cell(1, "matrix states", start=lambda x: (zeros(x, BATCH, WIDTH, WIDTH),))
def fast_weights(m: Model, x: Tensor, t: int, s: Tensor) -> States:
    key = x[t].softmax(1)
    return (0.9 * s + key.unsqueeze(2) * (x[t] - (key.unsqueeze(1) @ s).squeeze(1)).unsqueeze(1),)


@cell(1, "matrix states", start=lambda x: (torch.eye(WIDTH),))
def products_of_states(m: Model, x: Tensor, t: int, p: Tensor) -> States:
    p = m.square.weight @ p @ p.t() + x[t].t() @ x[t]
    return (p / p.norm(),)


@cell(1, "image states", "convolution", prepare=lambda x: x.view(-1, BATCH, 1, 4, 5).expand(-1, -1, 2, -1, -1),
      start=lambda x: (zeros(x, BATCH, 2, 4, 5),))  # fmt: skip
def convolutional(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    return (torch.tanh(m.image(h) + x[t]),)


# ---- other operators -------------------------------------------------------------------------------------------------


@cell(1, "attention", prepare=lambda x: (x, x[:7].transpose(0, 1)))
def attention(m: Model, given: tuple[Tensor, Tensor], t: int, h: Tensor) -> States:
    x, source = given
    weights = F.softmax((source @ m.square(h).unsqueeze(2)).squeeze(2), 1)
    context = (weights.unsqueeze(1) @ source).squeeze(1)
    return (torch.tanh(m.wide(torch.cat([context, x[t]], 1))),)


@cell(-1, "linalg.solve", each=4, prepare=lambda x: (x, torch.eye(WIDTH)))
def equations(m: Model, given: tuple[Tensor, Tensor], t: int, h: Tensor) -> States:
    x, eye = given
    matrix = 0.1 * m.square.weight + eye + torch.diag(h[0] ** 2)
    return (torch.tanh(torch.linalg.solve(matrix, (x[t] + h).t()).t()),)


@cell(1, "shared weights", start=lambda x: (x[0],))
def layers_of_a_transformer(m: Model, x: Tensor, t: int, h: Tensor) -> States:
    q, k, v, _ = m.inputs(m.norm(h)).chunk(4, 1)
    h = h + m.square(F.softmax(q @ k.t() / WIDTH**0.5, 1) @ v)
    return (h + m.third(torch.relu(m.second(m.norm(h)))),)
