"""Recipes of losses that look up the probability of a target.

nll_loss(p, target):    - w[target[n]] * p[n, target[n]]    summed over n, or that over the sum of the w[target[n]]

Where the target is ``ignore_index``, nothing is looked up, and nothing added.
"""

from __future__ import annotations

import operator

import torch

from fuse.kernel.dtypes import HALVES
from fuse.kernel.expressions import fn
from fuse.kernel.lookups import positions_of, table_of
from fuse.kernel.recipes import Call, Unsupported, apply, choice, convert, recipe
from fuse.kernel.reductions import SUM_DTYPE, total
from fuse.kernel.values import Constant, Gather, Value, view

NONE, MEAN = 0, 1
"""The numbers that stand for ``reduction="none"`` and ``"mean"``."""


@recipe("nll_loss_forward")
def nll_loss(call: Call) -> tuple[Value, Value | None]:
    """Of one or many rows; the second result, the sum of weights, is not made for ``reduction="none"``."""
    rows, target = table_of(call, "self"), positions_of(call.tensor("target"))
    shape, dtype, rank = target.shape, rows.dtype, len(rows.shape)
    if dtype in HALVES:
        raise Unsupported("a loss in half precision")
    if rank != len(shape) + 1:
        raise Unsupported("a loss of one row whose target is no number")
    given = Constant(shape, torch.int64, call["ignore_index"])
    ignored = apply(fn.equal, [target, given], torch.int64, shape)
    place = choice(ignored, Constant(shape, torch.int64, 0), target)
    picked = Gather(shape, dtype, rows, place, rank - 1, lambda index: index, lambda index: index, False)
    weights: Value = Constant(shape, dtype, 1.0)
    if call["weight"] is not None:
        weights = Gather(shape, dtype, table_of(call, "weight"), place, 0, lambda index: index, lambda index: (), False)
    nothing = Constant(shape, dtype, 0.0)
    losses = choice(ignored, nothing, apply(lambda p, weight: -p * weight, [picked, weights], dtype, shape))
    if call["reduction"] == NONE:
        return losses, None
    counted = total(choice(ignored, nothing, weights), range(len(shape)))
    summed = total(losses, range(len(shape)))
    if call["reduction"] == MEAN:
        summed = apply(operator.truediv, [summed, counted], SUM_DTYPE, summed.shape)
    return view(convert(summed, dtype), ()), view(convert(counted, dtype), ())
