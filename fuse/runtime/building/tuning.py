"""Autotuning: the fastest of several candidates, measured once on a machine and cached.

    FUSE_TUNE=1     candidates -- in the cache? -- yes --> that one
                                  | no
                                  v
                    each in turn, for a few rounds --> the fastest --> cache     the first, if none is clearly faster

Without ``FUSE_TUNE`` nothing is measured, and the constants of passes and schedules decide, so that equal machines run
equal programs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import torch

from fuse.runtime.building import cache

ROUNDS = 9
"""Rounds without a clearly shorter time of any candidate, after which measuring ends; a busy machine takes more
rounds."""
SECONDS = 0.3
"""Seconds after which no further round begins, except for the first ``FEWEST_ROUNDS``."""
FEWEST_ROUNDS = 3
"""Rounds that are measured however long they take: the shortest counts, so that one undisturbed round is enough."""
CLEARLY = 0.97
"""A time is clearly shorter than another if it is less than this part of it."""

Word = TypeVar("Word", str, str | None)

_SUFFIX = ".txt"
_known: dict[str, str] = {}


def enabled() -> bool:
    """Whether ``FUSE_TUNE`` asks for measurements.

    >>> import os
    >>> os.environ.pop("FUSE_TUNE", None) and None
    >>> enabled()
    False
    """
    return os.environ.get("FUSE_TUNE", "") not in ("", "0")


def fastest(
    subject: str, candidates: Mapping[str, Callable[[], object]], clock: Callable[[], float] = time.perf_counter
) -> str:
    """The name of the fastest of ``candidates``, functions that compute the same.

    ``subject`` names the computation and the machine. The result is cached on disk for this subject, these names and
    this number of threads. If the cache cannot be written, there is one warning, and this process remembers the result.

    >>> fastest("an example", {"short": lambda: sum(range(10)), "long": lambda: sum(range(100_000))})
    'short'
    """
    key = cache.key_of("tuned", subject, *sorted(candidates), str(torch.get_num_threads()), torch.__version__)
    if _known.get(key) not in candidates:
        _known[key] = kept(key, candidates, lambda: _measured(candidates, clock), "what was measured for FUSE_TUNE")
    return _known[key]


def _measured(candidates: Mapping[str, Callable[[], object]], clock: Callable[[], float]) -> str:
    """The candidate with the shortest best round; the first one if no other is clearly faster.

    A round before the measurement compiles kernels, and warms caches and threads.
    """
    for candidate in candidates.values():
        candidate()
    least = dict.fromkeys(candidates, float("inf"))
    begun, number, steady = clock(), 0, 0
    while steady < ROUNDS and (number < FEWEST_ROUNDS or clock() - begun <= SECONDS):
        number, steady = number + 1, steady + 1
        for name, candidate in candidates.items():
            start = clock()
            candidate()
            taken = clock() - start
            steady = steady if taken > CLEARLY * least[name] else 1
            least[name] = min(least[name], taken)
    first, best = next(iter(least)), min(least, key=least.__getitem__)
    return best if least[best] < CLEARLY * least[first] else first


def kept(key: str, known: Collection[str], measure: Callable[[], Word], what: str) -> str | Word:
    """The cached result of ``measure``, one of the words ``known``, or None, which is not cached; ``what`` names it in
    a warning if it cannot be cached."""
    found = cache.find(key, _SUFFIX)
    word = found[1].decode(errors="replace") if found else ""
    if word in known:
        return word
    measured = measure()
    if measured is not None:
        try:
            cache.store(key, measured.encode(), _SUFFIX)
        except OSError as error:
            cache.warn_once(f"{what} cannot be kept ({error.strerror}): it is measured once a process")
    return measured
