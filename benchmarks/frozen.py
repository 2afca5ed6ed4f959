"""Image models with frozen weights, against eager and ``torch.compile`` with frozen weights.

Both fold batch norms, bring weights into an order of their own and lay images out with their channels side by side:
``fuse.compile(model, freeze=True)`` for its own kernels, Inductor (``freezing``) for oneDNN's.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch._inductor.config

import fuse
from benchmarks.common import ROOT, save
from fuse.graph.loading.load import load
from fuse.report.timing.timing import interleaved, quartiles

CASES = (
    ("resnet18.py",),
    ("resnet18.py", "image_size=224"),
    ("unet.py",),
    ("mobilenet.py",),
)
SECONDS = 12.0


def measured(file: str, *settings: str) -> dict[str, Any]:
    """Calls of all contenders in turns: milliseconds, the others' over the frozen one's with quartiles, first calls."""
    loaded = load(str(ROOT / "models" / file), settings=settings, real=True)
    contenders: dict[str, Any] = {
        "eager": loaded.model,
        "compile_frozen": torch.compile(loaded.model),
        "fused": fuse.compile(loaded.model),
        "frozen": fuse.compile(loaded.model, freeze=True),
    }
    first: dict[str, float] = {}
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        expected = loaded.model(*loaded.args, **loaded.kwargs)
        for name, model in contenders.items():
            begun = time.perf_counter()
            result = model(*loaded.args, **loaded.kwargs)
            first[name] = time.perf_counter() - begun
            torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)
        calls = {name: lambda m=model: m(*loaded.args, **loaded.kwargs) for name, model in contenders.items()}
        samples = interleaved(calls, SECONDS)
    others = [name for name in contenders if name != "frozen"]
    rounds = {
        name: quartiles([other / one for other, one in zip(samples[name], samples["frozen"], strict=True)])
        for name in others
    }
    target = " ".join((f"models/{file}", *settings))
    for name, ratio in rounds.items():
        print(f"{target}: frozen {ratio.median:.2f} ({ratio.lower:.2f} - {ratio.upper:.2f}) times as fast as {name}")
    return {
        "target": target,
        "threads": torch.get_num_threads(),
        "rounds": len(samples["eager"]),
        "milliseconds": {name: quartiles([1000 * s for s in taken]).to_dict() for name, taken in samples.items()},
        "ratios": {name: ratio.to_dict() for name, ratio in rounds.items()},
        "first_call_seconds": first,
        "launches": contenders["frozen"].last_run.launches,
    }


if __name__ == "__main__":
    save("frozen", [measured(*case) for case in CASES])
