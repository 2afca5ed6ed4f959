"""Domains: the index ranges of a node's loops. Fusion passes decide by them which nodes may share a kernel.

add   [64, 768]           points 49152, rows -
sum   [64, 768] -> [64]   points 49152, rows 64
softmax(dim=-1)           points 49152, rows 64
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor
from torch.fx import Node

from fuse import ops
from fuse.kernel.arithmetic.dtypes import supported
from fuse.kernel.kernel import Declined
from fuse.kernel.lower import can_lower, values_of_call
from fuse.kernel.nests.multi_stage import TOO_MANY, too_many
from fuse.kernel.recipes.products import products_below
from fuse.kernel.traversals import reductions_below, within_stage
from fuse.kernel.values import Concat, Gather

MAX_INLINED = 6
"""Most cheap operators that are computed again for every row instead of being stored once."""
MOST_LOOPS = 48
"""Most reductions times parts of concatenations, each of which becomes a loop. Steps that write a row of one tensor and
reduce all of it: 16 in one kernel (768) took GCC 12 s, in kernels of four (48) 3 s."""
DIFFERENT = "their loops run over different numbers of elements"


@dataclass(frozen=True)
class Domain:
    """The loops of one or several nodes.

    Attributes:
        points: elements that the widest loop runs over.
        rows: results of a reduction; None without a reduction.
        cheap: whether all operators cost a few cycles, so that they may be computed again.
        size: number of operators.
        pieces: ``"none"`` unless the domain ends in a concatenation; ``"inside"`` if costly operators that compute a
            piece are in the kernel, else ``"apart"``. A kernel computes each piece in a loop of its own until something
            in the kernel reads the whole.
        rows_again: results of a second reduction, over the rows (:mod:`fuse.kernel.nests.multi_stage`); None without
        one. looks_up: whether a reduction reads a table by positions. reductions: upper bound of the number of
        reductions. cuts: number of parts of all concatenations (a write of a row into a tensor has three).
    """

    points: int
    rows: int | None
    cheap: bool
    size: int
    pieces: Literal["none", "apart", "inside"] = "none"
    rows_again: int | None = None
    looks_up: bool = False
    reductions: int = 0
    cuts: int = 0


def domain_of(node: Node) -> Domain | Declined:
    """The domain of one operator, or the reason why it has no kernel."""
    if not can_lower(node):
        return Declined(f"{node.target} has no kernel")
    value = node.meta["val"]
    known = ops.info(node.target)
    if known is not None and known.launches == 0:
        return Declined(f"{node.target} launches nothing")
    if known is not None and known.elementwise and isinstance(value, Tensor):
        if not supported(value.dtype):
            return Declined(f"dtype {value.dtype} is not supported in kernels")
        return Domain(value.numel(), None, known.cheap, 1)
    results = values_of_call(node)
    if isinstance(results, Declined):
        return results
    if products_below(results):
        return Declined(f"{node.target} is a product, which has loops of its own")
    reductions = reductions_below(results)
    if not reductions:
        points = max(math.prod(r.shape) for r in results)
        cheap = known is not None and (known.cheap or known.kind == "convolution")  # no product: it has few taps
        if isinstance(results[0], Concat):
            return Domain(points, None, cheap, 1, "apart", cuts=len(results[0].pieces))
        return Domain(points, None, cheap, 1)
    widest = max(reductions, key=lambda r: math.prod(r.source.shape))
    points = math.prod(widest.source.shape)
    looks_up = any(isinstance(value, Gather) for value in within_stage(results, through_reductions=True))
    return Domain(points, math.prod(widest.shape), False, 1, looks_up=looks_up, reductions=len(reductions))


def join(earlier: Domain, later: Domain) -> Domain | str:
    """The domain of one kernel for both, where ``later`` reads ``earlier``; or the reason why they stay apart."""
    joined = _join(earlier, later)
    if isinstance(joined, str):
        return joined
    reductions = earlier.reductions + later.reductions
    if joined.rows_again is not None and joined.rows is not None and too_many(joined.rows, reductions):
        return TOO_MANY
    cuts = earlier.cuts + later.cuts
    if reductions * cuts > MOST_LOOPS:
        return (
            f"the kernel would have {reductions} reductions over {cuts} parts of tensors, each with a loop of its own"
        )
    return replace(joined, reductions=reductions, cuts=cuts)


def _join(earlier: Domain, later: Domain) -> Domain | str:
    """``join`` without the limit on results that a reduction of reductions holds."""
    cheap, size = earlier.cheap and later.cheap, earlier.size + later.size
    if earlier.pieces == "inside":
        return "a costly piece of a concatenation would be computed again for elements of other pieces"
    if earlier.rows_again is not None or later.rows_again is not None:
        return _join_multi_stage(earlier, later)
    if earlier.points == later.points:
        if None not in (earlier.rows, later.rows) and earlier.rows != later.rows:
            return "their reductions leave different numbers of rows"
        rows = earlier.rows if later.rows is None else later.rows
        return Domain(earlier.points, rows, cheap, size, looks_up=earlier.looks_up or later.looks_up)
    if earlier.rows is not None and later.rows is None and later.points == earlier.rows:
        return replace(earlier, size=size)
    if later.rows is not None and earlier.rows is None and earlier.points == later.rows:
        return replace(later, size=size)
    if earlier.points < later.points and earlier.rows is None:
        if later.pieces != "none":
            return Domain(later.points, None, cheap, size, later.pieces if earlier.cheap else "inside")
        if earlier.cheap and earlier.size <= MAX_INLINED:
            return Domain(later.points, later.rows, cheap, size)
        return "a costly value would be computed again for every element it is broadcast to"
    if earlier.points > later.points and earlier.rows is None and later.rows is None:
        if earlier.cheap and earlier.size <= MAX_INLINED:  # ``later`` reads parts of it, through slices
            return Domain(later.points, None, cheap, size)
        return "a costly value would be computed in the kernels that read parts of it"
    if later.rows is not None and later.points == earlier.rows and not later.looks_up:
        return Domain(earlier.points, earlier.rows, cheap, size, rows_again=later.rows)
    return DIFFERENT


def _join_multi_stage(earlier: Domain, later: Domain) -> Domain | str:
    """``_join`` where at least one of them contains a reduction of reductions."""
    size = earlier.size + later.size
    if later.rows_again is None:
        on_rows = later.points == earlier.rows and later.rows in (None, earlier.rows_again)
        alike = on_rows or (later.points == earlier.rows_again and later.rows is None)
        return replace(earlier, size=size) if alike and not later.looks_up else DIFFERENT
    on_rows = earlier.points == later.rows and earlier.rows in (None, later.rows_again)
    alike = on_rows or (earlier.points == later.points and earlier.rows in (None, later.rows))
    return replace(later, size=size) if alike and earlier.rows_again in (None, later.rows_again) else DIFFERENT
