"""The recipe of attention: two products and a softmax between them."""

from __future__ import annotations

import functools
import math
import operator

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from fuse.devices import HOST
from fuse.kernel.recipes.products import PRODUCT_TYPES
from fuse.kernel.recipes.reductions import softmax_or_zeros
from fuse.kernel.recipes.registry import Call, Unsupported, apply, recipe
from fuse.kernel.values import Product, Value, expand, permute, view

LONGEST_VECTOR = 64
"""Numbers in the longest vector of a processor: 2,048 bits."""


@recipe("_scaled_dot_product_flash_attention_for_cpu")
def scaled_dot_product_attention(call: Call) -> tuple[Value, None]:
    """``softmax(query @ key.T * scale + mask) @ value`` for [batch, heads, length, depth].

    A query whose keys are all masked gets zeros. Several query heads may share one head of keys and values
    (grouped-query attention). The second result, the log-sum-exp of each query, is not computed.
    """
    query, key, value = map(call.tensor, ("query", "key", "value"))
    if call["is_causal"]:
        raise Unsupported("causal attention is left to ATen's kernel, which skips half of the keys")
    if call.dtype not in PRODUCT_TYPES:
        raise Unsupported(f"products of {call.dtype} are left to the library")
    (batch, heads, rows, depth), length = query.shape, key.shape[2]
    keys, values = (_of_heads(shared, heads) for shared in (key, value))
    product = Product((batch * heads, rows, length), call.dtype, _images(query), permute(keys, (0, 2, 1)))
    scale = 1 / math.sqrt(depth) if call["scale"] is None else call["scale"]
    scores = apply(operator.mul, [product, scale], call.dtype, product.shape)
    scores = view(scores, (batch, heads, rows, length))
    if call["attn_mask"] is not None:
        mask = call.tensor("attn_mask")
        if mask.dtype != call.dtype:
            raise Unsupported(f"a mask of {mask.dtype} is added to scores of {call.dtype}")
        scores = apply(operator.add, [scores, mask], call.dtype, scores.shape)
    fewest = fewest_keys_for_nan(call.op, call.dtype) if call["attn_mask"] is None else 0
    weights = _images(softmax_or_zeros(scores, -1, fewest))
    return view(Product((batch * heads, rows, value.shape[3]), call.dtype, weights, values), call.shape), None


@functools.cache
def fewest_keys_for_nan(op: OpOverload, dtype: torch.dtype) -> int:
    """The fewest keys over which ATen's kernel gives NaN for a query of NaN, without a mask; over fewer it gives zeros.

    It searches for the largest score in whole vectors, which keep NaN, and passes over NaN in the rest. How long its
    vectors are depends on the processor and on ``ATEN_CPU_CAPABILITY``.
    """
    with _disable_current_modes(), torch.no_grad():
        query = torch.full((1, 1, 1, 1), math.nan, dtype=dtype, device=HOST)
        for keys in (1 << power for power in range(LONGEST_VECTOR.bit_length())):
            given = torch.ones(1, 1, keys, 1, dtype=dtype, device=HOST)
            if op(query, given, given)[0].isnan().item():
                return keys
    raise Unsupported("ATen's attention gives zeros for a query of NaN here, and a generated kernel gives NaN")


def _images(value: Value) -> Value:
    """``[batch, heads, length, depth]`` viewed as ``[batch * heads, length, depth]``."""
    batch, heads, *matrix = value.shape
    return view(value, (batch * heads, *matrix))


def _of_heads(shared: Value, heads: int) -> Value:
    """Keys or values as ``[batch * heads, length, depth]``, each repeated for the query heads that share it."""
    batch, own, *matrix = shared.shape
    if heads % own:
        raise Unsupported(f"{heads} heads of queries cannot share {own} of keys")
    spread = expand(view(shared, (batch, own, 1, *matrix)), (batch, own, heads // own, *matrix))
    return view(spread, (batch * heads, *matrix))
