"""Matrix products in a loop step: with a weight that is the same in every step, a packed product; else a plain sum.

addmm(b, h, W.t())        ->   StepProduct(h, W), its result plus b
bmm(q, k)                 ->   Reduce(sum, q * k)                        (:mod:`fuse.kernel.recipes.contractions`)
convolution(h, W)         ->   StepProduct(patches of h, W)              (:mod:`fuse.kernel.recipes.convolutions`)
its gradient of W         ->   Reduce(sum, gradient * patches of h)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from fuse.kernel.arithmetic.dtypes import register
from fuse.kernel.loops.loop_stages import StepProduct, StepReader
from fuse.kernel.names import plain_name
from fuse.kernel.placement import StridedPlace, placement
from fuse.kernel.recipes import contractions, convolutions
from fuse.kernel.recipes.registry import Unsupported, apply, convert
from fuse.kernel.traversals import WORTH_KEEPING, cost_within_stage
from fuse.kernel.values import Input, Value, permute, view

aten = torch.ops.aten

MANY_ROWS = 16
"""Rows from which the limits below apply; with fewer, the loop's kernel computes products of any size."""
MOST_UNPACKED = 1 << 18
"""Most multiplications in a product of two values that change from step to step. With 128 rows, columns and terms of a
sum, the library takes half the time of the loop's kernel; with 64, it takes 1.4 times as long, its call included."""
MOST_UNPACKED_OF_BATCH = 1 << 21
"""The same limit for a batch of products. Attention layers (12 heads, 64 wide) take 1.3 times as long in a loop's
kernel as in kernels of their own at 128 tokens, 2.1 times at 384."""

LONGEST_CHAIN = 128
"""Most terms that are added one after another where there is a choice. With 1,024 terms the error against float64 is
twice that of eager, with 256 it is 1.2 times."""

FACTORS: dict[Any, tuple[str, str]] = {
    aten.mm.default: ("self", "mat2"),
    aten.addmm.default: ("mat1", "mat2"),
    aten.bmm.default: ("self", "mat2"),
    aten.baddbmm.default: ("batch1", "batch2"),
    aten.mv.default: ("self", "vec"),
    aten.addmv.default: ("mat", "vec"),
    aten.dot.default: ("self", "tensor"),
}
"""By matrix product operator: the argument names of both factors. A ``self`` that is no factor is the addend."""


def product_of(reader: StepReader, node: Node, bound: Mapping[str, Any]) -> Value:
    """The value of an operator in ``FACTORS``; ``bound`` are its arguments by name."""
    first, second = FACTORS[node.target]
    left, right, shape = bound[first], bound[second], tuple(node.meta["val"].shape)
    if len(right.shape) == 1:  # a matrix (or a vector) times a vector: the vector as one row on the left
        rows = left if len(left.shape) == 2 else view(left, (1, *left.shape))
        left, right = view(right, (1, *right.shape)), permute(rows, (1, 0))
    product = view(_product(reader, node, left, right), shape)
    if "beta" in bound:
        product = contractions.added(product, bound["self"], bound["alpha"], bound["beta"])
    return convert(product, node.meta["val"].dtype)


def convolution_of(reader: StepReader, node: Node, bound: Mapping[str, Any]) -> Value:
    """The value of a convolution; ``bound`` are its arguments by name."""
    x, weight, bias, groups = bound["input"], bound["weight"], bound["bias"], bound["groups"]
    held = node.meta["val"]
    if len(x.shape) != len(weight.shape):
        raise Unsupported("the image of the convolution has no batch dimension")
    if bound["transposed"]:
        raise Unsupported("the transposed convolution has a stride")
    batch, _, *output_size = held.shape
    window = convolutions.Window.of(bound, len(output_size))
    left = convolutions.patches(x, window, weight.shape[2:], output_size, groups)
    right = convolutions.weights(weight, groups)
    if groups == 1:
        left, right = view(left, left.shape[1:]), view(right, right.shape[1:])
    product = _product(reader, node, left, right)
    result = convolutions.as_image(view(product, (groups, left.shape[-2], right.shape[-1])), batch, output_size)
    if bias is not None:
        column = convert(view(bias, (*bias.shape, *(1 for _ in output_size))), result.dtype)
        result = apply(operator.add, [result, column], result.dtype, result.shape)
    return convert(result, held.dtype)


