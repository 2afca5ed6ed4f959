"""Record packed sequences as padded ones with a mask, so that the graph depends only on the longest length.

    rows of step 0 | rows of step 1 | ...          ->      padded[time, batch]    and    lengths, longest first

    for each step: new = cell(x[t], h);  h = where(t < lengths, new, h)          rolled like any loop (roll_whole_loops)

ATen runs a packed layer step by step, on matrices with as many rows as there are sequences of that length, so that
shapes depend on ``lengths``. During a capture, ``torch._VF`` packs, pads and runs ``nn.LSTM``, ``nn.GRU`` and
``nn.RNN`` on replacements. Python learns only the longest length, and that eager accepts the lengths. If other code
reads the rows of a packed sequence, the call is not captured, because the number of rows depends on the lengths.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuse.errors import CaptureError
from fuse.graph.patches.patched import in_this_thread, patched
from fuse.graph.patches.recurrent import CellState, stacked
from fuse.graph.sources import user_line

Cell = Callable[[Tensor, CellState, Sequence[Tensor]], CellState]


def _refused(what: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise CaptureError(
            f"a packed sequence is read at {user_line()} ({what}), whose shapes depend on the lengths; "
            "it runs in eager mode"
        )

    return refuse


class _PackedPart:
    """The replacement of a tensor in a packed sequence; it supports only what layers and padding use."""

    def __getattr__(self, name: str) -> Any:
        return _refused(name)()

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], *_: Any) -> Any:
        return _refused(getattr(func, "__name__", "an operator"))()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = _refused("arithmetic")
    __getitem__ = __len__ = __iter__ = _refused("elements")


@dataclass(frozen=True, eq=False)
class BatchSizes(_PackedPart):
    """The number of sequences in each step.

    ``lengths`` [batch]: the longest first. ``valid`` [time, batch]: whether the sequence has that step.
    """

    lengths: Tensor
    valid: Tensor

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    def size(self, dim: int) -> int:
        return self.valid.shape[dim]

    def __getitem__(self, step: int) -> int:
        if step != 0:
            _refused("the size of a step")()
        return self.valid.shape[1]  # every sequence has a first step


@dataclass(frozen=True, eq=False)
class PackedRows(_PackedPart):
    """The data of a packed sequence. ``padded`` [time, batch, features] is finite everywhere."""

    padded: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.padded.dtype

    @property
    def device(self) -> torch.device:
        return self.padded.device

    def dim(self) -> int:
        return self.padded.dim() - 1

    def size(self, dim: int) -> int:
        if dim not in (-1, self.dim() - 1):
            _refused("the number of rows")()
        return self.padded.shape[-1]


@contextlib.contextmanager
def packed_by_masks(used: Callable[[], None]) -> Iterator[None]:
    """A context in which packed sequences of this thread are replaced; calls ``used`` when there is one."""
    functions: Any = torch._VF

    def replaced(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(functions, name)

        def function(*args: Any) -> Any:
            if name != "_pack_padded_sequence" and not isinstance(args[0], PackedRows):
                return original(*args)
            used()
            return own(*args)

        return in_this_thread(function, original)

    with patched(functions, {name: replaced(name, own) for name, own in _REPLACED.items()}):
        yield


def _pack(sequence: Tensor, lengths: Tensor, batch_first: bool) -> tuple[PackedRows, BatchSizes]:
    """``torch._VF._pack_padded_sequence``. Lengths that eager rejects raise a capture error, so that eager raises."""
    padded = sequence.transpose(0, 1) if batch_first else sequence
    if lengths.dim() != 1 or lengths.numel() != padded.shape[1] or not lengths.numel():
        raise CaptureError(f"lengths at {user_line()} are not one number for each sequence; it runs in eager mode")
    accepted = (lengths[1:] <= lengths[:-1]).all() & (lengths[-1] > 0)
    if bool(accepted & (lengths[0] == padded.shape[0])):  # no number is learned: the longest length is a size
        longest = padded.shape[0]
    else:
        longest = int(lengths[0])
        if not bool(accepted & (lengths[0] < padded.shape[0])):
            raise CaptureError(
                f"lengths at {user_line()} are not sorted, or not within the sequence; it runs in eager mode"
            )
        padded = padded[:longest]
    valid = torch.arange(longest)[:, None] < lengths
    sizes = BatchSizes(lengths, valid)
    return PackedRows(padded.masked_fill(~_over(valid, padded), 0)), sizes


def _pad(rows: PackedRows, sizes: BatchSizes, batch_first: bool, value: float, total: int) -> tuple[Tensor, Tensor]:
    """``torch._VF._pad_packed_sequence``."""
    padded = rows.padded.masked_fill(~_over(sizes.valid, rows.padded), value)
    if total > padded.shape[0]:
        padded = torch.cat([padded, padded.new_full((total - padded.shape[0], *padded.shape[1:]), value)])
    return padded.transpose(0, 1) if batch_first else padded, sizes.lengths.clone()


def _over(valid: Tensor, padded: Tensor) -> Tensor:
    """``valid`` with trailing dimensions of one element, as many as ``padded`` has."""
    return valid[(..., *[None] * (padded.dim() - 2))]


# ---- layers --------------------------------------------------------------------------------------------------------


def _layers(cell: Cell) -> Callable[..., Any]:
    """A function that runs stacked layers of ``cell``, with the signature of those in ``torch._VF``."""

    def run(
        rows: PackedRows,
        sizes: BatchSizes,
        given: Tensor | Sequence[Tensor],
        weights: Sequence[Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[Any, ...]:
        first = (given,) if isinstance(given, Tensor) else tuple(given)
        if reason := _obstacle(first, dropout if train and layers > 1 else 0.0):
            raise CaptureError(f"a layer over a packed sequence at {user_line()} {reason}; it runs in eager mode")
        values, lasts = stacked(partial(_direction, cell, sizes), rows.padded, first, weights, layers, bidirectional)
        return PackedRows(values), *lasts

    return run


def _obstacle(states: Sequence[Tensor], dropout: float) -> str | None:
    if dropout:
        return "draws a random number for each row in its dropout"
    if any(state.shape != states[0].shape for state in states):
        return "has projections"
    if torch._C._is_any_autocast_enabled():
        return "is under autocast"
    return None


def _direction(
    cell: Cell, sizes: BatchSizes, values: Tensor, state: CellState, weights: Sequence[Tensor], backwards: bool
) -> tuple[Tensor, CellState]:
    """The output and last state of one layer in one direction; a state stays as it is after its sequence has ended."""
    steps = len(values)
    ahead = F.linear(values, weights[0], weights[2] if len(weights) > 2 else None)
    outputs: list[Tensor] = []
    for t in reversed(range(steps)) if backwards else range(steps):
        lasts = sizes.valid[t, :, None]
        new = cell(ahead[t], state, weights[1::2])
        state = tuple(torch.where(lasts, now, was) for now, was in zip(new, state, strict=True))
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _lstm_cell(ahead: Tensor, state: CellState, weights: Sequence[Tensor]) -> CellState:
    h, c = state
    write, forget, candidate, output = (ahead + F.linear(h, *weights)).chunk(4, 1)
    c = torch.sigmoid(forget) * c + torch.sigmoid(write) * torch.tanh(candidate)
    return torch.sigmoid(output) * torch.tanh(c), c


def _gru_cell(ahead: Tensor, state: CellState, weights: Sequence[Tensor]) -> CellState:
    (h,) = state
    reset_x, update_x, new_x = ahead.chunk(3, 1)
    reset_h, update_h, new_h = F.linear(h, *weights).chunk(3, 1)
    new = torch.tanh(new_x + new_h * torch.sigmoid(reset_h + reset_x))
    return ((h - new) * torch.sigmoid(update_h + update_x) + new,)


def _tanh_cell(ahead: Tensor, state: CellState, weights: Sequence[Tensor]) -> CellState:
    return (torch.tanh(F.linear(state[0], *weights) + ahead),)


def _relu_cell(ahead: Tensor, state: CellState, weights: Sequence[Tensor]) -> CellState:
    return (torch.relu(F.linear(state[0], *weights) + ahead),)


_REPLACED: dict[str, Callable[..., Any]] = {
    "_pack_padded_sequence": _pack,
    "_pad_packed_sequence": _pad,
    "lstm": _layers(_lstm_cell),
    "gru": _layers(_gru_cell),
    "rnn_tanh": _layers(_tanh_cell),
    "rnn_relu": _layers(_relu_cell),
}
