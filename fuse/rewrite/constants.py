"""Constants of a graph: which nodes are known at rewriting time, and how a computed one takes its place.

A graph has constants where the model made them from numbers, or is frozen. What a tensor that the model holds without
having registered it is now, it need not be in the next call: it is no constant.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from fuse.rewrite import surgery
from fuse.rewrite.evaluate import can_evaluate, laid_out


def given_constants(graph: GraphModule) -> dict[Node, Tensor | None]:
    """The placeholders whose values are known now and stay what they are."""
    if "signature" not in graph.meta:
        return {}
    signature = graph.meta["signature"]
    written = {mutation.input_index for mutation in signature.mutations}
    placeholders = graph.graph.find_nodes(op="placeholder")
    return {
        node: spec.value.cpu()
        for index, (node, spec) in enumerate(zip(placeholders, signature.inputs, strict=True))
        if spec.value is not None and not spec.may_change and index not in written
        if not isinstance(spec.value, FakeTensor)
    }


def constant_nodes(graph: GraphModule, given: Collection[Node], without: Set[Node] = frozenset()) -> dict[Node, None]:
    """The operators that can be evaluated now, in program order, but for those ``without`` and what needs them."""
    found: dict[Node, None] = {}
    for node in graph.graph.nodes:
        known = all(operand in found or operand in given for operand in node.all_input_nodes)
        if known and node not in without and can_evaluate(node):
            found[node] = None
    return found


def fold_to_constant(graph: GraphModule, node: Node, value: Tensor, values: dict[Node, Tensor | None]) -> Node:
    """Let a new constant of the graph stand for ``node``, known to whatever is folded next."""
    val = node.meta["val"]
    constant = surgery.add_constant(graph, laid_out(value, val.stride()).to(val.device), like=node)
    values[constant] = value
    surgery.replace(node, constant)
    return constant
