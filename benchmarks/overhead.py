"""What one launch of a fused program costs besides the kernel's own work, and what one call costs.

    x = x + 1  n times on 64 elements, fusion switched off: n generated kernels in one call

    microseconds of a call  =  fixed  +  slope * n          least squares over n = 10 ... 1000

The kernel's own work on 64 elements is part of the slope, so the overhead of a launch is below it. Python's share of
one call is what passes outside of the native program: guards, allocation of the result, and the call itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fuse
from benchmarks.common import save
from fuse.report.timing.timing import interleaved, quartiles

LENGTHS = (10, 30, 100, 300, 1000)
ELEMENTS = 64
SECONDS = 3.0


class Chain(nn.Module):
    """``x + 1``, ``length`` times."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.length):
            x = x + 1
        return x


def chain_call(length: int) -> Callable[[], object]:
    """A compiled chain with every operator a kernel of its own, called once already."""
    fused = fuse.compile(Chain(length), passes=[])
    x = torch.randn(ELEMENTS)
    fused(x)
    assert fused.last_run.kernels == fused.last_run.launches == length, fused.last_run
    return partial(fused, x)


def slope() -> dict[str, Any]:
    """Microseconds of calls by length, and the line through them."""
    samples = interleaved({str(length): chain_call(length) for length in LENGTHS}, SECONDS)
    medians = [1e6 * quartiles(samples[str(length)]).median for length in LENGTHS]
    per_launch, fixed = statistics.linear_regression(LENGTHS, medians)
    return {
        "what": f"{LENGTHS[0]} to {LENGTHS[-1]} kernels in one call, {ELEMENTS} elements each",
        "kernels": list(LENGTHS),
        "microseconds": medians,
        "microseconds_per_launch": per_launch,
        "fixed_microseconds": fixed,
    }


def python_share() -> dict[str, Any]:
    """Microseconds of a call of a small model with weights, and how many of them pass outside of the native program."""
    fused = fuse.compile(nn.Sequential(nn.Linear(ELEMENTS, ELEMENTS), nn.Tanh()))
    x = torch.randn(1, ELEMENTS)
    fused(x)
    program = fused.compiled.program
    native, run = [0.0], program._run

    def timed(*arguments: Any) -> int:
        started = time.perf_counter()
        launches: int = run(*arguments)
        native[0] += time.perf_counter() - started
        return launches

    calls = 20_000
    with mock.patch.object(program, "_run", timed), mock.patch.object(program, "_functions", {}):
        started = time.perf_counter()
        for _ in range(calls):
            fused(x)
        whole = time.perf_counter() - started
    return {
        "what": "a linear layer and tanh, one row",
        "microseconds_per_call": 1e6 * whole / calls,
        "microseconds_in_python": 1e6 * (whole - native[0]) / calls,
    }


if __name__ == "__main__":
    with torch.no_grad():
        save("overhead", [slope(), python_share()])
