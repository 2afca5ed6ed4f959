"""Forty calls with forty sizes: what each new pair of length and batch size costs, caches cold.

    for steps, batch in forty random pairs:  model(x [steps, batch, 64])        one process a model and contestant

Default settings on all sides. Beside the seconds of all calls: of how many calls the compiler ran, how many ran eager
(fuse captures a size that is new at once while it has seen few), the median of the later calls with a size that is new,
of eager, and of captures; and what a program for all sizes takes against one that was made for the size at hand.
Of the later calls with a size that is new, none should take more than one and a half times eager's own first call of
that size and five milliseconds more: how many do, and the most that one takes beyond that. A call's time is the smaller
one of its seconds, which other processes lengthen, and its processor seconds, which a thread that spins lengthens.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import geometric_mean, median
from typing import Any

import torch
import torch._dynamo  # what torch's own imports take is not measured
import torch.nn.functional as F
from torch import Tensor, nn

import fuse
from benchmarks.common import ROOT, compilations, processor_seconds, save

PAIRS = 40
WIDTH = 64
SETTLED = 8
"""Calls after which a contestant has seen that sizes vary."""
ALLOWED, BESIDES = 1.5, 0.005
"""How often eager's own time, and how many seconds besides, a later call with a new size may take."""
ROUNDS = 30
COMPARED = ((16, 2), (17, 2), (32, 4), (33, 5), (64, 8), (70, 1))
"""Sizes at which the program for all sizes is timed against one of its own."""


class Plain(nn.Module):
    """Two layers, a residual and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.norm = nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.norm(self.narrow(F.gelu(self.wide(x))) + x), -1)


class Attention(nn.Module):
    """Causal attention with four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        steps, batch, _ = x.shape
        q, k, v = self.all(x).view(steps, batch, 3, 4, WIDTH // 4).permute(2, 1, 3, 0, 4)
        later = torch.ones(steps, steps, dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(-1, -2) / 4).masked_fill(later, float("-inf")).softmax(-1)
        return self.out((weights @ v).permute(2, 0, 1, 3).reshape(steps, batch, WIDTH))


class Windows(nn.Module):
    """Windows of 8 steps, the last one padded."""

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, 0, 0, -x.shape[0] % 8))
        windows = padded.view(-1, 8, *x.shape[1:])
        return (windows - windows.mean(1, keepdim=True)).reshape(padded.shape)[: x.shape[0]]


class Convolution(nn.Module):
    """A convolution over time and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.over_time = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.over_time(x.permute(1, 2, 0))).mean(-1)


class Strides(nn.Module):
    """Two convolutions over time that keep every other step, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.second = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.second(F.gelu(self.first(x.permute(1, 2, 0)))))
        return torch.log_softmax(self.out(y.transpose(1, 2)), -1)


