"""Twenty-one kinds of values that ``forward`` reads: how fast where they stay, alternate or never repeat.

    python -m benchmarks.reads              all, about four minutes
    python -m benchmarks.reads check late   some; the others keep the figures that they have

Values that stay are timed against the same model, fused, that reads nothing; values that alternate or never repeat
against eager. Calls are interleaved, on one thread, inference.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fuse
from benchmarks.common import RESULTS, save
from benchmarks.reading_models import KINDS, PATTERNS, WIDTH, Block

ROWS, DEPTH, ROUNDS, WARM = 64, 4, 120, 20


def measure(name: str) -> dict[str, Any]:
    """The ratios of one kind; above 1, the fused model that reads is the faster one."""
    kind = KINDS[name]
    x = torch.randn(ROWS, WIDTH)
    found: dict[str, Any] = {"name": name, "ratios": {}, "launches": {}, "wrong": 0, "eager": {}}
    for pattern, which in PATTERNS.items():
        torch.manual_seed(0)
        model = Block(kind.read, DEPTH).eval()
        without = copy.deepcopy(model)
        without.read = kind.without
        fused = fuse.compile(model)
        peer = fuse.compile(without) if pattern == "stay" else copy.deepcopy(model)
        numbers = itertools.count()
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(WARM + ROUNDS):
            told = kind.values(which(next(numbers)))
            for run, kept in (
                ((fused, times[0]), (peer, times[1])) if turn % 2 else ((peer, times[1]), (fused, times[0]))
            ):
                spent = seconds(run, x, told)
                if turn >= WARM:
                    kept.append(spent)
            if turn % 10 == 0:
                found["wrong"] += not same(fused(x, told), model(x, told))
        found["ratios"][pattern] = statistics.median(times[1]) / statistics.median(times[0])
        run = fused.last_run
        found["launches"][pattern] = run.launches
        found["eager"][pattern] = bool(run.fallbacks)
    return found


def seconds(run: Callable[..., Any], x: Tensor, told: Tensor) -> float:
    """Processor time of one call."""
    begun = time.perf_counter()
    run(x, told)
    return time.perf_counter() - begun


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal but for rounding."""
    if isinstance(one, Tensor):
        return torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and abs(one - other) <= 1e-4 * abs(other) + 1e-6


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = RESULTS / "reads.json"
    before = {case["name"]: case for case in json.loads(path.read_text())["cases"]} if path.exists() else {}
    with torch.no_grad():
        for name in names or list(KINDS):
            case = before[name] = measure(name)
            told = "  ".join(f"{pattern} {ratio:.2f}" for pattern, ratio in case["ratios"].items())
            print(f"{name:20} {told}  launches {case['launches']}  wrong {case['wrong']}", file=sys.stderr, flush=True)
    save("reads", [before[name] for name in KINDS if name in before])


if __name__ == "__main__":
    main(sys.argv[1:])
