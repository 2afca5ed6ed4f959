"""Models that decide by sizes, at many random sizes: right, and compiled for few? ``python -m tests.fuzz.sizes``.

    branch         another formula where the length is above a number
    windows        windows of 64 steps, the last one padded
    mean_by_hand   a product with 1 / length
    several        as many results as there are steps
    attention      causal, every step with those before it

Each model is called with 200 random pairs of a length (1 to 150) and a batch size (1 to 12), in inference and in
training, every new size captured at once. Results, strides and gradients are held to eager and to float64. Each part
runs in a process of its own with an empty cache. A part alone: ``python -m tests.fuzz.sizes windows --training``.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse
from benchmarks.common import compilations
from fuse.runtime.sizes import patience

WIDTH = 8
PAIRS, LONGEST, LARGEST_BATCH = 200, 150, 12

Result = Tensor | tuple[Tensor, ...]


class Model(nn.Module):
    """A function of an input [length, batch, 8] and some weights."""

    def __init__(self, function: Callable[[Model, Tensor], Result]) -> None:
        super().__init__()
        self.function = function
        self.first, self.all = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Result:
        return self.function(self, x)


def branch(m: Model, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x)) if x.shape[0] > 12 else torch.sigmoid(m.first(x)) * x.shape[0]


def windows(m: Model, x: Tensor, steps: int = 64) -> Tensor:
    padded = F.pad(m.first(x), (0, 0, 0, 0, 0, -x.shape[0] % steps))
    parts = padded.view(-1, steps, *x.shape[1:])
    return (parts - parts.mean(1, keepdim=True)).reshape(padded.shape)[: x.shape[0]]


def mean_by_hand(m: Model, x: Tensor) -> Tensor:
    return m.first(x).sum(0) * (1 / x.shape[0]) - x[-1]


def several(m: Model, x: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.exp(step) for step in m.first(x))


def attention(m: Model, x: Tensor) -> Tensor:
    steps, batch, _ = x.shape
    q, k, v = m.all(x).view(steps, batch, 3, 2, WIDTH // 2).permute(2, 1, 3, 0, 4)
    later = torch.ones(steps, steps, dtype=torch.bool).triu(1)
    return (q @ k.transpose(-1, -2)).masked_fill(later, float("-inf")).softmax(-1) @ v


MODELS: dict[str, Callable[[Model, Tensor], Result]] = {
    function.__name__: function for function in (branch, windows, mean_by_hand, several, attention)
}


def leaves(result: Result) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def pairs(count: int, seed: int = 0, longest: int = LONGEST, largest: int = LARGEST_BATCH) -> list[tuple[int, int]]:
    numbers = random.Random(seed)
    return [(numbers.randint(1, longest), numbers.randint(1, largest)) for _ in range(count)]


def infer(model: nn.Module, double: nn.Module, fused: nn.Module, x: Tensor) -> None:
    """One call in inference, held to eager's layout and to float64."""
    with torch.no_grad():
        for got, eager, exact in zip(leaves(fused(x)), leaves(model(x)), leaves(double(x.double())), strict=True):
            torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)
            assert (got.dtype, got.stride()) == (eager.dtype, eager.stride())


def train(model: nn.Module, double: nn.Module, fused: nn.Module, x: Tensor) -> None:
    """The gradients of one call, held to float64."""
    exact = x.double().requires_grad_()
    x.requires_grad_()
    for one, given in ((fused, x), (double, exact)):
        one.zero_grad()
        sum((r * torch.linspace(0, 1, r.numel()).view(r.shape)).sum() for r in leaves(one(given))).backward()
    for mine, other in ((x, exact), *zip(model.parameters(), double.parameters(), strict=True)):
        assert (mine.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-3, atol=1e-4 if mine is x else 1e-3)


def judged(function: Callable[[Model, Tensor], Result], sizes: Iterable[tuple[int, int]], training: bool) -> str:
    """Calls of all sizes in turn: how many were wrong, compiled, or ran eager."""
    torch.manual_seed(0)
    model = Model(function).train(training)
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    judge = train if training else infer
    wrong: list[str] = []
    compiling, eager = [], 0
    started = time.process_time()
    with compilations() as compiled:
        for count, shape in enumerate(sizes):
            before = len(compiled)
            try:
                judge(model, double, fused, torch.randn(*shape, WIDTH))
            except AssertionError as error:
                wrong.append(f"{shape}: {str(error).strip().splitlines()[0]}")
            eager += bool(fused.last_run.fallbacks)
            if len(compiled) > before:
                compiling.append((count, shape))
    verdict = f"{len(wrong)} WRONG, first {wrong[0]}" if wrong else "all right"
    return (
        f"{verdict}; {len(compiling)} calls compile ({len(compiled)} units; call and size: {compiling[:8]}), "
        f"{eager} run eager; {time.process_time() - started:.0f} s"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.sizes", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", choices=[*MODELS], help="all, in inference and training, without it")
    parser.add_argument("--training", action="store_true", help="of the one model that is named")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    options = parser.parse_args(arguments)
    if options.model:
        patience.SETTLED = 1_000_000
        warnings.filterwarnings("ignore", message="Model was called with more than")
        said = judged(MODELS[options.model], pairs(options.pairs), options.training)
        print(f"{options.model}, {'training' if options.training else 'inference'}: {said}", flush=True)
        return int("WRONG" in said)
    worst = 0
    for name in MODELS:
        for training in ([], ["--training"]):
            command = [sys.executable, "-m", "tests.fuzz.sizes", name, *training, "--pairs", str(options.pairs)]
            with tempfile.TemporaryDirectory(prefix="fuse-sizes-") as cache:
                os.chmod(cache, 0o700)
                worst = max(worst, subprocess.run(command, env={**os.environ, "FUSE_CACHE_DIR": cache}).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
