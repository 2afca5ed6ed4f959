"""Training steps of ``nn.LSTM`` and ``nn.GRU``, fused against torch's own: forward, backward of the sum, no optimizer.

One and two layers, both directions, packed (lengths even between half of the steps and all). Shapes are (steps, batch,
width); the input is as wide as the state. ``python -m benchmarks.recurrent_layers [SECONDS]``, seconds a case.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fuse
from benchmarks.common import save
from fuse.report.timing.timing import interleaved, quartiles

SHAPES = ((64, 1, 128), (128, 4, 128), (64, 16, 256))
KINDS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers": {"num_layers": 2},
    "both directions": {"bidirectional": True},
    "packed": {},
}
SECONDS = 4.0


class Packed(nn.Module):
    """A layer over padded sequences of the lengths given."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        return pad_packed_sequence(self.layer(packed)[0])[0]


class Output(nn.Module):
    """The output of a layer, without its last states."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)[0]
        return output


def case(layer: type[nn.RNNBase], kind: str, steps: int, batch: int, width: int, seconds: float) -> dict[str, Any]:
    """Medians in milliseconds and the ratio of torch to fuse, sampled in the same rounds."""
    made = layer(width, width, **KINDS[kind])
    packed = kind == "packed"
    model = Packed(made) if packed else Output(made)
    lengths = (torch.linspace(steps, steps // 2 if batch > 1 else steps, batch)).long()
    args = (torch.randn(steps, batch, width), *([lengths] if packed else []))
    other, fused = copy.deepcopy(model), fuse.compile(model)

    def step(run: nn.Module, owner: nn.Module) -> Callable[[], None]:
        def one() -> None:
            owner.zero_grad()
            run(*args).sum().backward()

        return one

    functions = {"fused": step(fused, model), "torch": step(other, other)}
    for function in functions.values():
        function()
    samples = interleaved(functions, seconds)
    run = fused.last_run
    assert run is not None
    assert not run.fallbacks
    assert run.backward is not None
    return {
        "layer": layer.__name__,
        "kind": kind,
        "shape": [steps, batch, width],
        "milliseconds": {n: quartiles([1e3 * s for s in taken]).to_dict() for n, taken in samples.items()},
        "ratio": quartiles([a / b for a, b in zip(samples["torch"], samples["fused"], strict=True)]).to_dict(),
        "launches": [run.launches, run.backward.launches],
    }


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    cases = []
    for layer, kind, shape in itertools.product((nn.LSTM, nn.GRU), KINDS, SHAPES):
        torch.manual_seed(0)
        cases.append(case(layer, kind, *shape, seconds))
        print(layer.__name__, kind, shape, cases[-1]["ratio"]["median"], file=sys.stderr, flush=True)
    save("recurrent_layers", cases)


if __name__ == "__main__":
    main()
