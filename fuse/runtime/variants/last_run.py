"""The record of a call: launches, counted where each is made, and why something ran eager or was captured again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fuse.graph.numbers.learned import ReadLine
from fuse.runtime.autograd.autograd_node import Ran
from fuse.runtime.programs.steps import Fallback, Launches
from fuse.runtime.variants.compiled import Compiled


@dataclass(frozen=True)
class LastRun:
    """Observed launches of the last call, counted where each launch is made.

    Attributes:
        launches: the sum of ``kernels``, ``libraries`` and ``aten``; 0 for a call that ran eager.
        kernels: launches of generated kernels.
        libraries: launches of BLAS products.
        aten: operators called from Python.
        regions: fused groups that ran as one kernel each.
        fallbacks: operators, regions or calls that ran eager, with reasons.
        backward: the same for the backward pass of the call; None before it ran, or if there is none.
        reads: values that ``forward`` reads, and how they guard the program.
        recaptured: why the call was captured although others were; empty for all other calls.
    """

    launches: int = 0
    kernels: int = 0
    libraries: int = 0
    aten: int = 0
    regions: int = 0
    fallbacks: tuple[Fallback, ...] = ()
    backward: LastRun | None = None
    reads: tuple[ReadLine, ...] = ()
    recaptured: str = ""


LazyRun = Callable[[], LastRun]

Observed = tuple[Launches | int, Compiled, Ran | None] | LastRun | tuple[Fallback, tuple[LazyRun, ...]]
"""The run of a call: a program, an unobserved call, or the parts of a call that ran eager."""


def run_of(observed: Observed, first: bool = False) -> LastRun:
    """The run of a call; ``first``: of the one for which its variant was made."""
    if isinstance(observed, LastRun):
        return observed
    if len(observed) == 2:
        reason, runs = observed
        return _together(reason, [read() for read in runs])
    launches, compiled, ran = Launches.unpack(observed[0]), observed[1], observed[2]
    assert compiled.program is not None
    backward = _counted(ran.backward, ran.regions, ran.fallbacks) if ran and ran.backward else None
    forward = _counted(launches, compiled.program.regions, compiled.program.fallbacks)
    reads, recaptured = compiled.learning.lines if compiled.learning else (), compiled.recaptured if first else ""
    return replace(forward, backward=backward, reads=reads, recaptured=recaptured)


def _counted(launches: Launches, regions: int, fallbacks: tuple[Fallback, ...]) -> LastRun:
    return LastRun(launches.total, launches.kernels, launches.libraries, launches.aten, regions, fallbacks)


def _summed(runs: Sequence[LastRun]) -> LastRun:
    return LastRun(
        sum(run.launches for run in runs),
        sum(run.kernels for run in runs),
        sum(run.libraries for run in runs),
        sum(run.aten for run in runs),
        sum(run.regions for run in runs),
        tuple(fallback for run in runs for fallback in run.fallbacks),
    )


def _together(reason: Fallback, runs: Sequence[LastRun]) -> LastRun:
    """The launches of a call that ran eager for ``reason``, with parts that ran fused."""
    forward, backward = _summed(runs), [run.backward for run in runs if run.backward is not None]
    return replace(
        forward,
        fallbacks=(reason, *forward.fallbacks),
        backward=_summed(backward) if backward else None,
        reads=tuple(read for run in runs for read in run.reads),
    )
