"""The counter in front of malloc counts what is held at once, by whichever function it was taken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fuse.report.timing.heap import counter_in

BYTES = 1 << 20
SCRIPT = f"""
import ctypes
heap = ctypes.CDLL(None)
for function in (heap.malloc, heap.calloc, heap.realloc, heap.aligned_alloc):
    function.restype = ctypes.c_void_p
heap.heap_live.restype = heap.heap_most.restype = ctypes.c_long
word = ctypes.c_size_t
heap.heap_reset()
before = heap.heap_live()
held = [heap.malloc(word({BYTES})), heap.calloc(word({BYTES}), word(1)), heap.aligned_alloc(word(64), word({BYTES}))]
held[0] = heap.realloc(ctypes.c_void_p(held[0]), word({2 * BYTES}))
for block in held:
    heap.free(ctypes.c_void_p(block))
heap.free(ctypes.c_void_p(heap.malloc(word({BYTES}))))
print(heap.heap_most() - before, heap.heap_live() - before)
"""


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="the counter is for glibc, built by cc")
def test_what_is_held_at_once_is_counted(tmp_path: Path) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(counter_in(tmp_path))}
    ran = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    most, left = map(int, ran.stdout.split())
    assert most == pytest.approx(4 * BYTES, rel=0.01)
    assert abs(left) < 4096
