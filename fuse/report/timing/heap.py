"""Measure the memory that a model's first run takes from ``malloc``, including libraries, in eager and fused.

    model, arguments, (fuse: captured, compiled, loaded)  ->  heap_reset()  ->  the first run  ->  heap_most()

Each side runs in a process of its own, with a counter (``heap.c``) in front of ``malloc``. MKL packs operands into
memory that it keeps, and oneDNN into memory beside its results; neither takes it from torch's allocator. Our kernels
pack into the program's workspace. All of this counts, from a cold start on both sides: no product or convolution has
run when the count begins, but the threads have started.

The count excludes code, thread stacks, and Python objects of up to 512 bytes, for which Python maps memory itself.
Linux with glibc only.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fuse
from fuse.cost.allocated import peak_allocated
from fuse.graph.loading.load import LoadedModel, load
from fuse.report.tracing.profiling import silent
from fuse.runtime.guards.call_guards import flatten

SOURCE = Path(__file__).parent / "heap.c"
SIDES = ("eager", "fused")


def heap_peaks(
    target: str, inputs: Sequence[str] = (), settings: Sequence[str] = (), sides: Sequence[str] = SIDES
) -> dict[str, int]:
    """For each side, the peak bytes of the first run of a model file, beyond the memory held before.

    Raises ``OSError`` and ``subprocess.SubprocessError`` where the counter cannot be built or a run fails.
    """
    with tempfile.TemporaryDirectory(prefix="fuse-heap-") as folder:
        counter = counter_in(Path(folder))
        asked = json.dumps([target, list(inputs), list(settings)])
        return {side: _first_run_apart(counter, side, asked) for side in sides}


def held_by_libraries(target: str, inputs: Sequence[str], settings: Sequence[str], loaded: LoadedModel) -> int | None:
    """The peak bytes that eager's libraries hold for themselves: the peak of a run less that of torch's allocator.

    None if it cannot be observed: not on Linux with glibc, no C compiler, or the separate run fails.
    """
    own, args, kwargs = copy.deepcopy((loaded.model, loaded.args, loaded.kwargs))
    try:
        all_of_it = heap_peaks(target, inputs, settings, ("eager",))["eager"]
        with torch.no_grad(), silent():
            own(*args, **kwargs)
            seen = peak_allocated(lambda: own(*args, **kwargs))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return max(0, all_of_it - seen)


def counter_in(folder: Path) -> Path:
    """The counter, compiled."""
    library = folder / "heap.so"
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-O2", "-shared", "-fPIC", "-fno-builtin", str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    return library


def _first_run_apart(counter: Path, *arguments: str) -> int:
    ran = subprocess.run(
        [sys.executable, "-m", "fuse.report.timing.heap", *arguments],
        env={**os.environ, "LD_PRELOAD": str(counter)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
        timeout=300,
    )
    return int(ran.stdout.split()[-1])


def first_run(side: str, target: str, inputs: Sequence[str], settings: Sequence[str]) -> int:
    """The peak bytes of the first run in this process, which has the counter in front of ``malloc``."""
    heap = ctypes.CDLL(None)
    heap.heap_live.restype = heap.heap_most.restype = ctypes.c_long
    loaded = load(target, inputs, settings, real=True)
    model: Any = loaded.model
    args, kwargs = loaded.args, loaded.kwargs
    if side == "fused":
        model = fuse.compile(model)
    with torch.no_grad():
        if side == "fused":
            model._own()._make(args, kwargs, *flatten(args, kwargs))  # compile as in a first call, without running
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
    print(first_run(sys.argv[1], *json.loads(sys.argv[2])))
