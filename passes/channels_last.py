"""Store the images between a frozen model's convolutions in channels-last layout.

    y = convolution(x, w)     positions contiguous         y = convolution(x, w')     channels contiguous
    z = relu(y)                                      ->    z = relu(y)
    return z                                               return clone(z, contiguous_format)

A convolution then reads its weight in vectors, as a matrix product does, and its image number by number. Tiles are full
for images of any size, and the weight is packed once (``pack_weights``). Large images run 1.1 to 1.2 times as fast as
in the default layout, images of 4 to 64 positions 1.4 to 2.2 times (two threads, 64 to 512 channels). As in PyTorch,
the layout of the weight selects the layout of the convolution, and the images' readers follow. The model's results keep
their layout.

Either all convolutions change or none, because images would be copied between two layouts. Declined where
a convolution has groups, and where it has too few channels to fill the vectors. Declined where an operator depends on
the order of an image's elements in memory (it draws random numbers, or reads strides). Declined where operators that
are slower in this layout (norms over positions, up-sampling) read much of the images.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fuse import ops
from fuse.cost.work import tensors_in
from fuse.devices import has_kernels
from fuse.graph.fakes.fake_operators import FakeRunner, unlogged
from fuse.kernel.target import target_of
from fuse.rewrite import effects, surgery
from fuse.rewrite.constants import constant_nodes, given_constants
from fuse.rewrite.evaluate import evaluate, laid_out
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten

FOLLOWING = frozenset(["convolution", "pointwise", "reduction", "movement", "view", "gemm"])
"""Kinds of operators whose values do not depend on the layout of their operands."""
WORTH = 0.15
"""The share of the multiplications' time saved in channels-last layout: 0.1 to 0.3 measured."""
CYCLES: dict[object, float] = {
    aten.avg_pool2d.default: 2.0,
    aten.cat.default: 2.0,
    aten.clone.default: 2.0,
    aten.constant_pad_nd.default: 2.0,
    aten.max_pool2d_with_indices.default: 2.0,
}
"""Extra cycles for each element of an operator with a channels-last operand."""
CYCLES_OF_OTHERS = {"reduction": 10.0, "movement": 10.0, "gemm": 2.0}
"""The same for other operators, by kind; elementwise ones take none."""


@register_pass(stage="clean", after="fold_batch_norm", before_gradients=False)  # for frozen weights only
def channels_last(graph: GraphModule) -> Iterator[Verdict]:
    """Store the images between a frozen model's convolutions in channels-last layout."""
    nodes = graph.graph.find_nodes(op="call_function", target=aten.convolution.default)
    if not nodes:
        return
    values = given_constants(graph)
    known = {*values, *constant_nodes(graph, values)}
    convolutions = [node for node in nodes if is_contiguous_image(node) and weight_of(node) in known]
    if not convolutions:
        return
    if reason := obstacle(convolutions):
        yield declined(convolutions, reason)
        return
    weights = {node: evaluate(node, values, node.meta["val"].nbytes) for node in map(weight_of, convolutions)}
    if any(value is None for value in weights.values()):
        yield declined(convolutions, "a weight takes too much memory to be computed before any call")
        return
    plan = Relaid(graph, dict.fromkeys(convolutions))
    if reason := plan.make():
        yield declined(convolutions, reason)
        return
    saved = WORTH * sum(multiplied(node, positions=True) for node in convolutions) / lanes_of(convolutions[0])
    if sum(map(cycles_of, plan.values)) > saved:
        yield declined(convolutions, "other readers of the images would lose more time than the convolutions gain")
        return
    yield rewrite(
        convolutions, relay, graph, plan, {node: value for node, value in weights.items() if value is not None}
    )


def weight_of(convolution: Node) -> Node:
    return convolution.args[1]  # type: ignore[return-value]  # a node


def is_contiguous_image(node: Node) -> bool:
    """Whether the convolution gives a batch of images in default layout, and is not transposed."""
    val, transposed = node.meta["val"], node.args[6]
    return val.dim() == 4 and val.is_contiguous() and not transposed and val.dtype in (torch.float32, torch.float64)


def obstacle(convolutions: list[Node]) -> str | None:
    """Why the layout stays the default one, or None."""
    if not has_kernels(first := convolutions[0].meta["val"]):
        return f"there are no kernels for device {first.device.type} yet"
    if any(node.args[8] != 1 for node in convolutions):
        return "a convolution in groups reads its image position by position"
    before = sum(multiplied(node, positions=True) for node in convolutions)
    if sum(multiplied(node, positions=False) for node in convolutions) > before * (1 + WORTH):
        return f"too few channels to fill vectors of {lanes_of(convolutions[0])}"
    return None


