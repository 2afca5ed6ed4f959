"""Time several functions fairly in one process.

    round 1:  a b c      round 2:  b c a      round 3:  c a b      ...

Other load on the machine affects all functions of a round alike, so that ratios within a round are more reliable than
times taken one after the other. A sample is as many calls as the clock needs.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SAMPLE_SECONDS = 0.005
MINIMUM_ROUNDS = 5


@dataclass(frozen=True)
class Quartiles:
    """The median of some figures, with the lower and upper quartiles."""

    lower: float
    median: float
    upper: float

    def to_dict(self) -> dict[str, float]:
        return {"lower_quartile": self.lower, "median": self.median, "upper_quartile": self.upper}


def quartiles(figures: list[float]) -> Quartiles:
    """The quartiles of at least one figure.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    Quartiles(lower=2.0, median=3.0, upper=4.0)
    """
    if len(figures) == 1:
        return Quartiles(figures[0], figures[0], figures[0])
    lower, median, upper = statistics.quantiles(figures, n=4, method="inclusive")
    return Quartiles(lower, median, upper)


def interleaved(functions: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Seconds of one call of each function, sampled in rounds for about ``seconds`` times their number.

    Every function must have been called before: first calls are measured separately. Position ``i`` of every list
    belongs to the same round. At least five rounds are made, however long they take.

    >>> samples = interleaved({"quick": lambda: None, "other": lambda: None}, seconds=0.02)
    >>> len(samples["quick"]) == len(samples["other"]) >= 5
    True
    """
    calls = {name: _calls_per_sample(function) for name, function in functions.items()}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    deadline = time.perf_counter() + seconds * len(names)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        rounds = 0
        while rounds < MINIMUM_ROUNDS or time.perf_counter() < deadline:
            first = rounds % len(names)
            for name in names[first:] + names[:first]:
                samples[name].append(_sample(functions[name], calls[name]))
            rounds += 1
    finally:
        if collecting:
            gc.enable()
    return samples


def _calls_per_sample(function: Callable[[], object]) -> int:
    return max(1, round(SAMPLE_SECONDS / max(min(_sample(function, 1), _sample(function, 1)), 1e-7)))


def _sample(function: Callable[[], object], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - started) / calls
