"""Run the operators of one step for all steps at once, by the rules of ``torch.vmap``.

    y = log_softmax(h @ w)            Y = log_softmax(view(H, [T * B, K]) @ w)     H: all h, stacked

The operators that the rules call are recorded into a graph, with their fake results and the line of the original
operator. A product with a weight that all steps share becomes one product over the rows of all steps, in either memory
order.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fuse import ops
from fuse.rewrite import surgery

aten = torch.ops.aten

MOST_OPERATORS = 24
"""The most operators that a rule may call for one operator."""

ROWS_OF_A_WEIGHT = (aten.mm.default, aten.addmm.default)


class CannotBatchError(Exception):
    """The rule of an operator cannot be recorded."""


def can_batch(node: Node) -> bool:
    """Whether ``node`` can run for all steps at once; random operators cannot, as they draw step by step."""
    if node.target is operator.getitem:
        return True
    target = node.target
    if not isinstance(target, OpOverload) or ops.is_random(target):
        return False
    return ops.batch_rule(target) or ops.parts(target) is not None


class Batcher:
    """Appends the nodes of a step to ``graph``, batched over all steps; ``known`` has their results, steps first.

    Nodes in ``known`` but not in ``batched`` are the same in every step.
    """

    def __init__(self, graph: Graph, known: dict[Node, Any], batched: set[Node]) -> None:
        self.graph = graph
        self.mode = surgery.fake_mode(graph)
        self.known = known
        self.batched = batched

    def add(self, node: Node) -> None:
        """Compute ``node`` for all steps from its known operands."""
        source = node.meta.get("source", "")
        if node.target is operator.getitem:
            whole, position = node.args
            self.known[node] = self.known[whole][position]  # type: ignore[index]
        elif self._shares_weight(node):
            self.known[node] = self._product(node, source)
        elif node.target is aten.select_scatter.default and not self.batched.isdisjoint(node.all_input_nodes):
            self.known[node] = self._written(node, source)
        else:
            self.known[node] = self._mapped(node, source)
        if any(operand in self.batched for operand in node.all_input_nodes):
            self.batched.add(node)

    def insert(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], source: str) -> Node:
        """A node at the end of the graph."""
        node = self.graph.call_function(target, args, dict(kwargs))
        fake_args, fake_kwargs = map_arg((args, dict(kwargs)), lambda operand: operand.meta["val"])
        with self.mode, torch.no_grad():
            node.meta.update(val=target(*fake_args, **fake_kwargs), source=source)
        return node

    # ---- products ----------------------------------------------------------------------------------------------------

    def _shares_weight(self, node: Node) -> bool:
        if node.target not in ROWS_OF_A_WEIGHT:
            return False
        *bias, left, right = node.args
        shared = not self.batched.intersection([*bias, right])
        return left in self.batched and shared and all(b.meta["val"].dim() == 1 for b in bias)  # type: ignore[union-attr]

    def _product(self, node: Node, source: str) -> Node:
        """One product over the rows of all steps; the result has its rows in the order of the left operand's."""
        *bias, left, right = (self.known[operand] for operand in node.args)  # type: ignore[index]
        steps, rows, depth = left.meta["val"].shape
        inner_steps = rows > 1 and left.meta["val"].stride(0) < left.meta["val"].stride(1)
        if inner_steps:
            left = self.insert(aten.permute.default, (left, [1, 0, 2]), {}, source)
        if not left.meta["val"].is_contiguous():
            left = self.insert(aten.clone.default, (left,), {"memory_format": torch.contiguous_format}, source)
        left = self.insert(aten.view.default, (left, [steps * rows, depth]), {}, source)
        product = self.insert(node.target, (*bias, left, right), node.kwargs, source)
        columns = right.meta["val"].shape[1]
        if not inner_steps:
            return self.insert(aten.view.default, (product, [steps, rows, columns]), {}, source)
        product = self.insert(aten.view.default, (product, [rows, steps, columns]), {}, source)
        return self.insert(aten.permute.default, (product, [1, 0, 2]), {}, source)

    # ---- writes of one position --------------------------------------------------------------------------------------

    def _written(self, node: Node, source: str) -> Node:
        """The same write in all steps. The rule of ``torch.vmap`` scatters the piece once for each element of the
        dimension, all to one position: the value is right, and the piece's gradient a multiple."""
        whole, piece, dim, position = node.args
        steps = next(self.known[n].meta["val"].shape[0] for n in node.all_input_nodes if n in self.batched)
        pair = []
        for operand in (whole, piece):
            value = self.known[operand]  # type: ignore[index]  # FX types arguments loosely
            if operand not in self.batched:
                shape = [steps, *value.meta["val"].shape]
                value = self.insert(aten.expand.default, (value, shape), {}, source)
            pair.append(value)
        dim = dim % node.meta["val"].dim() + 1
        return self.insert(node.target, (*pair, dim, position), {}, source)

    # ---- everything else ---------------------------------------------------------------------------------------------

    def _mapped(self, node: Node, source: str) -> Any:
        operands = list(dict.fromkeys(node.all_input_nodes))
        values = [self.known[operand].meta["val"] for operand in operands]
        dims = tuple(0 if operand in self.batched else None for operand in operands)
        recorder = _RuleRecorder(self, source)
        made: list[Any] = []  # the result of a step with parts that are None, which vmap rejects; None for one tensor
        function: Any = node.target
        if isinstance(function, OpOverload) and not ops.batch_rule(function):
            function = ops.parts(function) or function
        for operand in operands:
            recorder.note(self.known[operand].meta["val"], self.known[operand])

        def step(*tensors: Tensor) -> Any:
            given = dict(zip(operands, tensors, strict=True))
            args, kwargs = map_arg((node.args, node.kwargs), given.__getitem__)
            result = function(*args, **kwargs)
            made.append(None if isinstance(result, Tensor) else result or ())
            return result if made[-1] is None else [part for part in made[-1] if part is not None]

        run = torch.vmap(step, in_dims=dims) if any(dim == 0 for dim in dims) else step
        before = len(self.graph.nodes)
        with recorder, torch.no_grad():
            result: Any = run(*values)
        if len(self.graph.nodes) - before > MOST_OPERATORS:
            raise CannotBatchError("vmap's rule computes one step after another")
        if made[-1] is None:
            return recorder.node(result)
        parts = iter(result)
        return [None if part is None else recorder.node(next(parts)) for part in made[-1]]


