"""Compute at rewriting time what depends on no input.

    a = arange(4)
    b = a * 0.5      ->      c = the constant [1.0, 1.6487, 2.7183, 4.4817]
    c = exp(b)

Each operator is evaluated in float64 on its rounded operands and its result rounded to its own dtype: at least as close
to the exact value as eager's. Integers stay exact. A tensor of equal elements becomes a ``full``, which kernels take in
as a number; any other becomes a constant of the graph. Declined where the constant would be larger than a megabyte, and
where it would be a result: the caller may write to it, so it must be made anew in each call. Random operators are never
folded, and the first step of a loop stays like the others (:mod:`fuse.rewrite.first_steps`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from fuse.rewrite import effects, surgery
from fuse.rewrite.evaluate import FILLS, can_evaluate, evaluate, is_uniform, laid_out
from fuse.rewrite.first_steps import first_steps
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten

LARGEST_CONSTANT = 1 << 20
"""Bytes that one folded constant may take."""


@register_pass(after="no_ops")
def constant_folding(graph: GraphModule) -> Iterator[Verdict]:
    """Compute at rewriting time what depends on no input."""
    values = given_constants(graph)
    constant = constant_nodes(graph, values)
    constant = constant_nodes(graph, values, first_steps(graph, constant))
    escaping = effects.escaping(graph)
    for node in [node for node in constant if node.target not in FILLS and is_needed(node, constant)]:
        value = evaluate(node, values, LARGEST_CONSTANT)
        if value is None:
            yield declined(node, f"the constant would be larger than {LARGEST_CONSTANT >> 20} MiB")
        elif is_uniform(value) and node.meta["val"].is_contiguous():
            yield rewrite(node, fold_to_fill, node, value)
        elif node in escaping or "signature" not in graph.meta:
            yield declined(node, "the constant would be a result, which is made anew in each call")
        else:
            yield rewrite(node, fold_to_constant, graph, node, value, values)


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
        if spec.value is not None and index not in written and not isinstance(spec.value, FakeTensor)
    }


def constant_nodes(graph: GraphModule, given: Collection[Node], without: Set[Node] = frozenset()) -> dict[Node, None]:
    """The operators that can be evaluated now, in program order, but for those ``without`` and what needs them."""
    found: dict[Node, None] = {}
    for node in graph.graph.nodes:
        known = all(operand in found or operand in given for operand in node.all_input_nodes)
        if known and node not in without and can_evaluate(node):
            found[node] = None
    return found


def is_needed(node: Node, constant: Collection[Node]) -> bool:
    """Whether ``node`` computes something that other than constants use, directly or through views."""
    if effects.is_view(node):
        return False
    worklist = list(node.users)
    while worklist:
        user = worklist.pop()
        if user not in constant:
            return True
        if effects.is_view(user):
            worklist.extend(user.users)
    return False


def fold_to_fill(node: Node, value: Tensor) -> None:
    """Let a ``full`` make the equal elements of ``node``."""
    val = node.meta["val"]
    element = value.flatten()[0].item()
    fill = surgery.insert(
        node, aten.full.default, list(val.size()), element, dtype=val.dtype, device=val.device, like=node
    )
    surgery.replace(node, fill)


def fold_to_constant(graph: GraphModule, node: Node, value: Tensor, values: dict[Node, Tensor | None]) -> None:
    """Let a new constant of the graph stand for ``node``, known to whatever is folded next."""
    val = node.meta["val"]
    constant = surgery.add_constant(graph, laid_out(value, val.stride()).to(val.device), like=node)
    values[constant] = value
    surgery.replace(node, constant)
