"""Convolutions that libraries do less for (transposed, grouped, small, dilated), and two that are products.

    python -m benchmarks.convolutions                 all, two minutes
    python -m benchmarks.convolutions up_clamp        some; the others keep the figures that they have

Each is run eager, under ``torch.compile`` and fused in one process, interleaved, on one thread; each follows each of
the others, since a long call before leaves the caches cold. Processor time of the
tenth part of the samples that were least disturbed; above 1, fuse is faster. ``step`` is forward and backward of the
sum of the result.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fuse
from benchmarks.blocks import Block
from benchmarks.common import RESULTS, save

SECONDS = 0.6


def up_clamp(m: Any, x: Tensor) -> Tensor:
    y = torch.clamp(m.up(x) + m.bias, 0, 1) * 2.0
    return torch.clamp(y, 0, 1) / 2.0


def up(inputs: int, outputs: int, taps: int, norm: bool = False, **how: Any) -> nn.Sequential:
    layers = [nn.ConvTranspose2d(inputs, outputs, taps, **how), *([nn.BatchNorm2d(outputs)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers)


def down(outputs: int, taps: int = 3, norm: bool = False, inputs: int = 32, **how: Any) -> nn.Sequential:
    layers = [nn.Conv2d(inputs, outputs, taps, **how), *([nn.BatchNorm2d(outputs)] if norm else []), nn.ReLU6()]
    return nn.Sequential(*layers)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "up_clamp": (
        lambda: Block(up_clamp, up=nn.ConvTranspose2d(16, 32, 3, 2, 1, 1), bias=torch.randn(32, 1, 1)),
        (8, 16, 16, 16),
    ),
    "up_3x3_by_2": (lambda: up(32, 32, 3, stride=2, padding=1, output_padding=1), (4, 32, 16, 16)),
    "up_2x2_by_2": (lambda: up(32, 32, 2, stride=2), (4, 32, 16, 16)),
    "up_4x4_by_2_norm": (lambda: up(32, 16, 4, norm=True, stride=2, padding=1), (8, 32, 16, 16)),
    "up_3x3_by_1": (lambda: up(16, 16, 3, padding=1), (8, 16, 24, 24)),
    "up_3x3_by_1_norm": (lambda: up(16, 16, 3, norm=True, padding=1), (8, 16, 24, 24)),
    "up_3x3_grouped": (lambda: up(16, 16, 3, stride=2, padding=1, groups=4), (8, 16, 24, 24)),
    "grouped": (lambda: down(32, padding=1, groups=4), (4, 32, 28, 28)),
    "grouped_norm": (lambda: down(32, norm=True, padding=1, groups=4), (4, 32, 28, 28)),
    "depthwise": (lambda: down(32, padding=1, groups=32), (4, 32, 28, 28)),
    "dilated": (lambda: down(16, inputs=16, padding=2, dilation=2), (4, 16, 28, 28)),
    "small": (lambda: down(8, inputs=3, padding=1), (1, 3, 16, 16)),
    "small_1x1": (lambda: down(8, 1, inputs=8), (2, 8, 14, 14)),
    "large_1x1": (lambda: down(64, 1, inputs=64), (4, 64, 28, 28)),
    "patches": (lambda: nn.Conv2d(3, 192, 16, 16), (2, 3, 224, 224)),
}


def call(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def step(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None


WAYS = {"call": call, "step": step}
PEERS = ("eager", "compile")


def measured(name: str, way: Callable[[nn.Module, Tensor], None]) -> dict[str, float]:
    """Microseconds by contender."""
    torch.manual_seed(0)
    make, shape = CASES[name]
    model, x = make().train(way is step), torch.randn(shape)
    models: dict[str, Any] = {
        "eager": copy.deepcopy(model),
        "compile": torch.compile(copy.deepcopy(model)),
        "fuse": fuse.compile(copy.deepcopy(model)),
    }
    taken: dict[str, list[float]] = {contender: [] for contender in models}
    for one in models.values():
        for _ in range(3):
            way(one, x)
    until = time.perf_counter() + SECONDS * len(models)
    orders = itertools.cycle(itertools.permutations(models))
    while time.perf_counter() < until:
        for contender in next(orders):
            one = models[contender]
            started = time.process_time()
            way(one, x)
            taken[contender].append(time.process_time() - started)
    return {contender: 1e6 * statistics.quantiles(times, n=10)[0] for contender, times in taken.items()}


def summary(cases: list[dict[str, Any]]) -> Iterator[str]:
    for way in WAYS:
        for peer in PEERS:
            found = [case[way][peer] / case[way]["fuse"] for case in cases]
            mean, faster = statistics.geometric_mean(found), sum(ratio >= 1 for ratio in found)
            yield f"{way} against {peer}: faster in {faster} of {len(found)}, geometric mean {mean:.2f}"


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in CASES]:
        sys.exit(f"no convolution {unknown[0]!r}; there are {', '.join(CASES)}")
    torch.set_num_threads(1)
    path = RESULTS / "convolutions.json"
    found = {case["target"]: case for case in json.loads(path.read_text())["cases"]} if path.exists() and names else {}
    for name in names or list(CASES):
        found[name] = {"target": name}
        for way, function in WAYS.items():
            torch._dynamo.reset()
            times = found[name][way] = measured(name, function)
            told = "   ".join(f"{peer} / fuse {times[peer] / times['fuse']:5.2f}" for peer in PEERS)
            spent = ", ".join(f"{contender} {spent:.0f}" for contender, spent in times.items())
            print(f"{name:20} {way:5} {told}   us: {spent}", flush=True)
    cases = [found[name] for name in CASES if name in found]
    save("convolutions", cases)
    print("\n".join(summary(cases)))


if __name__ == "__main__":
    main(sys.argv[1:])