class _RuleRecorder(TorchDispatchMode):
    """Records the dispatched operators, below the rules of ``torch.vmap``, as nodes of a graph."""

    def __init__(self, batcher: Batcher, source: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.batcher, self.source = batcher, source
        self.nodes: dict[int, Node] = {}
        self.alive: list[Tensor] = []

    def note(self, tensor: Tensor, node: Node) -> None:
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)

    def node(self, tensor: Tensor) -> Node:
        if id(tensor) not in self.nodes:
            raise CannotBatchError("vmap's rule creates a tensor")
        return self.nodes[id(tensor)]

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if op.namespace == "prim":  # a query of a fake tensor's property
            return op(*args, **(kwargs or {}))
        if ops.mutates(op):
            raise CannotBatchError(f"vmap's rule calls {op}, which writes to its operand")
        if op is aten._to_copy.default and not isinstance(args[0], Tensor):
            # a number beside a scalar of each step: the rule gives it the dtype of the result
            op, args = aten.full.default, ([], args[0])
        node_args, node_kwargs = pytree.tree_map_only(Tensor, self.node, (args, dict(kwargs or {})))
        made = self.batcher.insert(op, node_args, node_kwargs, self.source)
        result = made.meta["val"]
        if isinstance(result, Tensor):
            self.note(result, made)
            return result
        for position, part in enumerate(result or ()):  # an assertion returns None
            if isinstance(part, Tensor):
                picked = self.batcher.graph.call_function(operator.getitem, (made, position))
                picked.meta.update(val=part, source=self.source)
                self.note(part, picked)
        return result