def cycles_of(node: Node) -> float:
    """Extra cycles of ``node`` for channels-last images."""
    each = CYCLES[node.target] if node.target in CYCLES else CYCLES_OF_OTHERS.get(ops.kind(node.target), 0.0)
    held = (tensor for value in (node, *node.all_input_nodes) for tensor in tensors_in(value.meta["val"]))
    return each * max(tensor.numel() for tensor in held)


def multiplied(convolution: Node, positions: bool) -> int:
    """Multiplications of a convolution, including empty lanes; ``positions`` or output channels are in the lanes."""
    batch, outputs, down, across = convolution.meta["val"].shape
    depth = weight_of(convolution).meta["val"][0].numel()
    inner, lanes = down * across if positions else outputs, lanes_of(convolution)
    return int(batch * math.prod((down, across, outputs)) // inner * -(-inner // lanes) * lanes * depth)


def lanes_of(node: Node) -> int:
    """Elements that the kernels of the node's device multiply at once."""
    return target_of(node.meta["val"].device.type).packing.panel


@dataclass
class Relaid:
    """The graph's new values once ``convolutions`` have channels-last weights.

    ``restored`` are pairs of a reader and an operand that must keep its old layout.
    """

    graph: GraphModule
    convolutions: dict[Node, None]
    values: dict[Node, Any] = field(default_factory=dict)
    restored: list[tuple[Node, Node]] = field(default_factory=list)

    def make(self) -> str | None:
        """Find the new values and the operands to restore; returns a reason if this is impossible."""
        with surgery.fake_mode(self.graph.graph) as mode, torch.no_grad(), unlogged():
            runner = FakeRunner(mode)
            for node in self.graph.graph.nodes:
                changed = [operand for operand in node.all_input_nodes if operand in self.values]
                if node.op == "output":
                    self.restored += [(node, operand) for operand in changed]
                elif (changed or node in self.convolutions) and (reason := self._follow(node, runner)):
                    return reason
        for _, operand in self.restored:
            if not operand.meta["val"].is_contiguous():
                return f"{operand.name} has a layout other than contiguous, which is not restored"
        return None

    def _follow(self, node: Node, runner: FakeRunner) -> str | None:
        """Note the new value of ``node``; returns a reason if it cannot take the new layout."""
        is_part = node.target is operator.getitem or effects.view_base(node) is not None
        if not is_part and ops.kind(node.target) not in FOLLOWING:
            return f"{node.name} depends on the order of elements in memory"
        if node.op != "call_function" or not effects.is_pure(node) or effects.reads_place(node):
            return f"{node.name} is read by its position in memory, or has effects"
        value = self._run(node, runner)
        if value is None:  # a view that the new order does not allow
            self.restored += [(node, operand) for operand in node.all_input_nodes if operand in self.values]
        elif not same_layouts(value, node.meta["val"]):
            self.values[node] = value
        return None

    def _run(self, node: Node, runner: FakeRunner) -> Any:
        """The value of ``node`` for the new operands; None if the operator rejects them."""
        values = {operand: self.values.get(operand, operand.meta["val"]) for operand in node.all_input_nodes}
        if node in self.convolutions:
            weight = values[weight_of(node)]
            values[weight_of(node)] = weight.new_empty_strided(weight.shape, strides_of(weight))
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        if isinstance(node.target, torch._ops.OpOverload):
            try:
                return runner.run(node.target, args, kwargs)
            except (RuntimeError, ValueError):
                return None
        return node.target(*args, **kwargs)  # type: ignore[operator]  # getitem


def strides_of(weight: Tensor) -> tuple[int, ...]:
    """Channels-last strides of a weight, also for a weight of one tap, where torch's may differ.

    >>> strides_of(torch.empty(32, 16, 1, 1))
    (16, 1, 16, 16)
    """
    _, channels, down, across = weight.shape
    return (channels * down * across, 1, across * channels, channels)


def same_layouts(first: Any, second: Any) -> bool:
    """Whether two values, or two lists of results, have the same layouts."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return (first.stride(), first.storage_offset()) == (second.stride(), second.storage_offset())
    return all(map(same_layouts, first, second)) if isinstance(first, (list, tuple)) else True


def relay(graph: GraphModule, plan: Relaid, weights: dict[Node, Tensor]) -> None:
    """Give convolutions their weights and nodes their new values, and restore layouts where needed."""
    relaid: dict[Node, Node] = {}
    for convolution in plan.convolutions:
        old = weight_of(convolution)
        if old not in relaid:
            value = laid_out(weights[old], strides_of(weights[old]))
            relaid[old] = surgery.add_constant(graph, value, like=convolution)
        convolution.update_arg(1, relaid[old])
    for old in relaid:
        surgery.erase(old)
    for node, value in plan.values.items():
        node.meta["val"] = value
    copies: dict[Node, Node] = {}
    for reader, operand in plan.restored:
        if operand not in copies:
            copies[operand] = surgery.insert(
                reader, aten.clone.default, operand, like=operand, memory_format=torch.contiguous_format
            )
        reader.replace_input_with(operand, copies[operand])
