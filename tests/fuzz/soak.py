"""Long runs: is memory flat, is the cost of a graph linear? ``python -m tests.fuzz.soak``.

    calls        100,000 calls of one program, of sizes in turn, and of training steps    memory within 1 %
    captures     2,000 models, each captured, rewritten and forgotten                     memory within 1 %, and
                                                                                          garbage is collected
    nodes        graphs of 5,000, 10,000 ... 50,000 operators                             seconds an operator
    processes    16 at once on one empty cache, each another's equal                      all right
    faults       the tests of build faults, the cache, Ctrl-C and fork, 50 times          none fails once

Each part runs in a process of its own, so that what one leaves behind does not count for another. A part alone:
``python -m tests.fuzz.soak captures``.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import fuse

LARGEST_GROWTH = 0.01
CALLS, CAPTURES, PROCESSES, REPEATS = 100_000, 2_000, 16, 50
FAULTS = ("runtime/cpu/test_build_faults.py", "runtime/test_cache.py", "runtime/test_interrupts.py")


class Step(nn.Module):
    """A loop and what is around it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(width, width), nn.Linear(width, width)

    def forward(self, xs: Tensor) -> Tensor:
        h = xs.new_zeros(xs.shape[1], xs.shape[2])
        for x in xs:
            h = self.cell(x, h)
        last: Tensor = self.last(h).softmax(-1)
        return last


class Chain(nn.Module):
    """So many operators, no two neighbours alike."""

    def __init__(self, operators: int) -> None:
        super().__init__()
        self.operators = operators

    def forward(self, x: Tensor) -> Tensor:
        for number in range(self.operators // 3):
            x = torch.tanh(x * (1 + number * 1e-4)) + (x if number % 7 else 0.5)
        return x


def resident() -> int:
    """Bytes of memory that this process holds, after what is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(work: Callable[[int], object], times: int) -> str:
    """Memory at the end against that after the first fifth, which fills what is bounded."""
    for number in range(times // 5):
        work(number)
    before = resident()
    for number in range(times // 5, times):
        work(number)
    after = resident()
    grown = after / before - 1
    verdict = "flat" if grown <= LARGEST_GROWTH else "GROWS"
    return f"{times} times: {before / 1e6:.1f} MB, then {after / 1e6:.1f} MB ({grown:+.2%}) {verdict}"


def calls() -> str:
    torch.manual_seed(0)
    fused, sizes = fuse.compile(Step()), [torch.randn(9, batch, 8) for batch in (2, 3, 5)]
    with torch.no_grad():
        plain = growth(lambda number: fused(sizes[0]), CALLS)
        varying = growth(lambda number: fused(sizes[number % 3]), CALLS)
    trained = fuse.compile(Step())
    steps = growth(lambda number: trained(sizes[0]).sum().backward(), CALLS // 5)
    return f"calls {plain}; of three sizes {varying}; training steps {steps}"


def captures() -> str:
    """Python's objects are counted, too, before anybody but Python and fuse collects garbage."""
    x, most = torch.randn(9, 2, 8), 0

    def one(number: int) -> None:
        nonlocal most
        with torch.no_grad():
            fuse.compile(Step())(x)
        if number % (CAPTURES // 100) == 0:
            most = max(most, len(gc.get_objects()))

    grown = growth(one, CAPTURES)
    times = most / len(gc.get_objects())
    verdict = "collected" if times < 3 else "GROWS"
    return f"captures {grown}; at most {times:.1f} times the objects that stay: {verdict}"


def nodes() -> str:
    """Capture and passes alone: a compiler's time for one kernel is its own."""
    seconds = {}
    for operators in (5_000, 10_000, 25_000, 50_000):
        start = time.process_time()
        fuse.run_passes(fuse.capture(Chain(operators), (torch.zeros(4),)))
        seconds[operators] = time.process_time() - start
    rates = [spent / operators for operators, spent in seconds.items()]
    verdict = "linear" if rates[-1] < 1.5 * rates[0] else "NOT LINEAR"
    listed = ", ".join(f"{operators:,}: {spent:.1f} s" for operators, spent in seconds.items())
    return f"nodes {listed}; {verdict}"


BUILD = """
import sys, torch, fuse
from tests.fuzz.soak import Step
torch.manual_seed(0)
model, x = Step(), torch.randn(9, 3, 8)
sys.stdin.readline()
with torch.no_grad():
    fused = fuse.compile(model)
    torch.testing.assert_close(fused(x), model(x))
    assert fused.compiled is not None and not fused.last_run.fallbacks
"""


def processes() -> str:
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "FUSE_CACHE_DIR": f"{scratch}/cache", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", BUILD]
        started = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True, cwd=os.getcwd()
            )
            for _ in range(PROCESSES)
        ]
        ends = [process.communicate("go\n") for process in started]
    bad = [error for process, (_, error) in zip(started, ends, strict=True) if process.returncode or error]
    return f"processes {PROCESSES} at once: " + (f"{len(bad)} FAILED: {bad[0][-500:]}" if bad else "all right")


def faults() -> str:
    """Each time in a process of its own, as a user meets them."""
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(tests / one) for one in FAULTS)]
    ends = [subprocess.run(command, capture_output=True, text=True) for _ in range(REPEATS)]
    bad = [end.stdout for end in ends if end.returncode]
    return f"faults {REPEATS} times: " + (f"{len(bad)} FAILED: {bad[0][-2000:]}" if bad else "all right")


PARTS: dict[str, Callable[[], str]] = {
    "calls": calls,
    "captures": captures,
    "nodes": nodes,
    "processes": processes,
    "faults": faults,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all without any")
    chosen = parser.parse_args(arguments).parts or list(PARTS)
    if len(chosen) == 1:
        warnings.simplefilter("ignore")
        said = PARTS[chosen[0]]()
        print(said, flush=True)
        return int(any(word in said for word in ("GROWS", "NOT LINEAR", "FAILED")))
    return max(subprocess.run([sys.executable, "-m", "tests.fuzz.soak", part]).returncode for part in chosen)


if __name__ == "__main__":
    sys.exit(main())
