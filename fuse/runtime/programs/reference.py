"""Op-by-op execution of a graph by torch, for machines without a C++ compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from fuse import ops
from fuse.graph.input_writes import writes
from fuse.graph.loop import Loop
from fuse.graph.loop_with_ends import graph_in
from fuse.graph.signature import Signature
from fuse.runtime.programs.steps import Fallback, Launches

Confirm = Callable[[Sequence[Tensor | None]], None]
"""A function called with the values of a graph before inputs are written; raises if they must not be used."""


class Reference:
    """Replacement of :class:`fuse.runtime.programs.program.Program`; ``fallback`` has the reason."""

    def __init__(self, graph: GraphModule, fallback: Fallback) -> None:
        self.graph = graph
        self.signature: Signature = graph.meta["signature"]
        self.writes = writes(graph)
        self.regions = 0
        self.confirm: Confirm | None = None
        # A run is repeated only if values that Python read are not confirmed.
        self.draws = self.signature.learning is not None and any(
            ops.is_random(n.target)
            for part in graph.modules()
            if isinstance(part, GraphModule)
            for n in part.graph.nodes
        )
        self.fallbacks: tuple[Fallback, ...] = (fallback,)
        self.launches = launches_of(graph)

    def run(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor | None], Launches]:
        """See ``Program.run``."""
        with torch.no_grad():  # the graph itself computes gradients
            values = list(self.graph(*tensors))
        named = {spec.index for spec in self.signature.outputs if spec.kind == "graph"}
        inputs = {t.untyped_storage()._cdata for t in tensors}
        results: list[Tensor | None] = [None] * len(values)
        for index in sorted(named):
            value = values[index]
            shared = value.untyped_storage()._cdata in inputs
            results[index] = value.clone() if shared else value
            inputs.add(value.untyped_storage()._cdata)
        if self.confirm is not None:
            self.confirm(results)
        for write in self.writes:
            if write.aside:
                values[write.value_index] = values[write.value_index].clone()
        for write in self.writes:
            tensors[write.input_index].data.copy_(values[write.value_index])
        return results, Launches(aten=self.launches + sum(2 if write.aside else 1 for write in self.writes))


def launches_of(module: torch.nn.Module) -> int:
    """Launches of a graph, and of the graphs in it, run op by op."""
    inside = graph_in(module)
    if inside is None:
        return sum(map(launches_of, module.children()))
    facts = [ops.info(n.target) for n in inside.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    called = [inside.get_submodule(str(n.target)) for n in inside.graph.find_nodes(op="call_module")]
    once = sum(f.launches if f else 1 for f in facts) + sum(map(launches_of, called))
    return module.trip_count * once + module.spec.collected if isinstance(module, Loop) else once
