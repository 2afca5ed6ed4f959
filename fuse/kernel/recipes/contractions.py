"""Matrix products as sums of products, for operands that change from step to step of a loop.

    bmm(a, b)[i, m, n]     ->     Reduce(sum over k, a[i, m, k] * b[i, k, n])

The sum is a reduction like any other, in a nest of its own. Its innermost loop is the one along which the operands are
contiguous, and is vectorised: ``n`` (an accumulator for each), ``k`` (one sum) or ``m``. An outer product (``k`` is 1)
has nothing to sum and is elementwise.

Large products with a weight that is the same in every step are faster packed (:mod:`fuse.kernel.loops.loop_products`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping

import torch

from fuse.graph.strides import inverse
from fuse.kernel.arithmetic.dtypes import register
from fuse.kernel.arithmetic.extents import is_one
from fuse.kernel.arithmetic.index import Affine
from fuse.kernel.memory_order import reads_of
from fuse.kernel.recipes.registry import Number, Unsupported, apply, convert
from fuse.kernel.values import Reduce, Value, expand, permute, view

FULL_VECTOR = 16
"""Iterations that fill a vector register: 16 float32 in 512 bits."""


def product(left: Value, right: Value, keep: Callable[[Value], Value]) -> Value:
    """``left[..., m, k] @ right[..., k, n]``; both have the same leading dimensions.

    ``keep`` gets the sums, their dimensions in the order of the loops, and returns the value to use in their place (for
    instance the same sums in memory). Sums and result have the element type, float32 for bfloat16 and float16; integers
    wrap around.

    Raises:
        Unsupported: the product is of booleans, which eager rejects too.
    """
    *batch, rows, depth = left.shape
    columns = right.shape[-1]
    dtype = left.dtype
    wide = register(dtype)
    if dtype is torch.bool:
        raise Unsupported("the product is of booleans")
    left, right = convert(left, wide), convert(right, wide)
    full = (*batch, rows, depth, columns)
    spread_left = expand(view(left, (*left.shape, 1)), full)
    spread_right = expand(view(right, (*batch, 1, depth, columns)), full)
    terms = apply(operator.mul, [spread_left, spread_right], wide, full)
    if is_one(depth):
        return view(terms, (*batch, rows, columns))
    at = len(batch)
    order = [*range(at), *(at + d for d in loop_order(left, right))]
    summed = order.index(at + 1)
    turned = permute(terms, order)
    shape = (*turned.shape[:summed], 1, *turned.shape[summed + 1 :])
    total = keep(Reduce(shape, wide, turned, (summed,), "sum"))
    back = permute(total, inverse(order))
    return view(back, (*batch, rows, columns))


def added(product: Value, addend: Value, alpha: Number, beta: Number) -> Value:
    """``alpha * product + beta * addend``; with ``beta`` 0 the addend is not read, so that its NaNs do not count."""
    dtype, shape = product.dtype, product.shape
    if alpha != 1:
        product = apply(operator.mul, [product, alpha], dtype, shape)
    if beta == 0:
        return product
    addend = convert(addend, dtype)
    if beta != 1:
        addend = apply(operator.mul, [addend, beta], dtype, addend.shape)
    return apply(operator.add, [product, addend], dtype, shape)


def loop_order(left: Value, right: Value) -> tuple[int, int, int]:
    """The loops over rows (0), depth (1) and columns (2), outermost first.

    The innermost loop is the one along which most elements of the operands are adjacent in memory.
    """
    rows, depth = left.shape[-2:]
    columns = right.shape[-1]
    side_by_side = [0.0, 0.0, 0.0]
    for value, (first, second) in ((left, (0, 1)), (right, (1, 2))):
        for dim, number in elements_side_by_side(value).items():
            side_by_side[first if dim == 0 else second] += number
    extents = (rows, depth, columns)
    useful = [min(e, FULL_VECTOR) * number for e, number in zip(extents, side_by_side, strict=True)]
    innermost = max((2, 1, 0), key=lambda loop: useful[loop])
    return {2: (0, 1, 2), 1: (0, 2, 1), 0: (2, 1, 0)}[innermost]


def times_computed(left: Value, right: Value) -> tuple[int, int]:
    """Cost factor of each operand that these loops compute rather than read from memory: computations of an element.

    An operand is computed anew in each iteration of the loop that it lacks, if that loop is outside of the depth loop.
    Otherwise it is computed once; but an operand that lacks the innermost loop is computed as a scalar, which costs as
    much as :data:`FULL_VECTOR` elements in a vector.
    """
    rows, columns = left.shape[-2], right.shape[-1]
    order = loop_order(left, right)
    left_alone, right_alone = (FULL_VECTOR if order[-1] == loop else 1 for loop in (2, 0))
    again_left = columns if order.index(2) < order.index(1) else left_alone
    return again_left, rows if order.index(0) < order.index(1) else right_alone


def elements_side_by_side(value: Value) -> Mapping[int, int]:
    """Elements read with stride one along each of the last two dimensions, which are the keys 0 and 1."""
    atoms = [f"d{d}" for d in range(len(value.shape))]
    extents = dict(zip(atoms, value.shape, strict=True))
    found = {0: 0, 1: 0}
    for _, where in reads_of(value, tuple(Affine.of(a) for a in atoms), extents):
        for number, atom in enumerate(atoms[-2:]):
            if where.coefficient(atom) == 1:
                found[number] += math.prod(extents[a] for a in atoms[-2:] if where.coefficient(a))
    return found
