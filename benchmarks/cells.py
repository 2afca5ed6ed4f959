"""Loops without a hand-tuned layer: eager, ``torch.compile`` and fuse, at a small and a larger batch.

64 steps each, since ``torch.compile`` writes code for every step and takes 20 to 100 seconds for it; the forward
algorithm of a conditional random field also over 128 steps, against eager alone.

    python -m benchmarks.cells              all, a quarter of an hour
    python -m benchmarks.cells crf wkv      the cases of these models; those of others are kept as they were
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks.common import RESULTS, bench, save

LENGTHS = {
    "ligru": "seq_length",
    "lstm_layernorm": "seq_length",
    "crf": "seq_length",
    "selective_scan": "seq_length",
    "wkv": "seq_length",
    "decoder_greedy": "longest",
}
BATCHES = (4, 16)


def arguments(model: str) -> list[tuple[str, ...]]:
    """What ``fuse bench`` is called with, for each case of ``model``."""
    target, length = f"models/{model}.py", LENGTHS[model]
    cases: list[tuple[str, ...]] = [
        (target, "--set", f"{length}=64", "--set", f"batch_size={batch}", "--against", "eager,compile")
        for batch in BATCHES
    ]
    if model == "crf":
        cases.append((target, "--set", "seq_length=128", "--set", "batch_size=16", "--against", "eager"))
    return cases


def measured_before() -> dict[str, list[dict[str, Any]]]:
    """The cases that the file of results holds, by model."""
    path = RESULTS / "cells.json"
    kept: dict[str, list[dict[str, Any]]] = {model: [] for model in LENGTHS}
    for case in json.loads(path.read_text())["cases"] if path.exists() else ():
        kept[next(model for model in LENGTHS if f"/{model}.py" in case["command"])].append(case)
    return kept


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", choices=[[], *LENGTHS], metavar="MODEL", help=", ".join(LENGTHS))
    cases = measured_before()
    for model in parser.parse_args().models or LENGTHS:
        cases[model] = [bench(*one) for one in arguments(model)]
        save("cells", [case for model in LENGTHS for case in cases[model]])
