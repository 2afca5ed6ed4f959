"""A loop with its prologue and epilogue as one node of a graph.

    h0 = start + x[0]                                        whole(start, x, end):
    h = loop(h0, x)               out = whole(...)               before:  h0 = start + x[0]
    out = logsumexp(h + end)      ->                             loop:    h = loop(h0, x)
                                                                 after:   out = logsumexp(h + end)

The node is one launch: its kernel computes ``before``, runs all steps, and computes ``after``.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fuse.graph.loop import Loop


class LoopWithEnds(nn.Module):
    """``whole(*operands) -> results``: regions before a loop, the loop, and regions after it, with views in between.

    They are the graph ``body``. Its results are results of the regions and of the loop.
    """

    persistent = True

    def __init__(self, body: GraphModule) -> None:
        super().__init__()
        self.body = body
        self.meta = {"kind": "loop"}

    def with_body(self, body: GraphModule) -> LoopWithEnds:
        """The same module with another graph."""
        return LoopWithEnds(body)

    @property
    def call(self) -> Node:
        """The node that calls the loop."""
        nodes: Iterator[Node] = iter(self.body.graph.nodes)
        return next(node for node in nodes if isinstance(self.called(node), Loop))

    @property
    def loop(self) -> Loop:
        """The loop."""
        found = self.called(self.call)
        assert isinstance(found, Loop)
        return found

    def called(self, node: Node) -> nn.Module | None:
        """The region or loop that a node of ``body`` calls; None for any other node."""
        return self.body.get_submodule(str(node.target)) if node.op == "call_module" else None

    def forward(self, *operands: Tensor) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = self.body(*operands)
        return results


def graph_in(module: nn.Module | None) -> GraphModule | None:
    """The graph that a called module runs: the body of a region or loop, or all of a loop with its ends."""
    if isinstance(module, (Loop, LoopWithEnds)):
        return module.body
    return module if isinstance(module, GraphModule) else None
