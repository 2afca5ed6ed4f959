"""A small program that computes what specialisations were made for, before one of them is chosen.

    graph      x ... mul, mm, mm, mm -> y        told beside y: gt(sum(t), 0)
    chooser    t -> sum -> gt                    run first, where the likely specialisation is often the wrong one

Only where the values take under a tenth of the call, by the cost model, and no random number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn import Module
from torch.utils import _pytree as pytree

from fuse import ops
from fuse.cost import profiles
from fuse.cost.count import CountedCall, calls_of_graph
from fuse.devices import device_of
from fuse.graph.learned import Learning
from fuse.graph.outputs import cone, outputs_of
from fuse.graph.signature import OutputSpec, Signature
from fuse.rewrite.pipeline import run_passes
from fuse.runtime.program import Program, program_of

LARGEST_SHARE = 0.1
"""Of the time of a call."""


@dataclass(eq=False)
class Chooser:
    """What tells specialisations apart; ``positions`` are its inputs among those of the call."""

    graph: GraphModule = field(repr=False)
    positions: tuple[int, ...]
    learning: Learning

    @cached_property
    def program(self) -> Program:
        run_passes(self.graph)
        return program_of(self.graph)

    def told(self, tensors: Sequence[Tensor]) -> dict[int, object]:
        """Learned values of a call with these tensors, by key; none where computing them fails, as it may in eager."""
        try:
            values, _ = self.program.run([tensors[i] for i in self.positions])
        except Exception:  # the specialisation that is tried instead sees to it
            return {}
        return self.learning.told(values)


def chooser_of(graph: GraphModule) -> Chooser | None:
    """The chooser of a captured graph, before passes; None where the values are no small part of it.

    >>> from fuse.graph.capture import capture
    >>> import torch
    >>> class Branch(Module):
    ...     def forward(self, x, t):
    ...         return x @ x @ x if t.sum() > 0 else x
    >>> chooser_of(capture(Branch(), (torch.ones(256, 256), torch.ones(2)))).positions
    (1,)
    """
    signature: Signature = graph.meta["signature"]
    learning = signature.learning
    if learning is None or not learning.learned or any(one.guard == "size" for one in learning.learned):
        return None
    values = [outputs_of(graph.graph)[spec.index] for spec in signature.outputs[: learning.leaves]]
    needed = cone(values)
    if any(node.op == "call_module" or ops.is_random(node.target) for node in needed):
        return None
    made, copies = Graph(), dict[Node, Node]()
    for node in graph.graph.nodes:
        if node in needed:
            copies[node] = made.node_copy(node, copies.__getitem__)
    made.output(tuple(copies[v] for v in values)).meta.update(val=tuple(v.meta["val"] for v in values), source="")
    positions = tuple(i for i, node in enumerate(graph.graph.find_nodes(op="placeholder")) if node in needed)
    small = GraphModule(Module(), made)
    small.meta["signature"] = replace(
        signature,
        inputs=tuple(signature.inputs[i] for i in positions),
        outputs=tuple(OutputSpec("graph", i) for i in range(len(values))),
        out_spec=pytree.tree_structure(tuple(values)),
        mutations=(),
        dispatches=(),
        kept=(),
    )
    whole, device = calls_of_graph(graph), device_of(graph)
    if modelled_seconds(calls_of_graph(small), device) > LARGEST_SHARE * modelled_seconds(whole, device):
        return None
    return Chooser(small, positions, learning)


def modelled_seconds(calls: Iterable[CountedCall], device: str) -> float:
    """Predicted time of calls on this kind of device, by the cost model.

    >>> modelled_seconds([], "cpu")
    0
    """
    profile = profiles.of_device(device)
    return sum(
        call.repeats
        * (call.launches * profile.launch_seconds + profile.seconds(call.work.flops, call.work.bytes, call.work.dtype))
        for call in calls
    )
