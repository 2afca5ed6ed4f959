"""Captured calls: their rewritten graphs, and the text and numbers of these."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from fuse.graph.numbers.learned import Learning
from fuse.graph.signature import Signature
from fuse.kernel.arithmetic.extents import LEAST_LOWERED
from fuse.kernel.sizes.region_text import Numbers
from fuse.runtime.autograd.training_of_loss import TrainingOfLoss
from fuse.runtime.programs.program import Program
from fuse.runtime.resizing.resized import arguments_in, spelled_graphs
from fuse.runtime.size_uses.watched_loops import StepDifference, step_differences
from fuse.runtime.variants.compiled import Compiled


@dataclass(frozen=True)
class CapturedCall:
    """The rewritten graphs of a captured call, or of such a call at other sizes.

    ``integers`` are the call's integer arguments. ``training`` is that of the captured call, if it needs gradients, for
    one loss. ``made_up``: the user did not make this call, and it has no program.
    """

    graphs: tuple[GraphModule, ...]
    integers: Numbers
    training: TrainingOfLoss | None = None
    made_up: bool = False

    @staticmethod
    def of(compiled: Compiled) -> CapturedCall | None:
        """The call that a variant was made for; None if the variant depends on more than sizes."""
        training, graph = compiled.training, compiled.graph
        of_values = compiled.learning is not None and not compiled.learning.is_of_sizes()
        apart = (compiled.carried and compiled.carried.slots) or compiled.drawing or compiled.ending
        if graph is None or apart or of_values or compiled.resized or not isinstance(compiled.program, Program):
            return None
        if training is not None and training.joint.own_gradients:  # Python code, whose uses of sizes are not recorded
            return None
        of_loss = TrainingOfLoss.of(training) if training else None
        graphs = of_loss.graphs() if of_loss else (graph,)
        if any(graph.meta.get("failed") for graph in graphs):
            return None
        return CapturedCall(graphs, compiled.guard.integers, of_loss)

    @property
    def learning(self) -> Learning | None:
        """The values that the call read."""
        return learning_of(self.graphs)

    @property
    def step_differences(self) -> Collection[StepDifference]:
        """Differences between the steps of its loops."""
        signature: Signature = self.graphs[0].meta["signature"]
        return step_differences(signature.watched)

    def of_expected_loss(self) -> CapturedCall | None:
        """The call with the loss that is expected of its kind now, which its own backward pass may have shown; None if
        a region of that backward graph could not be lowered."""
        training = self.training.of_expected_loss() if self.training else None
        if training is None or training is self.training:
            return self
        graphs = training.graphs()
        return None if graphs[1].meta.get("failed") else replace(self, graphs=graphs, training=training)

    def as_text(self) -> CapturedGraphs | None:
        """The text and numbers of its graphs; None if a graph has no text."""
        try:
            text, numbers = spelled_graphs(self.graphs)
            arguments = len(self.integers) + arguments_in(self.graphs[0])
        except Exception:  # a fault in fuse must not reach the user: every size is captured
            return None
        text += self.training.extra() if self.training else ""
        numbers = (*self.integers, *numbers)
        return CapturedGraphs(self, f"{text}{_small(numbers)}", numbers, arguments)


@dataclass(frozen=True)
class CapturedGraphs:
    """The text of a captured call's graphs, and their numbers behind the call's integer arguments.

    The first ``arguments`` numbers are these integers, and the layouts of arguments.

    The text includes the numbers that are too small to vary: a batch of one has another text than larger ones.
    """

    call: CapturedCall
    text: str
    numbers: Numbers
    arguments: int


def _small(numbers: Numbers) -> tuple[tuple[int, Any], ...]:
    """The integers that are too small to vary, with their positions.

    >>> _small((5, 1, 64, -1, 0.5))
    ((1, 1), (3, -1))
    """
    return tuple((i, n) for i, n in enumerate(numbers) if type(n) is int and abs(n) < LEAST_LOWERED)


def same_constants(one: GraphModule, other: GraphModule) -> bool:
    """Whether two graphs of one text have equal constant tensors, except those that are computed from sizes."""
    pairs = zip(one.meta["signature"].inputs, other.meta["signature"].inputs, strict=True)
    made = ((a.value, b.value) for a, b in pairs if a.value is not None and a.origin is None)
    return all(a is b or (b is not None and a.dtype == b.dtype and torch.equal(a, b)) for a, b in made)


def learning_of(graphs: Sequence[GraphModule]) -> Learning | None:
    """The values that a call with these graphs read."""
    signature: Signature = graphs[0].meta["signature"]
    return signature.learning