class Gru(nn.Module):
    """A GRU written as a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.state = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, states = x.new_zeros(x.shape[1], WIDTH), []
        for step in x:
            (a, b, c), (d, e, f) = self.given(step).chunk(3, -1), self.state(h).chunk(3, -1)
            reset, update = torch.sigmoid(a + d), torch.sigmoid(b + e)
            h = (1 - update) * torch.tanh(c + reset * f) + update * h
            states.append(h)
        return torch.stack(states)


MODELS: dict[str, type[nn.Module]] = {
    "plain network": Plain,
    "causal attention": Attention,
    "windows of 8": Windows,
    "convolution": Convolution,
    "strided convolutions": Strides,
    "GRU loop": Gru,
}
CONTESTANTS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "eager": lambda model: model,
    "fuse": fuse.compile,
    "compile": torch.compile,
}


def measured(name: str, contestant: str) -> dict[str, Any]:
    """Seconds of forty calls in this process; of fuse also how its program for all sizes compares with others."""
    torch.manual_seed(0)
    numbers = random.Random(0)
    model = MODELS[name]().eval()
    called = CONTESTANTS[contestant](model)
    seconds, used, compiled, ran_eager = [], [], 0, 0
    with torch.no_grad(), compilations() as compiling:
        for _ in range(PAIRS):
            x = torch.randn(numbers.randint(3, 70), numbers.randint(1, 12), WIDTH)
            before, started, used_before = len(compiling), time.perf_counter(), processor_seconds()
            result = called(x)
            seconds.append(time.perf_counter() - started)
            used.append([*x.shape, min(seconds[-1], processor_seconds() - used_before)])
            compiled += len(compiling) > before
            ran_eager += contestant == "fuse" and bool(called.last_run.fallbacks)
            torch.testing.assert_close(result, model(x), rtol=1e-3, atol=1e-4)
        found = {"seconds": sum(seconds), "later": median(seconds[SETTLED:]), "compiled": compiled, "each": used}
        if contestant == "fuse":
            sizes = {0: torch.export.Dim("steps"), 1: torch.export.Dim("batch")}
            told = fuse.compile(model, dynamic_shapes=(sizes,))
            capture = capture_seconds(told, numbers)
            found |= {"ran_eager": ran_eager, "capture": capture, "of_own": of_own(model, told)}
        return found


def beyond(fuse: list[list[float]], eager: list[list[float]]) -> dict[str, float]:
    """Of the later calls with new sizes, how many there are, how many took more than allowed, and by how much most."""
    seen: set[tuple[float, ...]] = set()
    found = []
    for number, ((*size, taken), (*_, own)) in enumerate(zip(fuse, eager, strict=True)):
        if number >= SETTLED and tuple(size) not in seen:
            found.append(taken - ALLOWED * own - BESIDES)
        seen.add(tuple(size))
    return {"new": len(found), "over": sum(one > 0 for one in found), "most": max(found)}


def capture_seconds(told: nn.Module, numbers: random.Random) -> float:
    """The median of calls with sizes that are new, where each is captured at once."""
    seconds = []
    for _ in range(SETTLED + ROUNDS):
        x = torch.randn(numbers.randint(3, 70), numbers.randint(1, 12), WIDTH)
        started = time.perf_counter()
        told(x)
        seconds.append(time.perf_counter() - started)
    return median(seconds[SETTLED:])


def of_own(model: nn.Module, told: nn.Module) -> float:
    """What programs captured for a size take, over the program for all sizes: medians of interleaved calls."""
    ratios = []
    for steps, batch in COMPARED:
        x, own = torch.randn(steps, batch, WIDTH), fuse.compile(model, dynamic_shapes=None)
        times: tuple[list[float], list[float]] = ([], [])
        told(x), own(x)  # in this order: kernels for this size would serve both
        for _ in range(ROUNDS):
            for function, taken in zip((own, told), times, strict=True):
                started = time.perf_counter()
                function(x)
                taken.append(time.perf_counter() - started)
        ratios.append(median(times[0]) / median(times[1]))
    return geometric_mean(ratios)


def case(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"model": name}
    for contestant in CONTESTANTS:
        if (name, contestant) == ("GRU loop", "compile"):
            continue  # it unrolls the loop anew for each length
        with tempfile.TemporaryDirectory(prefix="fuse-bench-") as cache:
            os.chmod(cache, 0o700)
            ran = subprocess.run(
                [sys.executable, "-m", "benchmarks.sizes", name, contestant],
                cwd=ROOT,
                env={**os.environ, "FUSE_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        found[contestant] = json.loads(ran.stdout.splitlines()[-1])
    each = {contestant: found[contestant].pop("each") for contestant in CONTESTANTS if contestant in found}
    return {**found, "beyond": beyond(each["fuse"], each["eager"])}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measured(*sys.argv[1:])))
    else:
        cases = []
        for one in MODELS:
            cases.append(case(one))
            print(cases[-1], file=sys.stderr)
        save("sizes", cases)
