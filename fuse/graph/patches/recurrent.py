"""Record ``nn.LSTM`` as eager runs it on a CPU: one oneDNN call for each layer and direction.

    lstm(x, ...)   ->   mkldnn_rnn_layer(x, w_ih, w_hh, b_ih, b_hh, h0, c0, ...)   for each layer and direction

ATen chooses between this call and a loop over time by a test that fake tensors never pass, so that a captured graph
would contain hundreds of small operators that eager does not launch. During a capture, the function that ``nn.LSTM``
calls makes the choice by the same rules (``use_mkldnn`` and ``mkldnn_rnn`` of ATen's RNN.cpp), and dispatches the same
operators as for real tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fuse.devices import is_host
from fuse.graph.patches.patched import in_this_thread, patched

LSTM_MODE = 2
"""oneDNN's number for an LSTM cell."""

LayerState = tuple[Tensor, Tensor, Tensor]
CellState = tuple[Tensor, ...]
"""The states of one layer in one direction, or of all layers."""


@contextlib.contextmanager
def lstm_of_eager() -> Iterator[None]:
    """A context in which ``torch._VF.lstm`` takes the branch that real tensors would take."""
    original = torch._VF.lstm

    def lstm(*arguments: Any) -> LayerState:
        if isinstance(arguments[1], Tensor) or not _runs_in_onednn(*arguments[:3]):  # a packed sequence, or no oneDNN
            return original(*arguments)
        return _onednn_lstm(*arguments)

    with patched(torch._VF, {"lstm": in_this_thread(lstm, original)}):
        yield


def _runs_in_onednn(sequence: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
    if not (torch._C._has_mkldnn and torch.backends.mkldnn.enabled) or sequence.numel() == 0:
        return False
    if state[0].shape[2] != state[1].shape[2]:  # projections
        return False
    supported = {torch.float32}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        supported.add(torch.bfloat16)
    if torch.ops.mkldnn._is_mkldnn_fp16_supported() and not torch.is_grad_enabled():
        supported.add(torch.float16)
    return all(is_host(t) and t.dtype in supported for t in (sequence, *state, *weights))


def _onednn_lstm(
    sequence: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> LayerState:
    """The operators of ATen's ``mkldnn_rnn``, in the same order."""
    values = (sequence.transpose(0, 1) if batch_first else sequence).contiguous()

    def run(values: Tensor, state: CellState, own: Sequence[Tensor], backwards: bool) -> tuple[Tensor, CellState]:
        zeros = () if has_biases else [torch.zeros(w.shape, dtype=w.dtype, device=w.device) for w in own]
        output, h, c, _ = torch.ops.aten.mkldnn_rnn_layer(
            values, *own, *zeros, *state, backwards, [], LSTM_MODE, state[0].shape[1], layers, has_biases,
            bidirectional, batch_first, train,
        )  # fmt: skip
        return output, (h, c)

    def dropped(values: Tensor) -> Tensor:
        return torch.dropout(values, dropout, True) if dropout and train else values

    values, (h, c) = stacked(run, values, state, weights, layers, bidirectional, dropped)
    return values.transpose(0, 1) if batch_first else values, h, c


def stacked(
    run: Callable[[Tensor, CellState, Sequence[Tensor], bool], tuple[Tensor, CellState]],
    values: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    layers: int,
    bidirectional: bool,
    between: Callable[[Tensor], Tensor] = lambda values: values,
) -> tuple[Tensor, CellState]:
    """The output of stacked layers, and their stacked last states.

    ``run(values, state, weights, backwards)`` runs one layer in one direction. ``between`` is applied to the output of
    each layer but the last.
    """
    directions = 2 if bidirectional else 1
    held = len(weights) // (layers * directions)
    lasts: list[CellState] = []
    for layer in range(layers):
        outputs = []
        for index in range(layer * directions, (layer + 1) * directions):
            own = weights[index * held : (index + 1) * held]
            output, last = run(values, tuple(state[index] for state in states), own, index % directions > 0)
            outputs.append(output)
            lasts.append(last)
        values = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if layer < layers - 1:
            values = between(values)
    return values, tuple(torch.stack(parts) for parts in zip(*lasts, strict=True))
