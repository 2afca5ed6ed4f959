"""The constants of a graph: nodes whose values are known at rewriting time, and new constants computed from them.

A graph has constants if the model makes tensors from numbers, or is frozen. An unregistered tensor of the model is no
constant, because its values may change between calls.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from fuse.graph.outputs import cone, finished, outputs_of
from fuse.rewrite import surgery
from fuse.rewrite.evaluate import can_evaluate, evaluate, laid_out

LARGEST_CONSTANT = 1 << 20
"""The most bytes of a folded constant, unless it is no larger than the constants that it is computed from."""


def given_constants(graph: GraphModule) -> dict[Node, Tensor | None]:
    """The placeholders whose values are known and never change."""
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


def constant_nodes(graph: GraphModule, given: Collection[Node]) -> dict[Node, None]:
    """The operators that can be evaluated now, in program order."""
    found: dict[Node, None] = {}
    known = set(given)
    for node in graph.graph.nodes:
        if known.issuperset(node._input_nodes) and can_evaluate(node):
            found[node] = None
            known.add(node)
    return found


def fold_to_constant(graph: GraphModule, node: Node, value: Tensor, values: dict[Node, Tensor | None]) -> Node:
    """Replace ``node`` by a new constant of the graph, and note its ``value`` in ``values`` for further folding."""
    val = node.meta["val"]
    origin = _origin(graph, node)
    constant = surgery.add_constant(graph, laid_out(value, val.stride()).to(val.device), like=node, origin=origin)
    values[constant] = value
    surgery.replace(node, constant)
    return constant


def value_of_origin(origin: GraphModule) -> Tensor | None:
    """The constant that a graph without inputs computes, in its layout; None if it cannot be evaluated."""
    node = outputs_of(origin.graph)[0]
    value = evaluate(node, {}, LARGEST_CONSTANT)
    val = node.meta["val"]
    return None if value is None else laid_out(value, val.stride()).to(val.device)


def _origin(graph: GraphModule, node: Node) -> GraphModule | None:
    """The graph without inputs that computes a constant from numbers alone; None if it depends on other constants."""
    origins = {
        given: spec.origin
        for given, spec in zip(graph.graph.find_nodes(op="placeholder"), graph.meta["signature"].inputs, strict=True)
    }
    made, copies = Graph(), dict[Node, Node]()
    for one in sorted(cone([node])):
        if one.op == "placeholder":
            if (origin := origins[one]) is None:
                return None
            inner: dict[Node, Node] = {}
            made.graph_copy(origin.graph, inner)
            for old, new in inner.items():
                new.meta = dict(old.meta)
            copies[one] = inner[outputs_of(origin.graph)[0]]
        else:
            copies[one] = made.node_copy(one, copies.__getitem__)
            copies[one].meta = dict(one.meta)
    return finished(made, [copies[node]])
