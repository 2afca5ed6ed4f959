"""Operators that no pass has put into a region, as regions of one."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node, map_arg


def region_of(node: Node) -> tuple[GraphModule, list[Node]]:
    """A lone operator as a region of one, and the nodes that are its inputs in placeholder order."""
    body = Graph()
    inputs: dict[Node, Node] = {}
    for argument in node.all_input_nodes:
        inputs[argument] = body.placeholder(argument.name)
        inputs[argument].meta = {"val": argument.meta["val"], "source": ""}
    inner = body.node_copy(node, lambda n: inputs[n])
    output = body.output((inner,))
    output.meta = {"val": (node.meta["val"],), "source": ""}
    region = GraphModule(torch.nn.Module(), body)
    region.meta["kind"] = "region"
    return region, list(inputs)


def kernel_key(node: Node) -> object:
    """Equal for lone operators that the same kernel runs."""
    numbers: dict[Node, int] = {}

    def described(argument: Node) -> object:
        value = argument.meta["val"]
        return (
            "input",
            numbers.setdefault(argument, len(numbers)),
            tuple(value.shape),
            value.stride(),
            value.dtype,
        )

    args = map_arg((node.args, dict(node.kwargs)), described)  # type: ignore[arg-type]
    value = node.meta["val"]
    return node.target, repr(args), tuple(value.shape), value.stride(), value.dtype
