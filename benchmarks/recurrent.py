"""Loops that a user wrote against the hand-tuned layers.

``fuse.compile`` of a plain Python LSTM and GRU is timed against ``nn.LSTM``, ``nn.GRU`` and eager.
Equal sizes, no gradients, time first; the input is as wide as the state. Shapes are (steps, batch, width).
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

import fuse
from benchmarks.common import ROOT, save
from fuse.graph.loading.load import load
from fuse.report.timing.timing import interleaved, quartiles

SHAPES = ((64, 1, 128), (64, 1, 512), (128, 4, 128), (64, 16, 256), (128, 16, 256), (64, 32, 512))
MODELS = ("lstm_loop", "gru_loop")
SECONDS = 1.5


def case(name: str, steps: int, batch: int, width: int) -> dict[str, Any]:
    """Medians in milliseconds and ratios to fuse, sampled in the same rounds."""
    settings = (f"seq_length={steps}", f"batch_size={batch}", f"input_size={width}", f"hidden_size={width}")
    loaded = load(str(ROOT / "models" / f"{name}.py"), settings=settings, real=True, tuned=True)
    layer = loaded.tuned
    assert layer is not None
    fused = fuse.compile(loaded.model)
    x = loaded.args[0]
    functions = {"fused": lambda: fused(x), "tuned": lambda: layer(x), "eager": lambda: loaded.model(x)}
    with torch.no_grad():
        for function in functions.values():
            function()
        samples = interleaved(functions, SECONDS)
    ratios = {
        p: quartiles([a / b for a, b in zip(samples[p], samples["fused"], strict=True)]) for p in ("tuned", "eager")
    }
    assert fused.last_run is not None
    return {
        "model": name,
        "shape": [steps, batch, width],
        "milliseconds": {n: quartiles([1e3 * s for s in taken]).to_dict() for n, taken in samples.items()},
        "ratios": {peer: figures.to_dict() for peer, figures in ratios.items()},
        "launches": fused.last_run.launches,
    }


def main() -> None:
    cases = []
    for name in MODELS:
        for shape in SHAPES:
            cases.append(case(name, *shape))
            print(name, shape, cases[-1]["ratios"]["tuned"]["median"], file=sys.stderr)
    mean = math.exp(sum(math.log(c["ratios"]["tuned"]["median"]) for c in cases) / len(cases))
    print(f"geometric mean against the tuned layer: {mean:.2f}", file=sys.stderr)
    save("recurrent", cases)


if __name__ == "__main__":
    main()
