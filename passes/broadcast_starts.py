"""Start a loop's state from a number instead of a tensor filled with it.

    h0 = zeros([16, 256])                      h0 = expand(0.0, [16, 256])
    h, hs = loop(h0, xs, w)          ->        h, hs = loop(h0, xs, w)

A loop's kernel copies its initial states into its own memory. One number that is read for every element gives the same
states, and no launch fills a tensor with it. The same holds for the loop's other operands. Declined where the loop has
no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse.devices import is_host
from fuse.graph.loop import Loop
from fuse.rewrite import effects, surgery
from fuse.rewrite.evaluate import FILLS, can_evaluate, evaluate
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten


@register_pass(stage="loops", after="unused_steps", before_gradients=False)  # for the kernel only
def broadcast_starts(graph: GraphModule) -> Iterator[Verdict]:
    """Start a loop's state from a number instead of a tensor filled with it."""
    made: dict[object, Node] = {}
    for call in graph.graph.find_nodes(op="call_module"):
        loop = graph.get_submodule(call.target)
        if not isinstance(loop, Loop):
            continue
        for operand in dict.fromkeys(node for node in call.args if is_filled(node)):
            if not loop.persistent:
                yield declined((call, operand), "the loop has no kernel, so its first states must be in memory")
            else:
                yield rewrite((call, operand), broadcast, graph, call, operand, made)


def is_filled(node: object) -> bool:
    """Whether ``node`` is a tensor filled with one number, or a view of one."""
    if not isinstance(node, Node) or not isinstance(node.meta["val"], Tensor) or not node.meta["val"].numel():
        return False
    while node.target not in FILLS:
        if (base := effects.view_base(node)) is None or not can_evaluate(node):
            return False
        node = base
    return is_host(node.meta["val"]) and not node.all_input_nodes


def broadcast(graph: GraphModule, call: Node, operand: Node, made: dict[object, Node]) -> None:
    """Let ``call`` read one number, expanded to the shape of ``operand``; ``made``: numbers already in the graph."""
    fill, shape = effects.root(operand), list(operand.meta["val"].shape)
    filled = evaluate(fill, {})
    assert filled is not None, "a fill is one element expanded"
    element = filled.flatten()[0].clone()
    key = surgery.constant_key(element.item()), element.dtype
    if key not in made:
        made[key] = surgery.add_constant(graph, element, like=fill)
    spread = surgery.insert(call, aten.expand.default, made[key], shape, like=fill)
    call.replace_input_with(operand, spread)
    surgery.erase(operand)
