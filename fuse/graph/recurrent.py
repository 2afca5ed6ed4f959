"""``nn.LSTM`` as eager runs it on a processor: one oneDNN call a layer and direction.

    lstm(x, ...)   ->   mkldnn_rnn_layer(x, w_ih, w_hh, b_ih, b_hh, h0, c0, ...)   for each layer and direction

ATen chooses between that call and a loop over time by a test that fake tensors never pass, so a captured graph would
hold hundreds of small operators that eager does not launch. While a model is captured, ``torch.lstm`` as ``nn.LSTM``
calls it makes the choice by the same rules (``use_mkldnn`` and ``mkldnn_rnn`` of ATen's RNN.cpp) and dispatches what
the real one would have.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fuse.devices import is_host

LSTM_MODE = 2
"""oneDNN's number for this kind of cell."""

LayerState = tuple[Tensor, Tensor, Tensor]


@contextlib.contextmanager
def lstm_of_eager() -> Iterator[None]:
    """``torch._VF.lstm`` replaced, during one capture, by one that takes the branch real tensors would take."""
    functions: Any = torch._VF
    original = functions.lstm
    outer = vars(functions).get("lstm")  # that of a capture inside of which this one is
    thread = threading.get_ident()

    def lstm(*arguments: Any) -> LayerState:
        if threading.get_ident() != thread:
            return cast(LayerState, original(*arguments))
        if isinstance(arguments[1], Tensor) or not _runs_in_onednn(*arguments[:3]):  # a packed sequence, or no oneDNN
            return cast(LayerState, original(*arguments))
        return _onednn_lstm(*arguments)

    functions.lstm = lstm
    try:
        yield
    finally:
        del functions.lstm  # the module finds the original again by itself
        if outer is not None:
            functions.lstm = outer


def _runs_in_onednn(sequence: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
    if not (torch._C._has_mkldnn and torch.backends.mkldnn.enabled) or sequence.numel() == 0:
        return False
    if state[0].shape[2] != state[1].shape[2]:  # projections
        return False
    supported = {torch.float32}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        supported.add(torch.bfloat16)
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
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
    """The same operators, in the same order, as ATen's ``mkldnn_rnn``."""
    values = (sequence.transpose(0, 1) if batch_first else sequence).contiguous()
    directions = 2 if bidirectional else 1
    held = len(weights) // (layers * directions)
    hidden: list[Tensor] = []
    cell: list[Tensor] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = list(weights[index * held : (index + 1) * held])
            h, c = state[0][index], state[1][index]
            if not has_biases:
                own += [torch.zeros(w.shape, dtype=w.dtype, device=w.device) for w in own]
            output, h, c, _ = torch.ops.aten.mkldnn_rnn_layer(
                values, *own, h, c, direction > 0, [], LSTM_MODE, state[0].shape[2], layers, has_biases, bidirectional,
                batch_first, train,
            )  # fmt: skip
            outputs.append(output)
            hidden.append(h)
            cell.append(c)
        values = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < layers - 1:
            values = torch.dropout(values, dropout, True)
    last = torch.stack(hidden), torch.stack(cell)
    return (values.transpose(0, 1) if batch_first else values, *last)
