"""The fastest of several ways to compute one thing: measured once on a machine, and kept.

    FUSE_TUNE=1     ways -- known from before? -- yes --> that one
                                  | no
                                  v
                    each in turn, for a few rounds --> the one of least time --> cache     the first, if it is near that

Without ``FUSE_TUNE`` nothing is measured, and the constants of the passes and schedules decide: equal programs on equal
machines, whatever ran there before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping

import torch

from fuse.runtime import cache

ROUNDS = 9
"""Rounds in which no way becomes clearly faster, after which no further one is begun: more on a busy machine."""
SECONDS = 0.3
"""Time after which no further round is begun: three are, however long they take."""
FEWEST_ROUNDS = 3
CLEARLY = 0.97
"""Part of a time that a clearly shorter one stays below."""

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
    subject: str, ways: Mapping[str, Callable[[], object]], clock: Callable[[], float] = time.perf_counter
) -> str:
    """The name of the fastest of ``ways`` to compute ``subject``.

    What was found before for this subject, which names the machine, these names and this many threads is not measured
    again, in other processes neither. Where the cache cannot be written, one warning says so and this process
    remembers.

    >>> fastest("an example", {"short": lambda: sum(range(10)), "long": lambda: sum(range(100_000))})
    'short'
    """
    key = cache.key_of("tuned", subject, *sorted(ways), str(torch.get_num_threads()), torch.__version__)
    if _known.get(key) not in ways:
        _known[key] = kept(key, ways, lambda: _measured(ways, clock), "what was measured for FUSE_TUNE")
    return _known[key]


def _measured(ways: Mapping[str, Callable[[], object]], clock: Callable[[], float]) -> str:
    """The way whose best round was the shortest, or the first where none was clearly shorter than its own.

    One round in front compiles, and warms caches and threads.
    """
    for way in ways.values():
        way()
    least = dict.fromkeys(ways, float("inf"))
    begun, number, steady = clock(), 0, 0
    while steady < ROUNDS and (number < FEWEST_ROUNDS or clock() - begun <= SECONDS):
        number, steady = number + 1, steady + 1
        for name, way in ways.items():
            start = clock()
            way()
            taken = clock() - start
            steady = steady if taken > CLEARLY * least[name] else 1
            least[name] = min(least[name], taken)
    first, best = next(iter(least)), min(least, key=least.__getitem__)
    return best if least[best] < CLEARLY * least[first] else first


def kept(key: str, known: Collection[str], measure: Callable[[], str], what: str) -> str:
    """The one of some ``known`` words that ``measure`` gives, once a machine; ``what`` names it where that fails."""
    found = cache.find(key, _SUFFIX)
    word = found[1].decode(errors="replace") if found else ""
    if word not in known:
        word = measure()
        try:
            cache.store(key, word.encode(), _SUFFIX)
        except OSError as error:
            cache.warn_once(f"{what} cannot be kept ({error.strerror}): it is measured once a process")
    return word
