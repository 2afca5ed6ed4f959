"""Find a small set of operators that have to stay in float32, so that a result reaches its target.

    1. keep each operator alone, and order operators by the error that is left
    2. keep the first n in that order, with the smallest n that meets the target
    3. remove one operator after another, as long as the target is still met

Each trial runs the eager model in the narrow dtype and compares its result with float64. An operator is a function on a
line of the user's code: ``model.py:41:softmax``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fuse.check.draws import RecordedDraws, Replayed
from fuse.check.inputs import CheckCall, copied, in_float64
from fuse.check.precision.errors import Errors, PrecisionTarget, errors
from fuse.cost.count import count_graph
from fuse.cost.profiles import of_device
from fuse.devices import device_of
from fuse.errors import FuseError
from fuse.graph.capture import capture
from fuse.graph.precision import Precision, Watch, in_precision
from fuse.graph.structure.result_structure import named_parts
from fuse.rewrite.pipeline import run_passes
from fuse.runtime.module import compile as fuse_compile

TRIES = 3
"""Most searches, each with a stricter target than the last, if the fused run misses the requested target."""

TIMED_SECONDS = 1.0
"""Seconds for which the two programs are timed."""


@dataclass(frozen=True)
class Cost:
    """The costs of a call: predicted launches and bytes, and the least measured milliseconds of the fused program."""

    launches: int
    bytes: int
    milliseconds: float


@dataclass(frozen=True)
class Recommendation:
    """The operators to keep in float32.

    Attributes:
        precision: the recommendation; None if no set of operators meets the target.
        before: errors of the result with no operator in float32.
        after: errors with the recommended operators in float32; with all of them if there is no recommendation.
        confirmed: errors of a fused run with the recommendation.
        plain: costs of a fused call with no operator in float32.
        kept: costs of a fused call with the recommendation.
        trials: number of runs of the search.
        reason: why there is no recommendation.
    """

    precision: Precision | None
    before: Errors
    after: Errors
    confirmed: Errors | None
    plain: Cost | None
    kept: Cost | None
    trials: int
    reason: str = ""

    @property
    def code(self) -> str:
        """The call of ``fuse.compile`` with this recommendation, one operator per line."""
        if self.precision is None:
            return ""
        if not self.precision.keep:
            return f"fused = fuse.compile(model, precision={self.precision.dtype!r})"
        sites = "".join(f"    {site!r},\n" for site in self.precision.keep)
        return f"fused = fuse.compile(model, precision=fuse.Precision({self.precision.dtype!r}, keep=(\n{sites})))"


def recommend(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dtype: str,
    target: PrecisionTarget,
    *,
    passes: Sequence[str] | None = None,
    seed: int = 0,
) -> Recommendation:
    """The operators of ``model`` to keep in float32 for ``target``.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
    >>> found = recommend(model, (torch.ones(2, 8),), {}, "bf16", PrecisionTarget("sqnr", 20.0))
    >>> found.precision
    fuse.Precision('bf16', keep=())

    Raises:
        FuseError: the model does not run in float64, or not in the dtype.
    """
    call = CheckCall(model, tuple(args), dict(kwargs))
    trial, sites = _trials(call, dtype, seed)
    before = trial(())
    full = trial(tuple(sites))
    stricter = target
    for _ in range(TRIES):
        chosen = _smallest(sites, trial, stricter)
        if chosen is None:
            break
        precision = Precision(dtype, chosen)
        confirmed = _fused(call, precision, passes, seed)
        if target.met(confirmed):
            plain, kept = _costs(call, precision, passes)
            return Recommendation(precision, before, trial(chosen), confirmed, plain, kept, trial.count())
        stricter = target.harder(confirmed)
    reason = f"with all {len(sites)} operators in float32 the result still misses {target}"
    if target.met(full):
        reason = f"no set was found with which the fused result reaches {target}"
    return Recommendation(None, before, full, None, None, None, trial.count(), reason)


def _smallest(sites: Sequence[str], trial: _Trials, target: PrecisionTarget) -> tuple[str, ...] | None:
    """A small set of operators to keep, in the order in which they run; None if all of them miss the target."""
    if target.met(trial(())):
        return ()
    if not target.met(trial(tuple(sites))):
        return None
    ranked = sorted(sites, key=lambda site: trial((site,)).relative)
    enough = next(n for n in range(1, len(ranked) + 1) if target.met(trial(tuple(ranked[:n]))))
    kept = _pruned(ranked[:enough], lambda chosen: target.met(trial(chosen)))
    return tuple(site for site in sites if site in kept)


def _pruned(sites: Sequence[str], meets: Callable[[tuple[str, ...]], bool]) -> tuple[str, ...]:
    """A subset of ``sites`` from which no single operator can be removed without missing the target."""
    kept = tuple(sites)
    shrunk = True
    while shrunk:
        shrunk = False
        for site in reversed(kept):
            fewer = tuple(one for one in kept if one != site)
            if meets(fewer):
                kept, shrunk = fewer, True
    return kept


class _Trials:
    def __init__(self, run: Callable[[tuple[str, ...]], Errors]) -> None:
        self.run = cache(run)

    def __call__(self, keep: tuple[str, ...]) -> Errors:
        return self.run(tuple(sorted(keep)))

    def count(self) -> int:
        return self.run.cache_info().misses


def _trials(call: CheckCall, dtype: str, seed: int) -> tuple[_Trials, list[str]]:
    """A function from kept operators to errors of the result; and all operators of the model."""
    watch = Watch()
    draws = RecordedDraws()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with draws:
            _run(call, Precision(dtype), watch)
        exact = _exact(call, draws, seed)

    def run(keep: tuple[str, ...]) -> Errors:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with Replayed(draws):
                return _worst(named_parts(_run(call, Precision(dtype, keep), Watch())), exact)

    return _Trials(run), list(watch.sites)


def _run(call: CheckCall, precision: Precision, watch: Watch) -> Any:
    fresh = copied(call)
    return fresh.run(in_precision(fresh.model, precision, watch))


def _exact(call: CheckCall, draws: RecordedDraws, seed: int) -> dict[str, Any]:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(seed)
        with Replayed(draws):
            return named_parts(in_float64(call).run())
    except Exception as error:  # not every model runs in float64
        text = (str(error).splitlines() or [""])[0]
        raise FuseError(f"the model fails in float64, so that nothing can be recommended: {text}") from error
    finally:
        torch.set_default_dtype(before)


def _worst(results: Mapping[str, Any], exact: Mapping[str, Any]) -> Errors:
    """Errors of the result with the largest relative error."""
    pairs = [(mine, exact.get(name)) for name, mine in results.items() if isinstance(mine, Tensor)]
    found = [errors(mine, truth) for mine, truth in pairs if isinstance(truth, Tensor)]
    return max(found, key=lambda one: one.relative, default=Errors(0.0, 0.0, 0.0, 1.0))


def _fused(call: CheckCall, precision: Precision, passes: Sequence[str] | None, seed: int) -> Errors:
    """Errors of the result of a fused run, against float64 with the same random draws."""
    draws = RecordedDraws()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with draws:
            _run(call, precision, Watch())
        exact = _exact(call, draws, seed)
        fresh = copied(call)
        torch.manual_seed(seed)
        return _worst(named_parts(fresh.run(fuse_compile(fresh.model, passes=passes, precision=precision))), exact)


def _costs(call: CheckCall, precision: Precision, passes: Sequence[str] | None) -> tuple[Cost, Cost]:
    """The costs with no operator in float32, and with the recommendation."""
    runs = []
    choices = [Precision(precision.dtype), precision] if precision.keep else [precision]
    for one in choices:
        fresh = copied(call)
        runs.append(partial(fresh.run, fuse_compile(fresh.model, passes=passes, precision=one)))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        times = _timed(runs)
    costs = [Cost(*_counted(call, one, passes), time) for one, time in zip(choices, times, strict=True)]
    return costs[0], costs[-1]


def _counted(call: CheckCall, precision: Precision, passes: Sequence[str] | None) -> tuple[int, int]:
    fresh = copied(call)
    graph = capture(in_precision(fresh.model, precision), fresh.args, fresh.kwargs)
    run_passes(graph, passes)
    count = count_graph(graph, of_device(device_of(graph)))
    return count.launches, count.bytes


def _timed(runs: Sequence[Callable[[], Any]]) -> list[float]:
    """The least milliseconds of each, run in turn. The least is taken because other load only adds to a time."""
    for run in runs:
        run()
    least = [math.inf] * len(runs)
    end = time.perf_counter() + TIMED_SECONDS
    while math.inf in least or time.perf_counter() < end:
        for index, run in enumerate(runs):
            started = time.perf_counter()
            run()
            least[index] = min(least[index], (time.perf_counter() - started) * 1e3)
    return least
