"""Host work that runs ahead: ``models/texting_words.py`` with and without a worker, one compute thread.

The width of the network is doubled until the device stage of a batch takes as long as its host stage; both are printed.
Rounds of both ways are interleaved. ``processor`` is the processor time of this process alone: where another processor
is free for the worker, a batch takes what is larger, that or the host stage.
``python -m benchmarks.pipeline [BATCHES]``: batches a round.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import fuse
from benchmarks.common import ROOT, save
from fuse.graph.host_work import host_work
from fuse.graph.loading.load import load
from fuse.report.timing.timing import quartiles
from fuse.runtime.pipeline import device_stage

BATCHES = 150
ROUNDS = 7
WIDTHS = (96, 192, 256, 320, 384, 448, 512, 768)


def processor_time(call: Callable[[], Any]) -> float:
    """The median of 15 calls, in milliseconds of this process's processor time."""
    taken = []
    for _ in range(15):
        begun = time.process_time()
        call()
        taken.append(time.process_time() - begun)
    return 1e3 * statistics.median(taken)


def case(width: int, batches: int, at_least: float) -> dict[str, Any] | None:
    """One width, if its device stage takes that share of its host stage."""
    loaded = load(str(ROOT / "models" / "texting_words.py"), settings=(f"hidden_size={width}",), real=True)
    fused, texts = fuse.compile(loaded.model), sys.modules[type(loaded.model).__module__].texts
    loader = [(texts(seed),) for seed in range(batches)]
    work = host_work(loaded.model, loader[0], {})
    values, stage = work.run(loaded.model, loader[0], {}), device_stage(fused, work)
    stage(**values)
    host = processor_time(lambda: work.run(loaded.model, loader[0], {}))
    device = processor_time(lambda: stage(**values))
    print(f"width {width}: host {host:.2f} ms, device {device:.2f} ms", file=sys.stderr, flush=True)
    if device < at_least * host:
        return None
    seconds: dict[str, list[float]] = {"plain": [], "pipeline": []}
    processor: dict[str, list[float]] = {"plain": [], "pipeline": []}
    results: dict[str, list[torch.Tensor]] = {}
    for _ in range(ROUNDS):
        for way, workers in (("plain", 0), ("pipeline", 1)):
            begun, own = time.perf_counter(), time.process_time()
            results[way] = list(fuse.pipeline(fused, loader, workers=workers))
            seconds[way].append(time.perf_counter() - begun)
            processor[way].append(time.process_time() - own)
    assert all(torch.equal(a, b) for a, b in zip(results["plain"], results["pipeline"], strict=True))
    ratios = [a / b for a, b in zip(seconds["plain"], seconds["pipeline"], strict=True)]
    return {
        "command": f"fuse show models/texting_words.py --set hidden_size={width}",
        "host": host,
        "device": device,
        "batches": batches,
        "milliseconds": {n: quartiles([1e3 * s / batches for s in taken]).to_dict() for n, taken in seconds.items()},
        "processor": {n: 1e3 * statistics.median(taken) / batches for n, taken in processor.items()},
        "ratio": quartiles(ratios).to_dict(),
    }


def main() -> None:
    torch.set_num_threads(1)
    batches = int(sys.argv[1]) if len(sys.argv) > 1 else BATCHES
    with torch.no_grad():
        found = next(one for width in WIDTHS if (one := case(width, batches, 0.9 if width < WIDTHS[-1] else 0.0)))
    print(found, file=sys.stderr)
    save("pipeline", [found])


if __name__ == "__main__":
    main()
