"""Measure a model in a narrow dtype: the errors of its eager graph and of its fused graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fuse.check.inputs import CheckCall, copied
from fuse.check.locate import isolated
from fuse.check.precision.chains import Chain, Execute, measure
from fuse.check.precision.exact import wide
from fuse.errors import CaptureError
from fuse.graph.capture import capture
from fuse.graph.precision import Precision, Watch, in_precision
from fuse.graph.signature import Signature
from fuse.graph.structure.arguments import flatten_arguments
from fuse.rewrite.evaluate import laid_out
from fuse.rewrite.pipeline import run_passes
from fuse.runtime.guards.call_guards import sources_of
from fuse.runtime.programs.program import Program, begun
from fuse.runtime.variants.mutated_attributes import carried


def chains(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    precision: Precision,
    *,
    passes: Sequence[str] | None = None,
    fused: bool = True,
    seed: int = 0,
) -> tuple[Chain, Chain | None]:
    """The operators of the eager graph, measured, and those of the fused graph as generated kernels run them.

    Raises:
        CaptureError: the call cannot be captured.

    >>> import torch
    >>> eager, fused = chains(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.ones(2, 4),), {}, Precision("bf16"))
    >>> [one.op for one in eager.operators if one.op != "input"][-2:]
    ['aten.addmm.default', 'aten.tanh.default']
    """
    call = copied(CheckCall(model, tuple(args), dict(kwargs)))
    watch = Watch()
    twin = in_precision(call.model, precision, watch)
    try:
        graph = capture(twin, call.args, call.kwargs)
    except CaptureError as error:
        why = str(error).removesuffix("; it runs in eager mode")
        raise CaptureError(f"in {precision.dtype} nothing can be measured: {why}") from error
    given = inputs_of(graph, call)
    casts = frozenset(watch.casts)
    eager = measure(graph, given, [wide(t) for t in given], casts=casts, seed=seed)
    if not fused:
        return eager, None
    rewritten = capture(twin, call.args, call.kwargs)
    run_passes(rewritten, passes)
    given = inputs_of(rewritten, call)
    execute = as_kernels(rewritten)
    return eager, measure(rewritten, given, [wide(t) for t in given], execute=execute, casts=casts, seed=seed)


def inputs_of(graph: GraphModule, call: CheckCall) -> list[Tensor]:
    """The tensors of the placeholders of a graph captured from ``call``."""
    signature: Signature = graph.meta["signature"]
    leaves, _ = flatten_arguments(call.args, call.kwargs)
    carry = carried(call.model, signature, leaves, None)
    given = carry.extend(leaves, None)[0] if carry else leaves
    sources = sources_of(signature.inputs, call.model, len(leaves))
    return [(given[source] if isinstance(source, int) else source).detach() for source in sources]


def as_kernels(graph: GraphModule) -> Execute:
    """Runs the regions and loops of ``graph`` as generated code, the other operators by torch.

    Kernels are compiled side by side, and equal ones once.
    """
    started: dict[Node, Callable[[], Program]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_module":
            started[node] = begun(isolated(graph, node))
    programs = {node: finish() for node, finish in started.items()}

    def execute(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if node not in programs:
            assert callable(node.target)
            return node.target(*args, **kwargs)
        given = pytree.tree_leaves((args, kwargs))
        operands = dict(zip(pytree.tree_leaves((node.args, node.kwargs)), given, strict=True))
        tensors = [laid_out(operands[one], one.meta["val"].stride()) for one in node.all_input_nodes]
        results, _ = programs[node].run(tensors)
        return results[0] if isinstance(node.meta["val"], Tensor) else tuple(results)

    return execute
