"""Speed test of torch's BLAS library against oneDNN on this machine.

    mm of MKL, of OpenBLAS, ...   against   the same product of oneDNN      measured once on a machine, then cached

MKL chooses its code by the vendor of the processor: on processors of others than Intel, it may reach half of the
possible speed. oneDNN chooses by instruction set. The result is cached with the built libraries, so that equal models
make equal programs from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache as cached
from resource import RUSAGE_SELF, getrusage

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fuse.runtime.building import cache
from fuse.runtime.building.tuning import kept
from fuse.runtime.cpu import processor

SIZE = 256
"""Rows, columns and depth of the product."""
ROUNDS = 16
"""Measurements of each library; the shortest counts."""
SLOW = 1.3
"""Time of a slow library, relative to oneDNN; well above the noise, and below the factor 2 of MKL on other
processors."""


BUSY = ROUNDS
"""Times that a process is taken from its processor in all rounds on a busy machine: with 4 other processes on two
processors about 90, without them 0 to 3. A library's threads then share a processor, and seem twice as slow."""


@cached
def is_slow() -> bool:
    """Whether the library's products are slow; measured once on a machine, in a few milliseconds.

    While the machine is busy, the library counts as fast, and the next process measures again.

    >>> is_slow() == is_slow()
    True
    """
    if not torch.backends.mkldnn.is_available():
        return False
    key = cache.key_of("library products", processor.identity(), torch.__version__)
    return kept(key, ("fast", "slow"), _word, "what products take") == "slow"


def _word() -> str | None:
    """How the library is, or None while the machine is busy."""
    before = _times_taken_off()
    slow = times_slower() >= SLOW
    if _times_taken_off() - before >= BUSY:
        return None
    return "slow" if slow else "fast"


def _times_taken_off() -> int:
    return getrusage(RUSAGE_SELF).ru_nivcsw


def times_slower() -> float:
    """The time of the library's product divided by that of oneDNN, the best of several each.

    Both run in turn, so that a busy moment of the machine meets both.

    >>> times_slower() > 0
    True
    """
    with _disable_current_modes(), torch.inference_mode():
        x = torch.ones(SIZE, SIZE, dtype=torch.float32, device="cpu")

        def library() -> object:
            return torch.ops.aten.mm.default(x, x)

        def onednn() -> object:
            return torch.ops.mkldnn._linear_pointwise(x, x, None, "none", [], None)

        library(), onednn()  # the first calls warm up
        taken = [(_seconds(library), _seconds(onednn)) for _ in range(ROUNDS)]
    return min(a for a, _ in taken) / min(b for _, b in taken)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
