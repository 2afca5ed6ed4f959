"""Tensors that the forward graph of a training step saves for the backward graph, once both are rewritten.

    forward    output y, select(hs, 0, 0), select(hs, 0, 1), ...       output y, hs
    backward   given h1, h2, ...                                 ->    given hs;  h1 = select(hs, 0, 0), ...

The forward graph saves each tensor whole and once; the backward graph takes its views again. Inputs are not saved: the
backward graph gets them, or a copy of one that the call writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse.errors import FuseError
from fuse.gradients.absent import inputs_of
from fuse.graph.backward.backward_graph import BackwardInput
from fuse.graph.outputs import add_placeholder, outputs_of
from fuse.graph.signature import OutputSpec, Signature
from fuse.rewrite import effects, surgery

aten = torch.ops.aten


def settle(forward: GraphModule, backward: GraphModule, given: Sequence[BackwardInput]) -> tuple[BackwardInput, ...]:
    """Make ``forward`` return each saved tensor whole and once, and ``backward`` read it.

    Returns the inputs of ``backward``. The signature of ``forward`` then names the saved tensors among its outputs.
    """
    signature: Signature = forward.meta["signature"]
    tensors = _SavedTensors(forward, backward, forward.meta.pop("saved_from"))
    for placeholder, what in zip(backward.graph.find_nodes(op="placeholder"), given, strict=True):
        if what.kind == "saved":
            tensors.take(placeholder, what.index)
        else:
            tensors.given[placeholder] = what
    output = forward.graph.output_node()
    output.args = (tuple(tensors.outputs),)
    output.meta["val"] = tuple(node.meta["val"] for node in tensors.outputs)
    saved = {what.index for what in tensors.given.values() if what.kind == "saved"}
    named = {spec.index for spec in signature.outputs if spec.kind == "graph"}
    added = tuple(OutputSpec("graph", index) for index in sorted(saved - named))
    forward.meta["signature"] = replace(signature, outputs=(*signature.outputs, *added))
    surgery.erase(*tensors.passed)
    forward.recompile()
    placeholders = backward.graph.find_nodes(op="placeholder")
    backward.meta["signature"] = replace(backward.meta["signature"], inputs=inputs_of(backward.graph))
    backward.recompile()
    return tuple(tensors.given[node] for node in placeholders)


@dataclass(frozen=True)
class _Chain:
    """A value as ``links`` (views and copies, outermost last) of the saved tensor ``root``."""

    root: Node
    links: tuple[Node, ...]


class _SavedTensors:
    """The outputs of the forward graph, and the inputs of the backward graph among them."""

    def __init__(self, forward: GraphModule, backward: GraphModule, own: int) -> None:
        self.forward = forward
        values = outputs_of(forward.graph)
        self.values = values
        self.outputs = list(values[:own])
        self.passed: list[Node] = []
        self.given: dict[Node, BackwardInput] = {}
        signature: Signature = forward.meta["signature"]
        self.inputs = {node: i for i, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
        self.written = {mutation.input_index for mutation in signature.mutations}
        self.own = own
        self.returned = {effects.root(values[spec.index]) for spec in signature.outputs if spec.kind == "graph"}
        self.position: dict[Node, int] = {}
        self.backward = backward
        self.roots: dict[Node, Node] = {}  # in the forward graph -> in the backward graph
        self.first = next(node for node in backward.graph.nodes if node.op != "placeholder")

    def take(self, placeholder: Node, index: int) -> None:
        """Replace ``placeholder`` of the backward graph by views of the saved tensor that holds output ``index``."""
        if index < self.own:  # eager saves the very tensor that it returns
            self.given[placeholder] = BackwardInput("saved", index)
            return
        chain = _chain(self.values[index])
        if not chain.links and chain.root not in self.roots:
            self.roots[chain.root] = placeholder
            self.given[placeholder] = self._given(chain.root)
            return
        if chain.root not in self.roots:
            with self.backward.graph.inserting_before(placeholder):
                made = add_placeholder(self.backward.graph, chain.root.name)
            made.meta.update(val=chain.root.meta["val"], source="")
            self.roots[chain.root] = made
            self.given[made] = self._given(chain.root)
        value = self.roots[chain.root]
        for link in chain.links:
            value = surgery.insert(self.first, link.target, value, *link.args[1:], like=link, **link.kwargs)  # type: ignore[arg-type]  # FX types targets loosely
        wanted = placeholder.meta["val"]
        if not _alike(value.meta["val"], wanted) and wanted.is_contiguous():  # merged products are parts of one tensor
            value = surgery.insert(
                self.first, aten.clone.default, value, like=value, memory_format=torch.contiguous_format
            )
        if not _alike(value.meta["val"], wanted):
            raise FuseError(
                f"{chain.root.name}, which is saved for the backward pass, has another layout than expected"
            )
        self.passed.append(self.values[index])
        placeholder.replace_all_uses_with(value)
        self.backward.graph.erase_node(placeholder)
        surgery.refresh_views(surgery.views_of(value))

    def _given(self, root: Node) -> BackwardInput:
        """The saved tensor for ``root``: a copy if the call writes its memory, or the caller may."""
        if root in self.inputs and self.inputs[root] not in self.written:
            return BackwardInput("input", self.inputs[root])
        if root in self.inputs or root in self.returned:
            root = surgery.insert(self.forward.graph.output_node(), aten.clone.default, root)
        if root in self.position:
            return BackwardInput("saved", self.position[root])
        self.position[root] = len(self.outputs)
        self.outputs.append(root)
        return BackwardInput("saved", self.position[root])


def _chain(node: Node) -> _Chain:
    """``node`` as views of memory; a copy of a step of a loop is a view of the loop's result."""
    links: list[Node] = []
    current = node
    while True:
        base = effects.view_base(current)
        if base is None and current.target is aten.clone.default and current.args[0].target is aten.select.int:  # type: ignore[union-attr]  # FX types arguments loosely
            stack: Node = current.args[0].args[0]  # type: ignore[union-attr,assignment]  # FX types arguments loosely
            if stack.op != "placeholder" and _alike(current.meta["val"], current.args[0].meta["val"]):  # type: ignore[union-attr]  # FX types arguments loosely
                base, current = stack, current.args[0]  # type: ignore[assignment]  # FX types arguments loosely
        if base is None:
            return _Chain(current, tuple(reversed(links)))
        links.append(current)
        current = base


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
