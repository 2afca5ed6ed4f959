"""First calls of the LiGRU loop of https://github.com/pytorch/pytorch/issues/97155 and of an LSTM loop, caches cold.

    64 and 1,024 steps, and then three other lengths      each in a process of its own

The seconds are those of ``fused(x)``; torch is imported before. Beside them the processor's, of this process and of the
compiler that it calls: they tell more where other programs run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

import torch
import torch._dynamo  # fake tensors need it; what torch's own imports take is not measured

import fuse
from benchmarks.common import ROOT, processor_seconds, save
from fuse.graph.loading.load import load

ROUNDS = 3
MODELS = {"ligru": 1, "lstm_loop": 0}
"""With the dimension of the input that is time."""
LENGTHS = (64, 1024)
OTHERS = {"another_length": 3 / 4, "third_length": 7 / 8, "fourth_length": 13 / 16}
"""Further calls, and their shares of all steps."""


def measured(model: str, steps: int) -> dict[str, float]:
    """Seconds of the first call in this process, and of further ones with other lengths."""
    loaded = load(str(ROOT / "models" / f"{model}.py"), settings=(f"seq_length={steps}",), real=True)
    (x,) = loaded.args
    others = {name: x.narrow(MODELS[model], 0, int(steps * share)).contiguous() for name, share in OTHERS.items()}
    fused = fuse.compile(loaded.model)
    found = {}
    with torch.no_grad():
        for name, argument in {"first": x, **others}.items():
            started, used = time.perf_counter(), processor_seconds()
            fused(argument)
            found[name] = time.perf_counter() - started
            found[f"{name}_processor"] = processor_seconds() - used
            assert not fused.last_run.fallbacks
    return found


def case(model: str, steps: int) -> dict[str, Any]:
    rounds = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory(prefix="fuse-bench-") as cache:
            os.chmod(cache, 0o700)
            ran = subprocess.run(
                [sys.executable, "-m", "benchmarks.first_call", model, str(steps)],
                cwd=ROOT,
                env={**os.environ, "FUSE_CACHE_DIR": cache},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        rounds.append(json.loads(ran.stdout))
    seconds = {name: median(one[name] for one in rounds) for name in rounds[0]}
    return {"model": model, "steps": steps, "seconds": seconds}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measured(sys.argv[1], int(sys.argv[2]))))
    else:
        cases = [case(model, steps) for model in MODELS for steps in LENGTHS]
        for one in cases:
            print(one, file=sys.stderr)
        save("first_call", cases)
