"""Find the first node whose value differs, when the fused result differs.

    captured graph, op by op   against   rewritten graph, op by op      a pass changed the meaning of a node
    node, op by op             against   node as its kernel or product  the code generated for a node is wrong
    no difference                                                       the memory plan or the order of steps is

Both run with the values of one real call. The report names the first difference in program order, with its line.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from fuse import ops
from fuse.check.compare import compare
from fuse.graph.signature import OutputSpec, Signature
from fuse.runtime.programs.program import program_of
from fuse.runtime.variants.compiled import Compiled


def first_difference(compiled: Compiled, captured: GraphModule, tensors: Sequence[Tensor]) -> str:
    """The first node of ``compiled.graph`` whose value differs, and whether a pass or a kernel is at fault.

    ``captured`` is the graph before the passes, ``tensors`` are the values of its placeholders.
    """
    rewritten = compiled.graph
    assert rewritten is not None
    names = [node.name for node in captured.graph.nodes if node.op == "placeholder"]
    expected = values_of(captured, dict(zip(names, tensors, strict=True)))
    actual = values_of(rewritten, expected)
    for node in rewritten.graph.nodes:
        if node.op == "call_function" and not _agree(actual.get(node.name), expected.get(node.name)):
            return f"{_described(node)} differs after the passes"
    for node in rewritten.graph.nodes:
        if _computes(node) and not _agree(_alone(rewritten, node, actual), actual[node.name]):
            return f"{_described(node)} is wrong as a kernel"
    return "every node is right by itself: the memory plan or the order of steps is wrong"


def values_of(graph: GraphModule, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Every node's value, by name, from an op-by-op run with the placeholders' values in ``inputs``, by name.

    A placeholder that a pass added is a constant of the signature. Each run starts from the same random seed.
    """
    recorder = _ValueRecorder(graph)
    signature: Signature = graph.meta["signature"]
    placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        recorder.run(*(inputs.get(name, spec.value) for name, spec in zip(placeholders, signature.inputs, strict=True)))
    return recorder.values


class _ValueRecorder(Interpreter):
    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.values: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.values[n.name] = value
        return value


def isolated(graph: GraphModule, node: Node) -> GraphModule:
    """A graph with ``node`` alone: its inputs are placeholders, its results the outputs."""
    alone = Graph()
    inputs: dict[Node, Node] = {}
    for argument in node.all_input_nodes:
        inputs[argument] = alone.placeholder(argument.name)
        inputs[argument].meta = dict(argument.meta)
    body = alone.node_copy(node, lambda n: inputs[n])
    results: list[Node] = [body]
    if not isinstance(node.meta["val"], Tensor):
        results = []
        for index, value in enumerate(node.meta["val"]):
            results.append(alone.call_function(operator.getitem, (body, index)))
            results[-1].meta = {"val": value, "source": node.meta.get("source", "")}
    output = alone.output(tuple(results))
    output.meta = {"val": tuple(n.meta["val"] for n in results), "source": ""}
    root = nn.Module()
    if node.op == "call_module":
        root.add_module(str(node.target), graph.get_submodule(str(node.target)))
    made = GraphModule(root, alone)
    outputs = tuple(OutputSpec("graph", i) for i in range(len(results)))
    made.meta["signature"] = Signature((), outputs, pytree.tree_structure(tuple(results)), (), ())
    return made


def _alone(graph: GraphModule, node: Node, values: Mapping[str, Any]) -> Any:
    program = program_of(isolated(graph, node))
    # The kernel is compiled for the predicted strides, which the value of an op-by-op run need not have.
    tensors = [_laid_out(values[n.name], n.meta["val"]) for n in node.all_input_nodes]
    results, _ = program.run(tensors)
    return results[0] if isinstance(node.meta["val"], Tensor) else tuple(results)


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(tensor)


def _computes(node: Node) -> bool:
    if node.op == "call_module":
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.meta["val"] is None:  # an assertion
        return False
    return not (ops.is_view(node.target) or ops.is_random(node.target)) and node.target.namespace != "fuse"


def _agree(a: Any, b: Any) -> bool:
    """Whether two values are equal within tolerance; a value that is missing, or no tensor, is not compared."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return not compare("", a.contiguous(), b.contiguous()).problem
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return all(_agree(x, y) for x, y in zip(a, b, strict=False))
    return True


def _described(node: Node) -> str:
    return f"{node.name} ({node.target}) at {node.meta.get('source') or '?'}"
