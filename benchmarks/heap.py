"""What the first run of a model takes from ``malloc``, libraries included, by eager and by fuse.

    model, arguments, (fuse: captured, compiled, loaded)  ->  heap_reset()  ->  the first run  ->  heap_most()

Each side runs in a process of its own, with a counter (``heap.c``) in front of ``malloc``. MKL packs operands into
memory that it keeps, and oneDNN into memory beside its results; neither takes it from torch's allocator. A kernel of
ours does the same in the program's workspace. Here all of it counts, on both sides from a cold start: no product or
convolution has run when the count begins, only the threads have.

What is not counted: code, stacks of threads, and Python's objects of up to 512 bytes, for which it maps memory by
itself. Linux with glibc only.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import fuse
from benchmarks.common import ROOT
from fuse.graph.load import load
from fuse.runtime.guards import flatten

SOURCE = Path(__file__).parent / "heap.c"
SIDES = ("eager", "fused")


def heap_peaks(target: str, *settings: str) -> dict[str, int]:
    """For each side the bytes that the first run of a model file holds at most, besides what was there before."""
    with tempfile.TemporaryDirectory(prefix="fuse-heap-") as folder:
        counter = counter_in(Path(folder))
        return {side: _first_run_apart(counter, side, target, *settings) for side in SIDES}


def counter_in(folder: Path) -> Path:
    """The counter, compiled."""
    library = folder / "heap.so"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-fno-builtin", SOURCE, "-o", library], check=True)
    return library


def _first_run_apart(counter: Path, *arguments: str) -> int:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.heap", *arguments],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(counter)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return int(ran.stdout)


def first_run(side: str, target: str, *settings: str) -> int:
    """The most bytes that the first run in this process holds, in front of whose ``malloc`` the counter is."""
    heap = ctypes.CDLL(None)
    heap.heap_live.restype = heap.heap_most.restype = ctypes.c_long
    loaded = load(target, settings=settings, real=True)
    model, args, kwargs = loaded.model, loaded.args, loaded.kwargs
    if side == "fused":
        model = fuse.compile(model)
    with torch.no_grad():
        if side == "fused":
            model._own()._make(args, kwargs, *flatten(args, kwargs))  # as a first call, but that nothing runs
        torch.ones(1 << 17).exp()  # starts the threads
        gc.collect()
        gc.disable()
        heap.heap_reset()
        before = heap.heap_live()
        result = model(*args, **kwargs)
        most = heap.heap_most()
    del result
    return int(most - before)


if __name__ == "__main__":
    if sys.argv[1] in SIDES:
        print(first_run(*sys.argv[1:]))
    else:
        print(heap_peaks(*sys.argv[1:]))
