"""Training steps of recurrent loops in plain Python: eager, ``torch.compile``, the hand-tuned layers and fuse.

Forward and backward of the sum of all results; the optimizer is left out. ``torch.compile`` takes up to a minute for
its first call of a loop.
"""

from __future__ import annotations

from benchmarks.common import bench, save
from benchmarks.lstm import TARGETS

SHAPES = ((64, 1, 128), (128, 4, 128), (64, 16, 256))
TRANSLATED = (1, 8, 32)
"""Sentences in a batch of ``models/rnnsearch.py``."""

if __name__ == "__main__":
    cases = []
    for target in TARGETS:
        for steps, batch, width in SHAPES:
            sizes = {"seq_length": steps, "batch_size": batch, "input_size": width, "hidden_size": width}
            settings = [flag for name, value in sizes.items() for flag in ("--set", f"{name}={value}")]
            cases.append(bench(target, *settings, "--train", "--against", "eager,compile,tuned"))
    for batch in TRANSLATED:
        settings = ["--set", f"batch_size={batch}"]
        cases.append(bench("models/rnnsearch.py", *settings, "--train", "--against", "eager,compile"))
    save("training", cases)
