"""What the CRF adds to a training step of the tagger: steps with it and without it in turns, in one process.

step     forward, backward of the sum of all results; no optimizer
share    of each round: the step with the CRF over the one without, less one
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fuse
from benchmarks.common import ROOT, save
from fuse.graph.loading.load import load
from fuse.report.timing.timing import interleaved, quartiles

BATCHES = (4, 32)
"""Sentences in a batch of ``models/bert_crf.py``."""
SECONDS = 10.0


def step(batch: int, used: bool, compiled: bool) -> Callable[[], None]:
    """One training step; the model was called once."""
    settings = (f"batch_size={batch}", f"use_crf={used}")
    loaded = load(str(ROOT / "models" / "bert_crf.py"), settings=settings, real=True)
    model: Any = fuse.compile(loaded.model) if compiled else loaded.model

    def run() -> None:
        result = model(*loaded.args, **loaded.kwargs)
        loaded.model.zero_grad()
        parts = result if isinstance(result, tuple) else (result,)
        torch.autograd.backward([part.sum() for part in parts if part.requires_grad])

    run()
    return run


def measured(batch: int) -> dict[str, Any]:
    steps = {
        f"{who}, {'with' if used else 'without'}": step(batch, used, who == "fused")
        for who in ("eager", "fused")
        for used in (True, False)
    }
    samples = interleaved(steps, SECONDS)
    shares = {
        who: quartiles([w / o - 1 for w, o in zip(samples[f"{who}, with"], samples[f"{who}, without"], strict=True)])
        for who in ("eager", "fused")
    }
    for who, share in shares.items():
        print(
            f"batch {batch}, {who}: the CRF adds {share.median:.0%} ({share.lower:.0%} - {share.upper:.0%})", flush=True
        )
    return {
        "target": f"models/bert_crf.py batch_size={batch}",
        "milliseconds": {name: quartiles([1000 * s for s in taken]).to_dict() for name, taken in samples.items()},
        "shares": {who: share.to_dict() for who, share in shares.items()},
    }


if __name__ == "__main__":
    save("crf_share", [measured(batch) for batch in BATCHES])
