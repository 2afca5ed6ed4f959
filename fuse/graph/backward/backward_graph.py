"""Split the record of a call and its gradients into a forward graph and a backward graph.

    y = tanh(x @ w); d = tanh_backward(g, y); dw = t(x) @ d

    forward    y = tanh(x @ w)                      output y, and the saved tensors: y
    backward   d = tanh_backward(g, y); t(x) @ d    inputs y, x, g

The values of the forward graph that the backward graph reads are *saved*. Views of saved tensors are taken again, and
cheap arithmetic on them is recomputed (:mod:`fuse.graph.backward.recomputing`). Comparisons of a value that is only
compared move to the forward graph (:mod:`fuse.graph.backward.comparing_ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fuse import ops
from fuse.errors import CaptureError
from fuse.graph.backward.comparing_ahead import compared_ahead
from fuse.graph.outputs import add_placeholder, cone, finished
from fuse.graph.signature import InputSpec, OutputSpec, Signature


@dataclass(frozen=True)
class BackwardInput:
    """The meaning of a placeholder of a backward graph.

    ``saved``: output ``index`` of the forward graph; ``input``: placeholder ``index`` of the forward graph;
    ``written``: the same, as the backward pass finds its tensor, which the call writes or gives other memory;
    ``tangent``: the gradient of leaf ``index`` of the model's result.
    """

    kind: Literal["saved", "input", "written", "tangent"]
    index: int


ChooseRecomputed = Callable[[Mapping[Node, Sequence[Node]], Set[Node]], dict[Node, None]]
"""``f(reads, kept)``: the forward operators that the backward graph recomputes. ``reads``: forward values -> the
backward nodes that read them. ``kept``: values that cost nothing to save, or must be saved."""


def split_backward(
    forward: GraphModule,
    output: Node,
    tangents: Mapping[int, Node],
    written: Mapping[Node, int],
    gradients: Sequence[Node],
    dispatches: Any,
    modules: nn.Module,
    again: ChooseRecomputed,
) -> tuple[GraphModule, tuple[BackwardInput, ...]]:
    """Move everything behind the node ``output`` of ``forward`` into a graph of its own.

    The forward values that it reads are added to ``output``, except those that ``again`` recomputes. ``written``: nodes
    behind ``output`` that stand for inputs as the backward pass finds them.
    """
    later = _after(output)
    needed = dict.fromkeys(sorted(cone(gradients, set(later).__contains__)))
    if random := next((n for n in needed if ops.is_random(n.target)), None):
        raise CaptureError(f"{random.target} draws random numbers in the backward pass")
    inputs = {node: i for i, node in enumerate(forward.graph.find_nodes(op="placeholder")) if node not in set(later)}
    backward = _BackwardGraph(Graph(), inputs, list(output.args[0]))  # type: ignore[arg-type]  # FX types arguments loosely
    forward.meta["saved_from"] = len(backward.outputs)
    kept, reads = {*inputs, *backward.returned, *map(root_of, gradients)}, backward.reads(needed)
    run_again = again(reads, kept)
    if ahead := compared_ahead(needed, reads, kept, run_again, set(gradients)):
        for node in ahead:
            output.prepend(node)
            del needed[node]
        later = _after(output)
        run_again = again(backward.reads(needed), kept)
    for node in (*needed, *run_again):
        backward.note(node, needed, run_again)
    for gradient in gradients:
        if gradient not in needed:
            backward.require(root_of(gradient))
    for node, position in written.items():
        if node in needed:
            backward.placeholder(node, BackwardInput("written", position))
    for position, tangent in tangents.items():
        backward.placeholder(tangent, BackwardInput("tangent", position))
    for node in (*run_again, *needed):
        if node.op != "placeholder":
            backward.copy(node)
    results = tuple(backward.value(gradient) for gradient in gradients)
    output.args = (tuple(backward.outputs),)
    output.meta["val"] = tuple(v.meta["val"] for v in backward.outputs)
    for node in reversed(later):
        forward.graph.erase_node(node)
    module = finished(backward.graph, results, modules)
    names = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    module.meta["signature"] = Signature(
        tuple(InputSpec("argument", name, i) for i, name in enumerate(names)),
        tuple(OutputSpec("graph", i) for i in range(len(results))),
        pytree.tree_structure(results),
        (),
        dispatches,
    )
    module.meta["tangents"] = len(tangents)
    return module, tuple(backward.given)


class _BackwardGraph:
    """The backward graph under construction; ``made`` maps nodes of the record to its nodes."""

    def __init__(self, graph: Graph, inputs: Mapping[Node, int], outputs: list[Node]) -> None:
        self.graph = graph
        self.inputs = inputs
        self.outputs = outputs
        self.returned = {node: i for i, node in reversed(list(enumerate(outputs)))}
        self.given: list[BackwardInput] = []
        self.made: dict[Node, Node] = {}

    def reads(self, needed: Mapping[Node, None]) -> dict[Node, list[Node]]:
        """The forward values that backward nodes read, as roots of memory, with their readers."""
        found: dict[Node, list[Node]] = {}
        for node in needed:
            for operand in node.all_input_nodes:
                if operand not in needed:
                    found.setdefault(root_of(operand), []).append(node)
        return found

    def note(self, node: Node, needed: Mapping[Node, None], again: Mapping[Node, None]) -> None:
        """Make placeholders for the forward values that ``node`` reads."""
        for operand in node.all_input_nodes:
            if operand not in needed and (root := root_of(operand)) not in again:
                self.require(root)

    def require(self, root: Node) -> None:
        if root in self.made:
            return
        if root in self.inputs:
            self.placeholder(root, BackwardInput("input", self.inputs[root]))
        elif root in self.returned:
            self.placeholder(root, BackwardInput("saved", self.returned[root]))
        else:
            self.placeholder(root, BackwardInput("saved", len(self.outputs)))
            self.outputs.append(root)

    def placeholder(self, node: Node, given: BackwardInput) -> None:
        made = self.made[node] = add_placeholder(self.graph, node.name)
        made.meta.update(val=node.meta["val"], source="")
        self.given.append(given)

    def copy(self, node: Node) -> None:
        for operand in node.all_input_nodes:
            self.value(operand)
        self.made[node] = self.graph.node_copy(node, self.made.__getitem__)

    def value(self, node: Node) -> Node:
        """The backward graph's node for ``node``; views of saved tensors are taken again."""
        chain = []
        current = node
        while current not in self.made:
            chain.append(current)
            base = _base(current)
            assert base is not None
            current = base
        for view in reversed(chain):
            self.made[view] = self.graph.node_copy(view, self.made.__getitem__)
        return self.made[node]


def _after(node: Node) -> list[Node]:
    found = []
    while (node := node.next).op != "root":
        found.append(node)
    return found


def root_of(node: Node) -> Node:
    """The node in whose memory ``node`` lies."""
    while (base := _base(node)) is not None:
        node = base
    return node


def _base(node: Node) -> Node | None:
    return node.all_input_nodes[0] if node.op == "call_function" and ops.is_view(node.target) else None
