"""A compiled variant: one graph, built, for the calls its guard accepts; and the launches of its last run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from fuse.graph.learned import Learning, ReadLine
from fuse.graph.signature import Attribute
from fuse.runtime.ending import Ending
from fuse.runtime.guards import CallGuard
from fuse.runtime.mutated_attributes import Carried
from fuse.runtime.program import Program
from fuse.runtime.reference import Reference
from fuse.runtime.result_reconstruction import Playback
from fuse.runtime.specialised import Confirmation, Family
from fuse.runtime.steps import Fallback, Launches
from fuse.runtime.training import Training


@dataclass(frozen=True)
class LastRun:
    """Observed launches of the last call, counted where each launch is made.

    ``launches`` is the sum of ``kernels`` (generated), ``libraries`` (BLAS) and ``aten`` (operators called from
    Python); ``regions`` the fused groups that ran as one kernel each. A call that ran eager has its reason in
    ``fallbacks``, and launches of 0: what eager launches is not observed here. ``backward`` is the same of the
    backward pass of that call; None before it ran, and where there is none. ``reads`` are the values that ``forward``
    reads, and how the program was guarded by them.
    """

    launches: int = 0
    kernels: int = 0
    libraries: int = 0
    aten: int = 0
    regions: int = 0
    fallbacks: tuple[Fallback, ...] = ()
    backward: LastRun | None = None
    reads: tuple[ReadLine, ...] = ()


@dataclass(frozen=True, eq=False)
class Compiled:
    """One graph, built: for the calls that ``guard`` accepts. ``program`` and ``graph`` are None where these calls run
    eager, for ``reason``. ``training`` runs the calls that need gradients; ``program`` is its forward half.
    ``carried`` are attributes that the calls read and assign; then ``rebuild`` gives their new values too.
    ``unwatched`` are those whose change makes nothing stale. ``learning``: what Python learned of values; then
    ``rebuild`` gives the result second, and ``confirmation`` compares. ``family``: the other specialisations of such
    calls. ``ending``: how a loop ended that may end earlier.
    ``in_parts``: these calls run eager, and what they call of submodules fused (:mod:`fuse.runtime.parts`).
    ``passing``: another call may not run eager. ``once``: another call is captured again. ``resized``: the graph is
    that of other sizes; no such call was captured.
    """

    guard: CallGuard
    program: Program | Reference | None
    graph: GraphModule | None = None
    rebuild: Playback | None = None
    written: frozenset[int] = frozenset()
    reason: Fallback | None = None
    training: Training | None = None
    carried: Carried | None = None
    unwatched: frozenset[Attribute] = frozenset()
    learning: Learning | None = None
    confirmation: Confirmation | None = None
    family: Family[Compiled] | None = None
    ending: Ending | None = None
    in_parts: bool = False
    passing: bool = False
    once: bool = False
    resized: bool = False


def counted(launches: Launches, regions: int, fallbacks: tuple[Fallback, ...]) -> LastRun:
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


def together(reason: Fallback, runs: Sequence[LastRun]) -> LastRun:
    """What a call did that ran eager for ``reason``, but for parts of it."""
    forward, backward = _summed(runs), [run.backward for run in runs if run.backward is not None]
    return replace(
        forward,
        fallbacks=(reason, *forward.fallbacks),
        backward=_summed(backward) if backward else None,
        reads=tuple(read for run in runs for read in run.reads),
    )
