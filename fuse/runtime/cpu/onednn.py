"""Products and convolutions that oneDNN computes in one call, an operator behind them included.

    addmm(b, x, w.t())                       mkldnn._linear_pointwise(x, w, b, "none")
    gelu(addmm(b, x, w.t()))           ->    mkldnn._linear_pointwise(x, w, b, "gelu")
    addmm(b, x, w.t()) + r                   mkldnn._linear_pointwise(x, r, w, b, "add")
    silu(convolution(x, w, b))               mkldnn._convolution_pointwise(x, w, b, "swish")
    convolution(x, w, b) + r                 mkldnn._convolution_pointwise(x, r, w, b, "add")

Weights are read in each call: none are kept packed, as they may change. A convolution on its own is not here, as the
operator of ATen is that of oneDNN already. Declined: other dtypes than float32, layouts with gaps or in another order,
other factors than 1, results that somebody else reads, and operators of which oneDNN makes numbers out of NaN (its
``relu``, ``hardtanh`` and ``hardsigmoid`` do).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse.graph.outputs import outputs_of
from fuse.runtime.libraries import LibraryCall

aten = torch.ops.aten
mkldnn = torch.ops.mkldnn


@dataclass(frozen=True)
class Epilogue:
    """What follows a product: ``attribute`` of oneDNN with its numbers, or the addition of ``other``."""

    attribute: str = "none"
    scalars: tuple[float, ...] = ()
    algorithm: str | None = None
    other: Node | None = None


def call_of(region: GraphModule) -> LibraryCall | None:
    """oneDNN's call that computes all of ``region``, where there is one.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> linear = make_fx(lambda x, w: (torch.tanh(x @ w),), tracing_mode="fake")(torch.ones(4, 8), torch.ones(8, 2))
    >>> call = call_of(linear)
    >>> call.name, [tuple(result.shape) for result in call(torch.ones(4, 8), torch.ones(8, 2))]
    ('onednn tanh', [(4, 2)])
    """
    nodes = [node for node in region.graph.nodes if node.op not in ("placeholder", "output")]
    if not torch.backends.mkldnn.is_available() or not nodes or nodes[0].target not in _READERS:
        return None
    if torch.get_float32_matmul_precision() != "highest":
        return None
    if len(outputs_of(region.graph)) != 1 or not _is_chain(nodes, outputs_of(region.graph)[0]):
        return None
    if not all(_is_plain(node.meta["val"]) for node in nodes):
        return None
    product, *behind = (node for node in nodes if node.target not in _RESHAPES)
    epilogue = _epilogue(behind)
    if epilogue is None:
        return None
    places = {node: i for i, node in enumerate(n for n in region.graph.nodes if n.op == "placeholder")}
    return _READERS[product.target](product, epilogue, places, tuple(nodes[-1].meta["val"].shape))


def _is_chain(nodes: Sequence[Node], last: Node) -> bool:
    """Whether each operator reads the one before, and nobody else does."""
    follows = all(node in after.all_input_nodes for node, after in pairwise(nodes))
    return follows and nodes[-1] is last and all(len(node.users) == 1 for node in nodes)


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor that oneDNN takes as it lies: float32 on the CPU, without gaps, in the order of its
    dimensions."""
    known = isinstance(value, Tensor) and value.dtype is torch.float32 and value.device.type == "cpu"
    return known and value.layout is torch.strided and value.is_contiguous() and value.numel() > 0


# ---- epilogue --------------------------------------------------------------------------------------------------------


def _epilogue(behind: Sequence[Node]) -> Epilogue | None:
    """The operators behind a product as oneDNN's, or None where it has not all of them, exactly."""
    if not behind:
        return Epilogue()
    if len(behind) > 1:
        return None
    if behind[0].target is aten.add.Tensor:
        other = _added(behind[0])
        return Epilogue("add", other=other) if other else None
    reader = _ATTRIBUTES.get(behind[0].target)
    return reader(behind[0]) if reader else None


def _added(add: Node) -> Node | None:
    """The operand of an addition that is no result of the region, of the same layout as the sum."""
    given = [n for n in add.all_input_nodes if n.op == "placeholder"]
    if add.kwargs.get("alpha", 1) != 1 or len(given) != 1 or len(add.all_input_nodes) != 2:
        return None
    value = given[0].meta["val"]
    return given[0] if _is_plain(value) and value.shape == add.meta["val"].shape else None


def _gelu(node: Node) -> Epilogue:
    return Epilogue("gelu", algorithm=str(node.kwargs.get("approximate", "none")))


