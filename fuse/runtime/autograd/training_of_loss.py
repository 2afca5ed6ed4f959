"""Training at other sizes, for one loss: the graphs of a captured call, and the training that has them at other sizes.

loss of out, (out, h) returned    forward graph, backward graph without the tangent of h,  raw backward graph
x [37, 4, 64], not captured       the same three graphs resized, or two programs without graphs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from fuse.graph.signature import Signature
from fuse.runtime.autograd.training import RewrittenGraphs, SizedTraining, Training
from fuse.runtime.programs.program import Program
from fuse.runtime.programs.schedule import schedule
from fuse.runtime.resizing.schedule_numbers import SizedPart


@dataclass(frozen=True)
class TrainingOfLoss:
    """A captured ``training`` and its backward graph ``rewritten`` for one loss."""

    training: Training
    rewritten: RewrittenGraphs

    @staticmethod
    def of(training: Training) -> TrainingOfLoss:
        """A training with the loss that was expected when it was made."""
        assert training.rewritten is not None
        return TrainingOfLoss(training, training.rewritten)

    def of_expected_loss(self) -> TrainingOfLoss:
        """The training with the loss that is expected now, if it has a backward graph for that loss."""
        found = self.training.by_loss.get(self.training.losses.expected())
        return self if found is None or found is self.rewritten else replace(self, rewritten=found)

    def graphs(self) -> tuple[GraphModule, ...]:
        """The graphs that differ between sizes: the forward graph, the backward graph for the loss, and that for a loss
        of all results before the passes, from which others are made."""
        forward, _, own = self.training.graphs()
        backward = self.rewritten.backward
        return (forward, backward) if own is backward else (forward, backward, own)

    def parts(self, graphs: Sequence[GraphModule] = ()) -> tuple[SizedPart, ...]:
        """The schedules of the first two :meth:`graphs`, or of these graphs at other sizes.

        There are none if a graph is run op by op.
        """
        training, ready = self.training, self.rewritten
        forward, backward, *own = graphs or self.graphs()
        programs = (training.program, training.backwards[ready.missing].program)
        plans = [one.schedule for one in programs if isinstance(one, Program)]
        if len(plans) < 2 or any(what.kind == "written" for what in ready.given):
            return ()
        if graphs:
            plans = [schedule(forward), schedule(backward)]
        tangents = tuple(training.layouts_in(own[0] if own else backward).values())
        signature: Signature = backward.meta["signature"]
        return SizedPart(plans[0], forward.meta["signature"]), SizedPart(plans[1], signature, tangents)

    def at_sizes(self, sized: SizedTraining) -> Training:
        """The training of such a call at other sizes, with these programs."""
        own = self.training
        return Training(own.joint, own.rewrite, own.begin, own.lock, own.losses, self.rewritten, sized)

    def with_graphs(self, graphs: Sequence[GraphModule]) -> Training:
        """The training of such a call at other sizes, with these :meth:`graphs`."""
        training = self.training
        forward, backward, *own = graphs
        joint = replace(training.joint, forward=forward, backward=own[0] if own else backward)
        ready = replace(self.rewritten, backward=backward)
        return Training(joint, training.rewrite, training.begin, training.lock, training.losses, ready)

    def extra(self) -> str:
        """Further facts that must be equal for calls at other sizes, as a text."""
        joint, ready = self.training.joint, self.rewritten
        missing = sorted(ready.missing)
        return repr((joint.gradients, sorted(joint.requires_grad), ready.given, ready.gradients, missing))
