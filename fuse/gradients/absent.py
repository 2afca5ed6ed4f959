"""Remove tangents from a backward graph: those of results that the loss does not use.

    d1 = mul(g1, s);  d2 = mm(g2, w);  d = add(d1, d2)         g2 absent:    d = mul(g1, s)

Every operator of a backward graph is linear in the values that depend on tangents, and autograd does not run operators
that depend on absent tangents only. A sum loses its absent terms; any other operator reads zeros for them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fuse.graph.fakes.fake_operators import fake_like
from fuse.graph.loop import Loop, results_of
from fuse.graph.outputs import finished
from fuse.graph.signature import InputSpec, OutputSpec, Signature

aten = torch.ops.aten


def without(
    backward: GraphModule, absent: Sequence[int], copied: bool = True
) -> tuple[GraphModule, dict[int, int | None]]:
    """``backward`` without the placeholders at the positions ``absent``, and the new position of each result.

    The position is None for a result of absent tangents only. The graph is copied, except if nothing is left out and
    ``copied`` is False.
    """
    (results,) = _arguments(backward.graph.output_node())
    if not absent and not copied:
        return backward, {i: i for i in range(len(results))}
    pruned = _Pruned(backward, absent)
    for node in backward.graph.nodes:
        if node.op in ("call_function", "call_module"):
            pruned.copy(node)
    kept: dict[int, int | None] = {}
    left: list[Node] = []
    for i, result in enumerate(results):
        value = pruned.made[result]
        kept[i] = None if value is None else len(left)
        if value is not None:
            left.append(value)
    module = finished(pruned.graph, left, backward)
    signature: Signature = backward.meta["signature"]
    module.meta["signature"] = replace(
        signature,
        inputs=inputs_of(pruned.graph),
        outputs=tuple(OutputSpec("graph", i) for i in range(len(left))),
        out_spec=pytree.tree_structure(tuple(left)),
    )
    return module, kept


def inputs_of(graph: Graph) -> tuple[InputSpec, ...]:
    """Input specs for a graph that is called with tensors in the order of its placeholders."""
    return tuple(InputSpec("argument", node.name, i) for i, node in enumerate(graph.find_nodes(op="placeholder")))


class _Pruned:
    """A copy of a backward graph; ``made`` is None for a node that is zero, because only absent tangents reach it."""

    def __init__(self, backward: GraphModule, absent: Sequence[int]) -> None:
        self.graph = Graph()
        self.made: dict[Node, Node | None] = {}
        self.reached: set[Node] = set()  # by tangents that are present
        placeholders = backward.graph.find_nodes(op="placeholder")
        tangents = placeholders[-backward.meta["tangents"] :]
        for i, node in enumerate(placeholders):
            self.made[node] = None if i in absent else self.graph.node_copy(node)
            if node in tangents and i not in absent:
                self.reached.add(node)

    def copy(self, node: Node) -> None:
        self.made[node] = self._copied(node)
        if self.made[node] is not None and any(operand in self.reached for operand in node.all_input_nodes):
            self.reached.add(node)

    def _copied(self, node: Node) -> Node | None:
        operands = node.all_input_nodes
        if node.target is operator.getitem and self._is_zero(operands[0], _arguments(node)[1]):
            return None
        if all(self.made[operand] is not None for operand in operands):
            return self.graph.node_copy(node, self._present)
        there = [operand for operand in operands if operand in self.reached]
        if not there:
            return None
        if node.target is aten.add.Tensor and not node.kwargs and _alike(there[0], node):
            return self._laid_as(there[0], node)
        return self.graph.node_copy(node, self._present)

    def _is_zero(self, call: Node, result: int) -> bool:
        """Whether only absent tangents reach this result of a loop that others reach, too."""
        owner = call.graph.owning_module
        loop = owner.get_submodule(str(call.target)) if owner is not None and call.op == "call_module" else None
        if not isinstance(loop, Loop) or self.made[call] is None:
            return False
        absent = [i for i, operand in enumerate(_arguments(call)) if self.made[operand] is None]
        there = [i for i, operand in enumerate(call.args) if operand in self.reached]
        return result in results_of(loop, absent) - results_of(loop, there)

    def _laid_as(self, left: Node, node: Node) -> Node | None:
        """The remaining term of a sum, in the sum's layout, because views of the sum rely on it."""
        made, wanted = self.made[left], node.meta["val"]
        if made is None or left.meta["val"].stride() == wanted.stride():
            return made
        if not wanted.is_contiguous():
            return self.graph.node_copy(node, self._present)
        how: dict[str, Any] = {"memory_format": torch.contiguous_format}
        copy = self.graph.call_function(aten.clone.default, (made,), how)
        copy.meta.update(val=wanted, source=node.meta.get("source", ""))
        return copy

    def _present(self, node: Node) -> Node:
        return self.made[node] or self._zeros(node.meta["val"])

    def _zeros(self, value: torch.Tensor) -> Node:
        how: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        node = self.graph.call_function(aten.zeros.default, (list(value.shape),), how)
        node.meta.update(val=fake_like(value), source="")
        return node


def _arguments(node: Node) -> tuple[Any, ...]:
    """The arguments of a node, typed loosely: their kinds depend on its operator."""
    return node.args


def _alike(one: Node, other: Node) -> bool:
    return bool(one.meta["val"].shape == other.meta["val"].shape and one.meta["val"].dtype == other.meta["val"].dtype)
