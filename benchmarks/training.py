"""Training steps: recurrent loops in plain Python, a translator and a tagger with a CRF.

Forward and backward of the sum of all results; the optimizer is left out. ``torch.compile`` takes up to a minute for
its first call of a loop, so that it is a peer where the loop is short, once at 128 steps and once for the translator.
"""

from __future__ import annotations

from benchmarks.common import bench, save
from benchmarks.lstm import TARGETS

SHAPES = ((64, 1, 128), (128, 4, 128), (64, 16, 256))
LONGEST_COMPILED = 64
"""Steps beyond which ``torch.compile`` is measured for the first target alone."""
TRANSLATED = (1, 8, 32)
"""Sentences in a batch of ``models/rnnsearch.py``."""
TAGGED = (4, 32)
"""Sentences in a batch of ``models/bert_crf.py``."""


def flags(**settings: object) -> list[str]:
    return [flag for name, value in settings.items() for flag in ("--set", f"{name}={value}")]


if __name__ == "__main__":
    cases = []
    for target in TARGETS:
        for steps, batch, width in SHAPES:
            sizes = {"seq_length": steps, "batch_size": batch, "input_size": width, "hidden_size": width}
            compiled = steps <= LONGEST_COMPILED or target == TARGETS[0]
            peers = "eager,compile,tuned" if compiled else "eager,tuned"
            cases.append(bench(target, *flags(**sizes), "--train", "--against", peers))
    for batch in TRANSLATED:
        peers = "eager,compile" if batch == 8 else "eager"
        cases.append(bench("models/rnnsearch.py", *flags(batch_size=batch), "--train", "--against", peers))
    for batch in TAGGED:
        cases.append(bench("models/bert_crf.py", *flags(batch_size=batch), "--train", "--against", "eager"))
    save("training", cases)
