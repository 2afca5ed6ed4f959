"""Pieces of an assembled tensor (a concatenation) that regions write in place, without a copy.

%a = getitem(%region, 0)                              region writes the first rows of c
%b = getitem(%other, 0)                         ->    other writes the last rows of c
%c = fuse.assemble([%a, %b], 0)                       nothing left to do
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.graph.outputs import outputs_of

ASSEMBLE = torch.ops.fuse.assemble.default
assert ops.info(ASSEMBLE), "importing fuse.ops defines the operator"


def placed_pieces(graph: GraphModule) -> dict[Node, tuple[Node, int]]:
    """By piece: the assembled tensor that a region can write it into, and its offset there in elements."""
    found = {}
    for node in graph.graph.nodes:
        if node.target is ASSEMBLE:
            for piece, offset in piece_offsets(node):
                if _is_only_result(piece) and piece.meta["val"].dtype == node.meta["val"].dtype:
                    found[piece] = node, offset
    return found


def _is_only_result(piece: Node) -> bool:
    if piece.target is not operator.getitem or len(piece.users) > 1:
        return False
    region, index = piece.args
    if not isinstance(region, Node) or region.op != "call_module":
        return False
    module = region.graph.owning_module.get_submodule(str(region.target))  # type: ignore[union-attr]  # a graph of a module
    if not isinstance(module, GraphModule) or module.meta.get("kind") != "region":
        return False
    results = outputs_of(module.graph)
    return sum(user.args[1] == index for user in region.users) == 1 and results.count(results[cast(int, index)]) == 1


def piece_offsets(assemble: Node) -> list[tuple[Node, int]]:
    """All pieces of an assembled tensor with their offsets, in elements."""
    pieces: Any = assemble.args[0]
    dim: Any = assemble.args[1]
    stride = assemble.meta["val"].stride()[dim]
    offsets: list[tuple[Node, int]] = []
    position = 0
    for piece in pieces:
        offsets.append((piece, position * stride))
        position += piece.meta["val"].shape[dim]
    return offsets
