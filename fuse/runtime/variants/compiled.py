"""Variants: a compiled graph with the guard of the calls that it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import GraphModule

from fuse.graph.numbers.learned import Learning
from fuse.graph.signature import Attribute
from fuse.runtime.autograd.training import Training
from fuse.runtime.guards.call_guards import CallGuard
from fuse.runtime.programs.input_effects import Effects
from fuse.runtime.programs.program import Program
from fuse.runtime.programs.reference import Reference
from fuse.runtime.programs.result_reconstruction import Reconstruction
from fuse.runtime.programs.steps import Fallback
from fuse.runtime.variants.drawing import CallDraws
from fuse.runtime.variants.ending import Ending
from fuse.runtime.variants.mutated_attributes import Carried
from fuse.runtime.variants.specialised import Confirmation, Family


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
        recaptured: why its first call was captured although others were.
        resized: whether the graph was made from graphs of other sizes, without a capture.
        inference: whether the program runs in inference mode, as ``forward`` would.
        drawing: the random numbers that Python draws in each call, before the program runs.
        ungraded: positions of inputs whose ``.grad`` must be None.
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
    recaptured: str = ""
    resized: bool = False
    inference: bool = False
    drawing: CallDraws | None = None
    ungraded: tuple[int, ...] = ()
    needing: tuple[int, ...] = ()

    def is_sized(self) -> bool:
        """Whether the program was made without a graph, from those of other sizes."""
        return self.resized and self.graph is None

    def excludes(self, values: Mapping[int, object]) -> bool:
        """Whether the values of a call that are known, by key, exclude that the variant serves it."""
        if self.drawing is not None and self.drawing.drawn.apart(values):
            return True
        return self.confirmation is not None and not self.confirmation.fits(values)