def _leaky_relu(node: Node) -> Epilogue | None:
    slope = node.args[1] if len(node.args) > 1 else 0.01
    if slope == 0 or node.kwargs:  # of slope 0, it is oneDNN's relu
        return None
    return Epilogue("leaky_relu", (slope,)) if isinstance(slope, (int, float)) else None


_ATTRIBUTES: dict[Any, Callable[[Node], Epilogue | None]] = {
    aten.tanh.default: lambda node: Epilogue("tanh"),
    aten.sigmoid.default: lambda node: Epilogue("sigmoid"),
    aten.silu.default: lambda node: Epilogue("swish"),
    aten.hardswish.default: lambda node: Epilogue("hardswish"),
    aten.gelu.default: _gelu,
    aten.leaky_relu.default: _leaky_relu,
}
_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


# ---- products --------------------------------------------------------------------------------------------------------


def _linear(product: Node, epilogue: Epilogue, places: dict[Node, int], shape: tuple[int, ...]) -> LibraryCall | None:
    """``mm`` or ``addmm`` by ``_linear_pointwise``, which takes the right operand transposed."""
    arguments: Any = product.args
    bias, left, right = arguments if product.target is aten.addmm.default else (None, *arguments)
    if any(n not in places for n in (left, right)) or any(product.kwargs.get(k, 1) != 1 for k in ("alpha", "beta")):
        return None
    if bias is not None and (bias not in places or bias.meta["val"].shape != product.meta["val"].shape[1:]):
        return None
    given, weight = left.meta["val"], right.meta["val"]
    if not _is_plain(given) or not (_is_plain(weight) or _is_plain(weight.t())):
        return None
    if bias is not None and not _is_plain(bias.meta["val"]):
        return None
    at, of, behind = places[left], places[right], places.get(bias)
    attribute, scalars, algorithm = epilogue.attribute, list(epilogue.scalars), epilogue.algorithm
    flat = tuple(product.meta["val"].shape)
    if epilogue.other is None:
        pointwise = mkldnn._linear_pointwise.default._op

        def called(*inputs: Tensor) -> tuple[Tensor, ...]:
            added = None if behind is None else inputs[behind]
            result = pointwise(inputs[at], inputs[of].t(), added, attribute, scalars, algorithm)
            return (result if shape == flat else result.view(shape),)

        return LibraryCall(_name(attribute), called)
    more = places[epilogue.other]
    binary = mkldnn._linear_pointwise.binary._op

    def summed(*inputs: Tensor) -> tuple[Tensor, ...]:
        added = None if behind is None else inputs[behind]
        result = binary(inputs[at], inputs[more].view(flat), inputs[of].t(), added, attribute)
        return (result if shape == flat else result.view(shape),)

    return LibraryCall(_name(attribute), summed)


def _convolution(
    product: Node, epilogue: Epilogue, places: dict[Node, int], shape: tuple[int, ...]
) -> LibraryCall | None:
    """A convolution of images, with what follows."""
    if len(product.args) != 9:
        return None
    arguments: Any = product.args
    image, weight, bias, stride, padding, dilation, transposed, _, groups = arguments
    operands = [n for n in (image, weight, bias) if n is not None]
    if epilogue == Epilogue() or transposed or product.meta["val"].dim() != 4 or shape != product.meta["val"].shape:
        return None
    if any(n not in places or not _is_plain(n.meta["val"]) for n in operands):
        return None
    at, of, behind = places[image], places[weight], places.get(bias)
    form = (padding, stride, dilation, groups)
    attribute, scalars, algorithm = epilogue.attribute, list(epilogue.scalars), epilogue.algorithm
    if epilogue.other is None:
        pointwise = mkldnn._convolution_pointwise.default._op

        def called(*inputs: Tensor) -> tuple[Tensor, ...]:
            added = None if behind is None else inputs[behind]
            return (pointwise(inputs[at], inputs[of], added, *form, attribute, scalars, algorithm),)

        return LibraryCall(_name(attribute), called)
    more = places[epilogue.other]
    binary = mkldnn._convolution_pointwise.binary._op

    def summed(*inputs: Tensor) -> tuple[Tensor, ...]:
        added = None if behind is None else inputs[behind]
        return (binary(inputs[at], inputs[more], inputs[of], added, *form, attribute, None, None, [], None),)

    return LibraryCall(_name(attribute), summed)


def _name(epilogue: str) -> str:
    return "onednn" if epilogue == "none" else f"onednn {epilogue}"


_READERS: dict[Any, Callable[..., LibraryCall | None]] = {
    aten.mm.default: _linear,
    aten.addmm.default: _linear,
    aten.convolution.default: _convolution,
}
