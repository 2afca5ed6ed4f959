"""How near user-written loops come to what the machine allows.

A step of B rows, H units and G gates cannot take less than ``max(2 B G H^2 / peak, weight bytes / bandwidth)``, both of
all cores together; the product with an input as wide as the state costs the same arithmetic again, once. ``recurrent``
is the limit by the step's own product alone, ``whole`` with the input's. Neither knows the elementwise part.
Shapes are (steps, batch, width); ratios are limit over time, 1 at the limit.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import fuse
from benchmarks.common import ROOT, save
from benchmarks.recurrent import SHAPES
from fuse.graph.loading.load import load
from fuse.runtime.cpu.compiler import build

GATES = {"lstm_loop": 4, "gru_loop": 3}
ROUNDS = 7
SECONDS = 0.3
STREAM = """
#include <cstdint>
#include <omp.h>
// Reads `size` floats once for every repetition, each thread its own share; the sum keeps the reads.
extern "C" float fuse_stream(const float *data, int64_t size, int64_t repetitions) {
    float total = 0;
#pragma omp parallel reduction(+ : total)
    {
        const int64_t members = omp_get_num_threads(), member = omp_get_thread_num();
        const float *from = data + size / members * member;
        for (int64_t turn = 0; turn < repetitions; ++turn) {
            float sums[128] = {};
            for (int64_t i = 0; i + 128 <= size / members; i += 128) {
                for (int64_t lane = 0; lane < 128; ++lane) sums[lane] += from[i + lane];
            }
            for (int64_t lane = 0; lane < 128; ++lane) total += sums[lane];
            __asm__ volatile("" : : : "memory");
        }
    }
    return total;
}
"""


def fastest(function: Callable[[], object], seconds: float = SECONDS) -> float:
    """The shortest of many runs, in seconds: what the machine can do when nothing disturbs it."""
    function()
    taken = []
    end = time.perf_counter() + seconds
    while not taken or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return min(taken)


def peak() -> float:
    """Floating-point operations a second of oneDNN's product in float32, weights packed, on all threads."""
    size = 1024
    x, weight = torch.randn(size, size), torch.randn(size, size)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, size)
    return 2 * size**3 / fastest(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))


def bandwidth(size: int) -> float:
    """Bytes a second that all threads read from the caches that hold ``size`` bytes."""
    stream = build(STREAM).fuse_stream
    stream.restype = ctypes.c_float
    stream.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    data = torch.randn(size // 4)
    repetitions = max(1, 2**26 // size)
    return size * repetitions / fastest(lambda: stream(data.data_ptr(), size // 4, repetitions))


def case(name: str, steps: int, batch: int, width: int, operations: float) -> dict[str, Any]:
    """Milliseconds of the fused loop and its limits, and what bounds the step."""
    settings = (f"seq_length={steps}", f"batch_size={batch}", f"input_size={width}", f"hidden_size={width}")
    loaded = load(str(ROOT / "models" / f"{name}.py"), settings=settings, real=True)
    fused = fuse.compile(loaded.model)
    weights = 4 * GATES[name] * width**2
    read = bandwidth(weights)
    arithmetic, reading = 2 * batch * GATES[name] * width**2 / operations, weights / read
    step = max(arithmetic, reading)
    with torch.no_grad():
        taken = statistics.median(fastest(lambda: fused(*loaded.args)) for _ in range(ROUNDS))
    whole = steps * (step + arithmetic)
    return {
        "model": name,
        "shape": [steps, batch, width],
        "milliseconds": {"fused": 1e3 * taken, "recurrent": 1e3 * steps * step, "whole": 1e3 * whole},
        "ratios": {"recurrent": steps * step / taken, "whole": whole / taken},
        "bound": "arithmetic" if arithmetic >= reading else "reading weights",
        "bytes_per_second": read,
    }


def main() -> None:
    operations = peak()
    print(f"peak {operations / 1e9:.0f} Gflop/s with {torch.get_num_threads()} threads", file=sys.stderr)
    cases = []
    for name in GATES:
        for shape in SHAPES:
            found = case(name, *shape, operations)
            cases.append({**found, "operations_per_second": operations})
            ratios = " ".join(f"{limit} {ratio:.2f}" for limit, ratio in found["ratios"].items())
            print(f"{name} {shape} {ratios}  bound by {found['bound']}", file=sys.stderr)
    save("limit", cases)


if __name__ == "__main__":
    main()
