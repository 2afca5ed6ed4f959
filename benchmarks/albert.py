"""ALBERT-base on one text of 128 and one of 384 tokens, as it is and frozen, against eager.

The study's model at its published size: twelve layers that share one set of weights, attention written out. Frozen,
weights are joined and packed once, which eager has no counterpart of.
"""

from __future__ import annotations

from typing import Any

import torch

import fuse
from benchmarks.common import ROOT, save
from fuse.graph.loading.load import load
from fuse.report.timing.timing import interleaved, quartiles

LENGTHS = (128, 384)
SECONDS = 15.0


def measured(length: int) -> dict[str, Any]:
    """Calls of eager, fused and frozen in turns: milliseconds, and eager's over the others' with their quartiles."""
    settings = ("size=base", "batch_size=1", f"seq_length={length}")
    loaded = load(str(ROOT / "models" / "albert.py"), settings=settings, real=True)
    contenders: dict[str, Any] = {
        "eager": loaded.model,
        "fused": fuse.compile(loaded.model),
        "frozen": fuse.compile(loaded.model, freeze=True),
    }
    with torch.no_grad():
        expected = loaded.model(*loaded.args, **loaded.kwargs)
        for name in ("fused", "frozen"):
            result = contenders[name](*loaded.args, **loaded.kwargs)
            torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)
        samples = interleaved(
            {name: lambda m=model: m(*loaded.args, **loaded.kwargs) for name, model in contenders.items()},
            SECONDS,
        )
    rounds = {
        name: quartiles([one / other for one, other in zip(samples["eager"], samples[name], strict=True)])
        for name in ("fused", "frozen")
    }
    for name, ratio in rounds.items():
        spread = f"{ratio.lower:.2f} - {ratio.upper:.2f}"
        print(f"{length} tokens, {name}: {ratio.median:.2f} ({spread}) times as fast as eager")
    return {
        "target": f"models/albert.py {' '.join(settings)}",
        "threads": torch.get_num_threads(),
        "rounds": len(samples["eager"]),
        "milliseconds": {name: quartiles([1000 * s for s in taken]).to_dict() for name, taken in samples.items()},
        "ratios": {name: ratio.to_dict() for name, ratio in rounds.items()},
        "launches": {name: contenders[name].last_run.launches for name in rounds},
    }


if __name__ == "__main__":
    save("albert", [measured(length) for length in LENGTHS])
