"""Fold a batch norm into the weights of the frozen convolution or linear layer before it.

    y = convolution(x, w, b)                               s = weight / sqrt(variance + epsilon)
    z = batch_norm(y, weight, bias, mean, variance)   ->   z = convolution(x, w * s, (b - mean) * s + bias)

In evaluation the norm's statistics are fixed, so that it scales and shifts each channel. Weights are folded in float64
and rounded once, and only where every weight is a constant (``fuse.compile(model, freeze=True)``): otherwise each call
would fold them. Declined where something else reads the layer, where the statistics are the batch's, and where a
folded weight is not finite. Declined in half precision: rounding the weights would add more than a convolution's own
error.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse.rewrite import surgery
from fuse.rewrite.constants import constant_nodes, given_constants
from fuse.rewrite.evaluate import evaluate, laid_out
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

aten = torch.ops.aten

NORM = aten._native_batch_norm_legit_no_training.default
WIDE = (torch.float32, torch.float64)

Values = dict[Node, Tensor | None]


@dataclass(frozen=True)
class WeightedLayer:
    """A layer with a weight and perhaps a bias; ``channel`` is the weight's dimension of output channels."""

    node: Node
    weight: Node
    bias: Node | None
    channel: int


@register_pass(stage="clean", after="constant_folding", before_gradients=False)  # for frozen weights only
def fold_batch_norm(graph: GraphModule) -> Iterator[Verdict]:
    """Fold a batch norm into the weights of the frozen convolution or linear layer before it."""
    norms = graph.graph.find_nodes(op="call_function", target=NORM)
    values = given_constants(graph) if norms else {}
    constant = {*values, *constant_nodes(graph, values)} if norms else set()
    for norm in norms:
        layer = layer_of(norm.args[0])
        if layer is None or layer.weight not in constant:
            continue
        if reason := obstacle(norm, layer, constant):
            yield declined((layer.node, norm), reason)
            continue
        weight, bias = folded(norm, layer, values)
        if not (weight.isfinite().all() and bias.isfinite().all()):
            yield declined((layer.node, norm), "a folded weight is not finite")
        else:
            yield rewrite((layer.node, norm), fold, graph, norm, layer, weight, bias)


def layer_of(node: Node) -> WeightedLayer | None:
    """``node`` as a layer; None for other operators, and for transposed convolutions in groups."""
    if node.target is aten.convolution.default:
        _, weight, bias, *_, is_transposed, _, groups = node.args
        if is_transposed and groups != 1:
            return None
        return WeightedLayer(node, weight, bias, 1 if is_transposed else 0)  # type: ignore[arg-type]  # nodes
    if node.target is aten.mm.default:
        return WeightedLayer(node, node.args[1], None, 1)  # type: ignore[arg-type]  # a node
    if node.target is aten.addmm.default and not node.kwargs:
        return WeightedLayer(node, node.args[2], node.args[0], 1)  # type: ignore[arg-type]  # nodes
    return None


def obstacle(norm: Node, layer: WeightedLayer, constant: set[Node]) -> str | None:
    """Why the norm cannot be folded into the layer, or None; ``constant`` are the nodes with known values."""
    if len(layer.node.users) > 1:
        return "other operators read the layer's result, too"
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in norm.users):
        return "the statistics of the norm are read"
    operands = [layer.weight, layer.bias, *norm.args[1:5]]
    if not constant.issuperset(operand for operand in operands if isinstance(operand, Node)):
        return "a statistic of the norm, or a bias, may change from call to call"
    result, val = norm.meta["val"][0], layer.node.meta["val"]
    if result.dtype not in WIDE or layer.weight.meta["val"].dtype != result.dtype:
        return f"folded weights would be rounded to {result.dtype} once more"
    if result.stride() != val.stride():
        return "the norm's result has another layout than the layer's"
    if layer.bias is not None and layer.bias.meta["val"].shape != (val.shape[1],):
        return "the bias is not one number for each channel"
    return None


def folded(norm: Node, layer: WeightedLayer, values: Values) -> tuple[Tensor, Tensor]:
    """The weight and bias of one layer that computes ``norm`` of ``layer``."""

    def known(node: Node | None, otherwise: float) -> Tensor:
        value = None if node is None else evaluate(node, values)
        return torch.full((), otherwise, dtype=torch.float64) if value is None else value.double()

    gain, shift, mean, variance = (
        known(node, otherwise)  # type: ignore[arg-type]  # nodes, or None
        for node, otherwise in zip(norm.args[1:5], (1.0, 0.0, 0.0, 1.0), strict=True)
    )
    scale = gain / torch.sqrt(variance + norm.args[6])  # type: ignore[operator,arg-type]  # a number
    weight = known(layer.weight, 0.0)
    across = [1] * weight.dim()
    across[layer.channel] = -1
    bias = (known(layer.bias, 0.0) - mean) * scale + shift
    dtype = layer.weight.meta["val"].dtype
    return (weight * scale.view(across)).to(dtype), bias.to(dtype)


def fold(graph: GraphModule, norm: Node, layer: WeightedLayer, weight: Tensor, bias: Tensor) -> None:
    """Put the folded layer where the norm was."""
    stride = torch.empty_like(layer.weight.meta["val"]).stride()  # the weight's own, but for gaps and repeats
    new_weight = surgery.add_constant(graph, laid_out(weight, stride), like=norm)
    new_bias = surgery.add_constant(graph, bias, like=norm)
    if layer.node.target is aten.convolution.default:
        arguments = (layer.node.args[0], new_weight, new_bias, *layer.node.args[3:])
        new = surgery.insert(norm, aten.convolution.default, *arguments, like=norm)
    else:
        new = surgery.insert(norm, aten.addmm.default, new_bias, layer.node.args[-2], new_weight, like=norm)
    for part in list(norm.users):
        surgery.replace(part, new)
