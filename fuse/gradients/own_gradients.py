"""Matches of patterns with ``backward``: mark them in the graph, then differentiate them by the pattern's rule.

    a = sigmoid(x)            m = matched(x):                           forward    a, b as they were
    b = mul(a, x)      ->         a = sigmoid(x); return mul(a, x)  ->  backward   the operators of backward(grad, x)

The matched operators move into a module. When the graph runs again under autograd, the module is one function with the
pattern's gradient. Both directions are recorded operator by operator, and fuse like any other operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.nn import Module

from fuse import ops
from fuse.gradients.replaying import replay
from fuse.graph.outputs import inlined, outputs_of
from fuse.graph.strides import inverse
from fuse.rewrite import nested, regions
from fuse.rewrite.patterns.backward import gradients, is_differentiable
from fuse.rewrite.patterns.conditions import Misfit
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.exact_match import FoundMatch
from fuse.rewrite.patterns.language import Environment, ManySpec, running
from fuse.rewrite.patterns.replacing import latest


@dataclass(frozen=True)
class PatternResult:
    """A result of the pattern: its shape, and its position among the module's results, or the operand that it is."""

    shape: torch.Size
    position: int | None
    operand: int | None = None


@dataclass(frozen=True)
class OwnGradient:
    """How the gradients of one match are taken.

    ``operands``: for each tensor parameter of the pattern, the module's operand and the order of its dimensions, if the
    pattern has another one; None for a parameter that it does not read. ``requires_grad``: positions of the module's
    results that have gradients.
    """

    pattern: Pattern
    constants: Mapping[str, Any]
    choices: Mapping[str, int]
    lists: int
    operands: tuple[tuple[int, tuple[int, ...] | None] | None, ...]
    results: tuple[PatternResult, ...]
    requires_grad: frozenset[int]

    def gradients(
        self, operands: Sequence[Tensor], results: Sequence[Tensor], tangents: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradients of ``operands``, from the ``tangents`` of the module's ``results``."""
        given = [None if one is None else _turned(operands[one[0]], one[1]) for one in self.operands]
        values: list[Tensor] = []
        grads: list[Tensor | None] = []
        for one in self.results:
            value = operands[one.operand or 0] if one.position is None else results[one.position]
            tangent = None if one.position is None else tangents[one.position]
            values.append(_shaped(value, one.shape))
            if not is_differentiable(value):
                grads.append(None)
            elif tangent is None:
                grads.append(torch.zeros(one.shape, dtype=value.dtype, device=value.device))
            else:
                grads.append(_shaped(tangent, one.shape))
        with running(Environment(self.constants, self.choices)):
            answers = gradients(self.pattern, self._arguments(given), values, grads)
        found: list[Tensor | None] = [None] * len(operands)
        for position, answer in zip(self.operands, answers, strict=True):
            if position is not None and answer is not None:
                found[position[0]] = _turned_back(answer, position[1])
        return found

    def _arguments(self, given: Sequence[Tensor | None]) -> list[Any]:
        """``given`` as arguments of the pattern: lists where it takes lists."""
        tensors = iter(given)
        return [
            [next(tensors) for _ in range(self.lists)] if isinstance(one.spec, ManySpec) else next(tensors)
            for one in self.pattern.parameters
        ]


def _shaped(tensor: Tensor, shape: torch.Size) -> Tensor:
    return tensor if tensor.shape == shape else tensor.reshape(shape)


def _turned(tensor: Tensor, dims: tuple[int, ...] | None) -> Tensor:
    return tensor if dims is None else tensor.permute(dims)


def _turned_back(tensor: Tensor, dims: tuple[int, ...] | None) -> Tensor:
    return tensor if dims is None else tensor.permute(inverse(dims))


# ---- in the graph --------------------------------------------------------------------------------------------------


def why_not(found: FoundMatch) -> Misfit | None:
    """Why the pattern's rule cannot give the gradients of a match, or None."""
    traced = found.form.differentiated(found.setting.arguments, found.constants)
    if isinstance(traced, str):
        return Misfit("constraint", f"the gradients do not run on these tensors: {traced}")
    if any(node.op == "call_function" and ops.is_random(node.target) for node in traced.graph.nodes):
        return Misfit("alias or mutation", "backward draws random numbers")
    return None


def set_apart(graph: GraphModule, found: FoundMatch, moved: dict[Node, Node]) -> None:
    """Move the nodes of a match into a module that knows their gradients.

    ``moved`` maps nodes replaced by earlier rewrites to their replacements; this rewrite adds its own. The caller
    restores the program order.
    """
    body, inner = Graph(), dict[Node, Node]()
    keys = [key for key in found.form.keys if key in found.inputs]
    inputs = [latest(found.inputs[key].node, moved) for key in keys]
    for node in inputs:
        placeholder = body.placeholder(node.name)
        placeholder.meta.update(val=node.meta["val"], source="")
        inner.setdefault(node, placeholder)
    for node in found.inside:
        inner[node] = body.node_copy(node, inner.__getitem__)
    outputs = [output.node for output in found.outputs if not output.is_input]
    module = regions.region_module(body, [inner[node] for node in outputs])
    module.meta["kind"] = nested.MATCHED
    module.meta["gradient"] = OwnGradient(
        found.form.pattern,
        found.constants,
        found.form.choices,
        found.form.lists,
        tuple((keys.index(key), found.inputs[key].dims) if key in found.inputs else None for key in found.form.keys),
        tuple(_results(found, inputs, moved)),
        frozenset(i for i, node in enumerate(outputs) if _is_trained(node)),
    )
    call = regions.insert_region(graph, found.members, module, inputs, outputs)
    moved.update(zip(outputs, call.users, strict=True))


def _results(found: FoundMatch, inputs: Sequence[Node], moved: dict[Node, Node]) -> list[PatternResult]:
    results, position = [], 0
    for output, root in zip(found.outputs, found.setting.traced.outputs, strict=True):
        shape = root.meta["val"].shape
        if output.is_input:
            results.append(PatternResult(shape, None, inputs.index(latest(output.node, moved))))
        else:
            results.append(PatternResult(shape, position))
            position += 1
    return results


def _is_trained(node: Node) -> bool:
    recorded: bool = node.meta.get("needs_gradient", True)
    return recorded and is_differentiable(node.meta["val"])


def put_back(graph: GraphModule) -> None:
    """Move the operators of :func:`set_apart` back into ``graph``, where no gradient of them is needed."""
    for call in graph.graph.find_nodes(op="call_module"):
        module = nested.called_module(call)
        if not isinstance(module, GraphModule) or gradient_of(module) is None:
            continue
        with graph.graph.inserting_before(call):
            results = inlined(graph.graph, module.graph, call.args)
        for part in list(call.users):
            part.replace_all_uses_with(results[part.args[1]])
        regions.erase_with_users(call)
    graph.recompile()


def gradient_of(module: Module) -> OwnGradient | None:
    """The gradient rule of ``module``, if :func:`set_apart` made it."""
    return getattr(module, "meta", {}).get("gradient")


# ---- under autograd ------------------------------------------------------------------------------------------------


def run(module: Module, operands: Sequence[Any], operate: Callable[[Node, Any, Any], Any]) -> tuple[Tensor, ...]:
    """The results of ``module`` for ``operands``, in a recording; ``operate`` runs one operator and records it."""
    assert isinstance(module, GraphModule)

    def forward(*given: Tensor) -> tuple[Tensor, ...]:
        known = dict(zip(module.graph.find_nodes(op="placeholder"), given, strict=True))

        def one(node: Node) -> Any:
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            return operate(node, args, kwargs)

        replay(module.graph, known, lambda node: None, one)
        outputs = outputs_of(module.graph)
        return tuple(known[node] for node in outputs)

    if not any(operand.requires_grad for operand in operands):
        return forward(*operands)
    gradient = module.meta["gradient"]
    results: tuple[Tensor, ...] = _Matched.apply(forward, gradient, *operands)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return results


class _Matched(torch.autograd.Function):
    """The operators of a match as one node of autograd, on the fake tensors of a recording."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., tuple[Tensor, ...]], rule: OwnGradient, *operands: Tensor) -> Any:
        results = run(*operands)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(result for i, result in enumerate(results) if i not in rule.requires_grad))
        ctx.rule, ctx.operands, ctx.results = rule, operands, results
        return results

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        found = ctx.rule.gradients(ctx.operands, ctx.results, tangents)
        needed = ctx.needs_input_grad[2:]
        return None, None, *(gradient if n else None for gradient, n in zip(found, needed, strict=True))
