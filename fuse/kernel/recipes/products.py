"""The recipes of matrix products, and queries about the products of a region.

Their loops are chosen by the target, because panels, tiles and caches differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuse.kernel.recipes import contractions
from fuse.kernel.recipes.registry import Call, Unsupported, convert, recipe
from fuse.kernel.traversals import children, within_stage
from fuse.kernel.values import Product, Reduce, Value

PRODUCT_TYPES = (torch.float32, torch.float64)


_OPERANDS = {
    "mm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "bmm": ("self", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}


@recipe(*_OPERANDS)
def matrix_product(call: Call) -> Value:
    """``left @ right`` of matrices or batches of them, plus a bias for ``addmm`` and ``baddbmm``."""
    left, right = map(call.tensor, _OPERANDS[call.op._schema.name.removeprefix("aten::")])
    if call.dtype not in PRODUCT_TYPES:
        raise Unsupported(f"products of {call.dtype} are left to the library")
    product: Value = Product(call.shape, call.dtype, left, right)
    if "beta" not in call.arguments:
        return product
    return convert(
        contractions.added(product, call.tensor("self"), call["alpha"], call["beta"]),
        call.dtype,
    )


def products_below(values: Sequence[Value]) -> list[Product]:
    """All products below ``values``."""
    return [v for v in within_stage(values, through_reductions=True) if isinstance(v, Product)]


def is_reduced(value: Value) -> bool:
    """Whether there is a reduction between ``value`` and the products below it."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        current = stack.pop()
        if isinstance(current, Reduce):
            return True
        if id(current) not in seen and not isinstance(current, Product):
            seen.add(id(current))
            stack.extend(children(current))
    return False
