"""Whether the products of the library that torch calls are slow on this machine.

    mm of MKL, of OpenBLAS, ...   against   the same product of oneDNN      measured once on a machine, then kept

MKL chooses its code by the processor's maker: on others than Intel's it may run at half of what the processor can do,
where oneDNN, which asks for instructions only, does not. What is found is kept beside the built libraries, so that
equal models make equal programs from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache as cached

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fuse.runtime import cache
from fuse.runtime.cpu import processor
from fuse.runtime.tuning import kept

SIZE = 256
"""Rows, columns and depth of the product."""
ROUNDS = 8
SLOW = 1.3
"""Times what oneDNN takes from which the library is called slow."""


@cached
def is_slow() -> bool:
    """Whether the library's products take clearly longer than they could: some milliseconds, once a machine.

    >>> is_slow() == is_slow()
    True
    """
    if not torch.backends.mkldnn.is_available():
        return False
    key = cache.key_of("library products", processor.identity(), torch.__version__)
    words = "fast", "slow"
    return kept(key, words, lambda: words[times_slower() >= SLOW], "what products take") == "slow"


def times_slower() -> float:
    """How many times as long as oneDNN's the library's product takes, each at its best.

    >>> times_slower() > 0
    True
    """
    with _disable_current_modes(), torch.inference_mode():
        x = torch.ones(SIZE, SIZE, dtype=torch.float32, device="cpu")
        library = _least(lambda: torch.ops.aten.mm.default(x, x))
        return library / _least(lambda: torch.ops.mkldnn._linear_pointwise(x, x, None, "none", [], None))


def _least(run: Callable[[], object]) -> float:
    """Seconds of the fastest call; the first makes what later ones use again."""
    run()
    taken = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)
