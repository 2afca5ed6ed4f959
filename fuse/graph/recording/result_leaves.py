"""The leaves of a recorded call's result, as values of the graph, inputs and Python objects.

values (w, y)     result (w, y[0], x, w, "ok")   ->   graph 0, graph 1 as a view, input 0, repeat 0, python "ok"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fuse.errors import CaptureError
from fuse.graph.functional.aliases import Alias
from fuse.graph.functional.tensor_values import Functionalizer
from fuse.graph.numbers.read_numbers import is_number, node_of
from fuse.graph.patches.new_parameters import parameter_of
from fuse.graph.recording.recording_plan import NeedsGradients
from fuse.graph.signature import Advance, Layout, Mutation, OutputSpec
from fuse.graph.state.freed_graphs import is_freed
from fuse.graph.structure.result_structure import GivenContainer, is_constant


@dataclass
class ResultLeaves:
    """Collects the ``values`` that a graph returns, for the leaves of a result and for written inputs.

    ``known`` gives the fake tensor that the graph knows for a leaf. ``numbers``: node of a Number -> its leaf.
    ``gradients``: whether the call was recorded under autograd.
    """

    functional: Functionalizer
    placeholders: Sequence[Tensor]
    known: Callable[[Tensor], Tensor]
    numbers: Mapping[Node, int]
    gradients: bool
    values: list[Node] = field(default_factory=list)
    _roots: dict[int, int] = field(default_factory=dict)
    """Base -> position among ``values``."""

    def outputs(self, leaves: Sequence[Any]) -> tuple[OutputSpec, ...]:
        """The source of each leaf.

        Raises:
            CaptureError: a graph cannot give a leaf.
        """
        first: dict[int, int] = {}
        return tuple(
            OutputSpec("repeat", first[id(leaf)])
            if isinstance(leaf, Tensor) and first.setdefault(id(leaf), i) != i
            else self._output(leaf)
            for i, leaf in enumerate(leaves)
        )

    def mutations(self) -> tuple[Mutation, ...]:
        """The inputs that the call writes."""
        found = []
        for index, fake in enumerate(self.placeholders):
            base = self._before(fake).base
            if base.version and base.input_index == index:
                found.append(Mutation(index, len(self.values)))
                self.values.append(base.node)
        return tuple(found)

    def _output(self, leaf: Any) -> OutputSpec:
        if is_number(leaf):
            return OutputSpec("number", self.numbers[node_of(leaf)])
        if isinstance(leaf, GivenContainer):
            return OutputSpec("container", leaf.index)
        if not isinstance(leaf, Tensor):
            if not (is_constant(leaf) or isinstance(leaf, Advance)):
                raise CaptureError(
                    f"the result holds a {type(leaf).__name__}; a graph cannot make a new one in each call; "
                    "it runs in eager mode"
                )
            return OutputSpec("python", value=leaf)
        leaf = self.known(leaf)
        if id(leaf) in self.functional.former:
            return OutputSpec("input", next(i for i, p in enumerate(self.placeholders) if p is leaf))
        base = self.functional.aliases[id(leaf)].base
        if leaf is not base.root and (leaf.dtype, _lazy(leaf)) != (base.root.dtype, _lazy(base.root)):
            raise CaptureError(f"the result holds a view of {base.root.dtype} as {leaf.dtype}; it runs in eager mode")
        if base.input_index is not None:
            index = next(i for i, p in enumerate(self.placeholders) if self._before(p).base is base)
            return self._of_input(leaf, index)
        parameter = parameter_of(leaf)
        needs_gradients = leaf.requires_grad and not self.gradients and parameter is None
        if needs_gradients and not is_freed(leaf):
            made = (
                "a new tensor collects them" if leaf.is_leaf else "of a tensor that forward makes, or finds by itself"
            )
            raise NeedsGradients(f"the result needs gradients ({made}); it runs in eager mode")
        if leaf.is_conj() or leaf.is_neg():
            raise CaptureError("the result is lazily conjugated or negated; it runs in eager mode")
        is_whole = _layout(leaf, base.root) == _layout(base.root, base.root)
        is_first = id(base) not in self._roots
        if is_first:
            self._roots[id(base)] = len(self.values)
            self.values.append(self._fresh(base.node))
        view = None if is_whole and is_first else _layout(leaf, base.root)
        return OutputSpec("graph", self._roots[id(base)], view, freed=needs_gradients, parameter=parameter)

    def _before(self, placeholder: Tensor) -> Alias:
        """The alias of a placeholder's tensor as it was before the call."""
        return self.functional.aliases[id(self.functional.former.get(id(placeholder), placeholder))]

    def _of_input(self, leaf: Tensor, index: int) -> OutputSpec:
        root = self.placeholders[index]
        if leaf is not root and (parameter := parameter_of(leaf)) is not None:
            layout = _layout(leaf, self._before(root).tensor)
            return OutputSpec("input", index, layout, detached=root.requires_grad, parameter=parameter)
        if leaf.requires_grad and not root.requires_grad:
            raise CaptureError("the result is a view of an input, and only the view needs gradients")
        if self.gradients and leaf is not root and leaf.requires_grad and leaf.is_leaf:  # under no_grad
            raise CaptureError("the result is a view of an input that keeps gradients to itself; it runs in eager mode")
        view = None if leaf is root else _layout(leaf, self._before(root).tensor)
        return OutputSpec("input", index, view, detached=root.requires_grad and not leaf.requires_grad)

    def _fresh(self, node: Node) -> Node:
        """A copy of a constant made in ``forward``, which is a new tensor in each call."""
        if node.op != "placeholder":
            return node
        return self.functional.emit(torch.ops.aten.clone.default, (node,), {})


def _lazy(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_conj(), tensor.is_neg()


def _layout(tensor: Tensor, root: Tensor) -> Layout:
    """The layout of ``tensor``, its offset counted from ``root``'s."""
    return Layout(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset() - root.storage_offset()))
