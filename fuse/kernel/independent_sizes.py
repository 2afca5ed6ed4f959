"""Sizes of a region that are related in some calls only, so that its kernel takes each of them as an argument.

x [57, 77], pooled [28, 38]        in a call with even sizes, x would be twice as large as the result
part [56, 76] of x [57, 77]        its rows are 77 elements apart; they may be 76, or 80, apart in another call
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fuse.graph.strides import is_dense
from fuse.kernel.arithmetic.extents import LEAST_LOWERED, Conditions, plain, terms_of
from fuse.kernel.recipes.registry import bind
from fuse.kernel.sizes.region_text import parts_of
from fuse.kernel.sizes.shape_rules import RULES, name_of, shapes_in


def independent_sizes(region: GraphModule) -> frozenset[int]:
    """The sizes and strides of a region's tensors that may be related to others by chance."""
    return frozenset(divided_sizes(region) | distances(region))


def divided_sizes(region: GraphModule) -> set[int]:
    """The sizes of a region that its operators divide, and those that they compute so.

    Two calls may have them in one ratio by chance: a pool makes 28 of 57 pixels and 38 of 77. Then ``2 * pooled + 1``
    is the number of pixels, as long as it is odd.
    """
    found: set[int] = set()
    for node in region.graph.nodes:
        rule = RULES.get(name_of(node.target)) if isinstance(node.target, OpOverload) else None
        if rule is not None:
            conditions = Conditions(of_text=False, computed={})
            args, kwargs = _with_extents(list(node.args), conditions), _with_extents(node.kwargs, conditions)
            made = rule(bind(node.target, args, kwargs)) or ()
            if computed := [plain(size) for size in made if any("(" in f for of, _ in terms_of(size) for f in of)]:
                found.update(*shapes_in(args), computed)
    return set(map(plain, found))


def _with_extents(argument: Any, conditions: Conditions) -> Any:
    """An argument with a tuple of its shape in place of each tensor, in which all sizes vary that can."""
    if isinstance(argument, Node):
        shape = argument.meta["val"].shape
        return (tuple(n if n < LEAST_LOWERED else conditions.size(f"n{len(conditions.sizes)}", n) for n in shape),)
    if isinstance(argument, (tuple, list)):
        return [_with_extents(one, conditions) for one in argument]
    if isinstance(argument, dict):
        return {name: _with_extents(one, conditions) for name, one in argument.items()}
    return argument


def distances(region: GraphModule) -> set[int]:
    """The strides of inputs that leave gaps: each is a size of the tensor that the input is a part of, or of several
    such sizes the product."""
    found: set[int] = set()
    for node in region.graph.find_nodes(op="placeholder"):
        for value in parts_of(node.meta.get("val")):
            if isinstance(value, Tensor) and not is_dense(value):
                by_stride = sorted(zip(value.stride(), value.shape, strict=True))
                pairs = itertools.pairwise(by_stride)
                found.update(outer for (inner, size), (outer, _) in pairs if outer > inner * size)
    return found
