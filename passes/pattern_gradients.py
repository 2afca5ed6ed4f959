"""Mark matches of patterns that define their own gradients, before gradients are taken.

    a = sigmoid(x)                    m = matched(x):                    @fuse.pattern
    b = mul(a, x)        ->               a = sigmoid(x)                 class Swish:
                                          return mul(a, x)                   def pattern(self, x): ...
    gradient of x: autograd's         gradient of x: the pattern's           def backward(self, grad, x): ...

The pass runs only for calls that need gradients, once loops are rolled, in their bodies too. It saves no launch. When
gradients are taken, a match is replaced by its operators in the forward graph, and by those of ``backward`` in the
backward graph; other passes then see plain operators. Declined with the verdicts of
:mod:`fuse.rewrite.patterns.matching`, and where ``backward`` raises on the match's tensors or does not return gradients
of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.fx import GraphModule, Node

from fuse.gradients import own_gradients
from fuse.graph.loop import Loop
from fuse.passes.match_patterns import sound
from fuse.rewrite import regions
from fuse.rewrite.patterns import registry
from fuse.rewrite.patterns.conditions import Misfit, Surroundings
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.exact_match import FoundMatch
from fuse.rewrite.patterns.matching import match
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite


@register_pass(stage="match", before_gradients=True, enabled=False)
def pattern_gradients(graph: GraphModule) -> Iterator[Verdict]:
    """Mark matches of patterns that define their own gradients, before gradients are taken."""
    patterns = yield from sound(lambda pattern: pattern.backward is not None)
    if patterns:
        yield from _set_apart(graph, patterns)
    for call in graph.graph.find_nodes(op="call_module") if patterns else ():
        if isinstance(loop := graph.get_submodule(str(call.target)), Loop):
            yield from _set_apart(loop.body, patterns)
            loop.body.recompile()


def _set_apart(graph: GraphModule, patterns: Sequence[Pattern]) -> Iterator[Verdict]:
    moved: dict[Node, Node] = {}
    for outcome in match(graph, patterns, prepare):
        name = outcome.pattern.name
        if outcome.found is not None and outcome.kind == "matched":
            yield rewrite(outcome.found.members, own_gradients.set_apart, graph, outcome.found, moved, pattern=name)
        else:
            nodes = [node for node in (outcome.node, outcome.candidate) if node is not None]
            yield declined(nodes, f"{outcome.kind}: {outcome.reason}", pattern=name)
    if moved:
        regions.sort(graph.graph)


def prepare(found: FoundMatch, around: Surroundings) -> Misfit | None:
    """Why autograd differentiates a match instead of the pattern, or None."""
    if reason := registry.refusal(found.form.pattern):
        return Misfit("refused", reason.removeprefix("refused: "))
    if misfit := own_gradients.why_not(found):
        return misfit
    reason = registry.gradient_objection(found)
    return Misfit("refused", reason) if reason else None
