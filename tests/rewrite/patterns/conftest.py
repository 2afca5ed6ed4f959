"""What the tests of patterns share: match a pattern in a small model, and return what became of each candidate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fuse.graph.capture import capture
from fuse.graph.function import Function
from fuse.passes.match_patterns import prepare
from fuse.rewrite.patterns.definition import define
from fuse.rewrite.patterns.matching import Outcome, match
from fuse.rewrite.pipeline import run_passes

CLEANED = ["dead_code", "common_subexpressions", "view_chains", "no_ops", "constant_folding"]


@dataclass(frozen=True)
class Outcomes:
    """What became of the candidates of one pattern in one graph."""

    graph: GraphModule
    outcomes: list[Outcome]

    @property
    def kinds(self) -> dict[str, int]:
        return dict(Counter(one.kind for one in self.outcomes))

    @property
    def matched(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.kind == "matched"]

    @property
    def reason(self) -> str:
        """The one reason why nothing matched."""
        (outcome,) = self.outcomes
        assert outcome.kind != "matched"
        return f"{outcome.kind}: {outcome.reason}"


@pytest.fixture
def try_pattern() -> Callable[..., Outcomes]:
    """``try_pattern(pattern, function, *arguments)``: match a pattern in the cleaned graph of a function.

    Whether a kernel can be generated is not asked, unless ``lowering`` is; ``near`` explains as ``fuse explain`` does.
    """

    def run(
        pattern: Any, function: Callable[..., Any], *arguments: Any, lowering: bool = False, near: bool = False
    ) -> Outcomes:
        graph = capture(function if isinstance(function, nn.Module) else Function(function), arguments)
        run_passes(graph, CLEANED)
        outcomes = match(graph, [define(pattern)], prepare if lowering else lambda found, around: found, near=near)
        return Outcomes(graph, outcomes)

    return run


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape)
