"""The gradients of an LSTM layer that a library runs, step by step in plain operators.

    mkldnn_rnn_layer_backward(x, w, u, b, d, h0, c0, y, ..., dy, dh, dc, ..., workspace)
        ->   the gates of all steps at once; cells, and gradients of the gates, step by step; weights at once

The library's backward call reads a workspace that its forward call fills only under autograd, which no program uses.
Calls whose gradients are taken loop by loop do not need this, because ``expand_lstm_layers`` runs first. Other calls
(which stop the gradient of an operand, for example) are recorded step by step. These loops are rolled like any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fuse.graph.patches.recurrent import LSTM_MODE

aten = torch.ops.aten


def formula(op: OpOverload, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The function that is recorded for the gradients of an LSTM layer; None for other operators, cells or dtypes."""
    if op is not aten.mkldnn_rnn_layer_backward.default or args[0].dtype not in (torch.float32, torch.bfloat16):
        return None
    mode, sizes = args[14], args[20]
    return lstm_layer_backward if mode == LSTM_MODE and not sizes else None


def lstm_layer_backward(*args: Any) -> tuple[Tensor, ...]:
    """Gradients of the input, the two weights, the two biases and the two states, as the library orders them.

    bfloat16 gradients are computed in float32 and rounded once.
    """
    narrow = args[0].dtype
    if narrow is torch.float32:
        return _gradients(*args)
    wide: list[Any] = [a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    return tuple(gradient.to(narrow) for gradient in _gradients(*wide))


def _gradients(
    x: Tensor,
    w: Tensor,
    u: Tensor,
    b: Tensor,
    d: Tensor,
    h0: Tensor,
    c0: Tensor,
    y: Tensor,
    _last: Tensor,
    _cell: Tensor,
    dy: Tensor | None,
    dh: Tensor | None,
    dc: Tensor | None,
    backwards: bool,
    _mode: int,
    _width: int,
    _layers: int,
    biased: bool,
    *_: Any,
) -> tuple[Tensor, ...]:
    steps, width = x.shape[0], h0.shape[1]
    order = range(steps - 1, -1, -1) if backwards else range(steps)
    start = h0.unsqueeze(0)
    states = torch.cat([y[1:], start] if backwards else [start, y[:-1]])  # the state before each step
    gates = torch.matmul(x, w.t()) + torch.matmul(states, u.t())
    if biased:  # without biases, the library gets zeros of another shape
        gates = gates + (b + d)
    write, forget, candidate, output = gates.split(width, -1)
    write, forget, output = torch.sigmoid(write), torch.sigmoid(forget), torch.sigmoid(output)
    candidate = torch.tanh(candidate)
    cell, cells = c0, [c0]
    for step in order:
        cell = forget[step] * cell + write[step] * candidate[step]
        cells.append(cell)
    dh = torch.zeros_like(h0) if dh is None else dh
    dc = torch.zeros_like(c0) if dc is None else dc
    found: list[Tensor] = []
    for step, before, after in zip(reversed(order), cells[-2::-1], cells[:0:-1], strict=True):
        i, f, g, o, read = write[step], forget[step], candidate[step], output[step], torch.tanh(after)
        if dy is not None:
            dh = dh + dy[step]
        dc = dc + dh * o * (1 - read * read)
        parts = [dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g * g), dh * read * o * (1 - o)]
        found.append(torch.cat(parts, -1))
        dh, dc = torch.mm(found[-1], u), dc * f
    changes = torch.stack(found if backwards else found[::-1])
    rows = changes.flatten(0, 1)
    bias = rows.sum(0)
    return torch.matmul(changes, w), rows.t() @ x.flatten(0, 1), rows.t() @ states.flatten(0, 1), bias, bias, dh, dc
