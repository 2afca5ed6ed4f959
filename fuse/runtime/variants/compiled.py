"""Variants: a compiled graph with the guard of the calls that it serves; and the launches of the last call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from fuse.graph.numbers.learned import Learning, ReadLine
from fuse.graph.signature import Attribute
from fuse.runtime.autograd.training import Training
from fuse.runtime.guards.call_guards import CallGuard
from fuse.runtime.programs.input_effects import Effects
from fuse.runtime.programs.program import Program
from fuse.runtime.programs.reference import Reference
from fuse.runtime.programs.result_reconstruction import Reconstruction
from fuse.runtime.programs.steps import Fallback, Launches
from fuse.runtime.variants.drawing import CallDraws
from fuse.runtime.variants.ending import Ending
from fuse.runtime.variants.mutated_attributes import Carried
from fuse.runtime.variants.specialised import Confirmation, Family


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
    """A variant: a compiled graph for the calls that ``guard`` accepts, or the reason why these calls run eager.

    Attributes:
        guard: accepts the calls that the variant serves.
        program: the program; None if these calls run eager.
        graph: the rewritten graph; None if these calls run eager.
        rebuild: makes the model's result from the program's values.
        written: positions of inputs that are written.
        effects: what else changes in inputs; None in training, where the program's step does it.
        reason: why these calls run eager.
        training: runs calls that need gradients; ``program`` is its forward program.
        carried: attributes that the calls read and assign; ``rebuild`` returns their new values too.
        unwatched: attributes that the state guard must not watch.
        learning: values that Python read; ``rebuild`` returns (None, result) then.
        confirmation: compares these values in each call.
        family: statistics of the specialisations of such calls.
        ending: the ending of a loop that may end early.
        in_parts: whether submodules run fused, while the model runs eager (:mod:`fuse.runtime.parts`).
        passing: whether later calls may not run eager, so that they are captured again.
        once: whether only this call runs eager, and the next one is captured again.
        resized: whether the graph was made from graphs of other sizes, without a capture.
        inference: whether the program runs in inference mode, as ``forward`` would.
        drawing: the random numbers that Python draws in each call, before the program runs.
        needing: leaves whose ``requires_grad`` is set first; the call is served again then.
    """

    guard: CallGuard
    program: Program | Reference | None
    graph: GraphModule | None = None
    rebuild: Reconstruction | None = None
    written: frozenset[int] = frozenset()
    effects: Effects | None = None
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
    inference: bool = False
    drawing: CallDraws | None = None
    needing: tuple[int, ...] = ()

    def is_sized(self) -> bool:
        """Whether the program was made without a graph, from those of other sizes."""
        return self.resized and self.graph is None

    def excludes(self, values: Mapping[int, object]) -> bool:
        """Whether the values of a call that are known, by key, exclude that the variant serves it."""
        if self.drawing is not None and self.drawing.drawn.apart(values):
            return True
        return self.confirmation is not None and not self.confirmation.fits(values)


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
    """The launches of a call that ran eager for ``reason``, with parts that ran fused."""
    forward, backward = _summed(runs), [run.backward for run in runs if run.backward is not None]
    return replace(
        forward,
        fallbacks=(reason, *forward.fallbacks),
        backward=_summed(backward) if backward else None,
        reads=tuple(read for run in runs for read in run.reads),
    )