def gradient_of_convolution(reader: StepReader, node: Node, bound: Mapping[str, Any]) -> tuple[Value | None, ...]:
    """The gradient of a weight that differs from step to step; ``bound`` are the arguments by name."""
    if list(bound["output_mask"]) != [False, True, False]:
        raise Unsupported("the gradients of an image and a bias are left to the library")
    gradient, image, weight, groups = bound["grad_output"], bound["input"], bound["weight"], bound["groups"]
    if len(image.shape) != len(weight.shape):
        raise Unsupported("the image of the convolution has no batch dimension")
    if bound["transposed"]:
        raise Unsupported("the transposed convolution has a stride")
    window = convolutions.Window.of(bound, len(weight.shape) - 2)
    batch, outputs, *pixels = gradient.shape
    each = view(gradient, (batch, groups, outputs // groups, math.prod(pixels)))
    left = view(permute(each, (1, 2, 0, 3)), (groups, outputs // groups, batch * math.prod(pixels)))
    right = convolutions.patches(image, window, weight.shape[2:], pixels, groups)
    if groups == 1:
        left, right = view(left, left.shape[1:]), view(right, right.shape[1:])
    return None, convert(view(_product(reader, node, left, right), weight.shape), weight.dtype), None


def _product(reader: StepReader, node: Node, left: Value, right: Value) -> Value:
    """``left @ right``, a stage of its own where one of them is a weight, else a sum of products."""
    if matrix := _weight(reader, right):
        return _product_with_weight(reader, node, left, matrix, right.shape[1])
    if len(left.shape) == 2 and (matrix := _weight(reader, permute(left, (1, 0)))):
        result = _product_with_weight(reader, node, permute(right, (1, 0)), matrix, left.shape[0])
        return permute(result, (1, 0))
    most = MOST_UNPACKED_OF_BATCH if node.target in (aten.bmm.default, aten.baddbmm.default) else MOST_UNPACKED
    if left.shape[-2] >= MANY_ROWS and math.prod(left.shape) * right.shape[-1] > most:
        raise Unsupported("a large product without a weight is faster outside of the loop's kernel")
    name = f"{plain_name(node.name)}_sums"
    left, right = _along_vectors(reader, left, right, plain_name(node.name))
    again = contractions.times_computed(left, right)
    left, right = (
        reader.keep(operand, f"{plain_name(node.name)}_{side}") if _worth_keeping(operand, times) else operand
        for operand, side, times in zip((left, right), ("left", "right"), again, strict=True)
    )
    return contractions.product(
        left, right, lambda sums: reader.keep(sums, name) if reader.cut == "reductions" else sums
    )


def _along_vectors(reader: StepReader, left: Value, right: Value, name: str) -> tuple[Value, Value]:
    """The factors of a product, one of them transposed in memory where the innermost loop would be the sum.

    A loop over the sum adds across vectors or gathers terms. The transposed factor makes the longer of rows and columns
    contiguous, so that it is the innermost loop. Sums longer than ``LONGEST_CHAIN`` stay innermost, because adding
    across vectors rounds less; then both factors are made contiguous along the sum.
    """
    (rows, depth), columns = left.shape[-2:], right.shape[-1]
    if min(rows, columns) < contractions.FULL_VECTOR or contractions.loop_order(left, right)[-1] != 1:
        return left, right
    if depth > LONGEST_CHAIN:
        left_lies, right_lies = (
            contractions.elements_side_by_side(value)[dim] for value, dim in ((left, 1), (right, 0))
        )
        return (
            left if left_lies else reader.keep(left, f"{name}_left"),
            right if right_lies else _turned(reader.keep(_turned(right), f"{name}_right")),
        )
    if columns >= rows:
        return left, reader.keep(right, f"{name}_right")
    return _turned(reader.keep(_turned(left), f"{name}_left")), right


def _turned(value: Value) -> Value:
    """``value`` with its last two dimensions swapped."""
    last = len(value.shape) - 1
    return permute(value, (*range(last - 1), last, last - 1))


def _weight(reader: StepReader, value: Value) -> StridedPlace | None:
    """The placement in memory of a floating-point matrix that is the same in every step; None for any other value."""
    if len(value.shape) != 2 or not value.dtype.is_floating_point:
        return None
    found = placement(value)
    first = reader.spec.carries + len(reader.spec.step_inputs)
    return found if found and first <= found.source.position < reader.operands else None


def _product_with_weight(reader: StepReader, node: Node, left: Value, weight: StridedPlace, columns: int) -> Input:
    left = _factor(reader, left, f"{plain_name(node.name)}_left")
    strides = (reader.packing.padded(columns), 1)
    name = reader.name(f"{plain_name(node.name)}_sums")
    result = reader.input((left.shape[0], columns), left.dtype, strides, name)
    reader.stages.append(StepProduct(left, weight, result))
    return result


def _factor(reader: StepReader, value: Value, name: str) -> Input:
    """``value`` in memory as the left operand of packed products: float32 or float64, rows contiguous, stored once."""
    wide = register(value.dtype)
    if isinstance(value, Input) and value.dtype == wide and value.strides[1] == 1:
        return value
    if id(value) not in reader.factors:
        reader.factors[id(value)] = (value, reader.keep(convert(value, wide), name))
    return reader.factors[id(value)][1]


def _worth_keeping(value: Value, times: int) -> bool:
    """Whether to store a value whose elements would otherwise be computed ``times`` times."""
    return (times - 1) * cost_within_stage(value) >= WORTH_KEEPING
