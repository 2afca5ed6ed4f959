"""Single operators outside of regions, as regions of one operator."""

from __future__ import annotations

import operator

from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg

from fuse.rewrite.regions import region_module


def region_of(node: Node) -> tuple[GraphModule, list[Node]]:
    """A region of one operator, which returns the results that are read; and the operator's inputs, in its order."""
    body = Graph()
    inputs: dict[Node, Node] = {}
    for argument in node.all_input_nodes:
        inputs[argument] = body.placeholder(argument.name)
        inputs[argument].meta = {"val": argument.meta["val"], "source": ""}
    results = [body.node_copy(node, lambda n: inputs[n])]
    values = results_read(node)
    if not isinstance(node.meta["val"], Tensor):
        whole = results[0]
        results = [body.call_function(operator.getitem, (whole, index)) for index in values]
        for result, value in zip(results, values.values(), strict=True):
            result.meta = {"val": value, "source": ""}
    return region_module(body, results), list(inputs)


def results_read(node: Node) -> dict[int, Tensor]:
    """The results of an operator that are read, by index; index 0 for an operator with a single result."""
    value = node.meta["val"]
    if isinstance(value, Tensor):
        return {0: value}
    return {index: value[index] for index in sorted({user.args[1] for user in node.users})}  # type: ignore[type-var,misc]  # getitem


def kernel_key(node: Node) -> object:
    """A key that is equal for single operators with the same kernel."""
    numbers: dict[Node, int] = {}

    def described(argument: Node) -> object:
        value = argument.meta["val"]
        return (
            "input",
            numbers.setdefault(argument, len(numbers)),
            tuple(value.shape),
            value.stride(),
            value.dtype,
            value.device,
        )

    args = map_arg((node.args, dict(node.kwargs)), described)  # type: ignore[arg-type]  # FX types arguments loosely
    results = ((index, tuple(v.shape), v.stride(), v.dtype, v.device) for index, v in results_read(node).items())
    return node.target, repr(args), *results
