"""The operators that collect tensors into one: ``stack`` and ``cat``."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten

COLLECTORS = (aten.stack.default, aten.cat.default)


def pieces_of(collector: Node) -> list[Node]:
    """The tensors that ``collector`` puts one after another.

    >>> graph = torch.fx.Graph()
    >>> h1, h2 = graph.placeholder("h1"), graph.placeholder("h2")
    >>> pieces_of(graph.call_function(aten.stack.default, ([h1, h2], -1)))
    [h1, h2]
    """
    pieces: Any = collector.args[0]
    return list(pieces)


def dimension_of(collector: Node) -> int:
    """The dimension of the result along which the pieces lie, not negative.

    >>> graph = torch.fx.Graph()
    >>> stacked = graph.call_function(aten.stack.default, ([graph.placeholder("h")], -1))
    >>> stacked.meta["val"] = torch.empty(8, 1)
    >>> dimension_of(stacked)
    1
    """
    dim: Any = collector.args[1] if len(collector.args) > 1 else collector.kwargs.get("dim", 0)
    rank: int = collector.meta["val"].dim()
    return int(dim) % rank
