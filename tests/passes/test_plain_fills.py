"""Tensors of equal elements are written in one way, and equal to those of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuse.graph.function import Function

FILLS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros_like": torch.zeros_like,
    "ones_like of another dtype": lambda x: torch.ones_like(x, dtype=torch.int64),
    "full_like": lambda x: torch.full_like(x, -0.0),
    "new_zeros": lambda x: x.new_zeros(2, 5),
    "new_ones": lambda x: x.new_ones((), dtype=torch.bool),
    "new_full": lambda x: x.new_full((3,), float("nan")),
    "no elements": lambda x: x.new_full((0, 3), 1.0),
}
STAY: dict[str, Callable[[Tensor], Tensor]] = {
    "other strides": lambda x: torch.zeros_like(x.t()),
    "no number": lambda x: torch.empty_like(x).fill_(2.0),
    "random": torch.rand_like,
}


@pytest.mark.parametrize("name", FILLS)
def test_a_fill_reads_no_tensor(rewritten: Callable[..., Any], name: str) -> None:
    done = rewritten(Function(FILLS[name]), torch.randn(4, 3), passes=["plain_fills"])
    assert done.fired == {"plain_fills": 1}
    assert not done.graph.graph.find_nodes(op="placeholder")[0].users


@pytest.mark.parametrize("name", STAY)
def test_near_misses_stay(rewritten: Callable[..., Any], name: str) -> None:
    assert rewritten(Function(STAY[name]), torch.randn(4, 3), passes=["plain_fills"]).fired == {}
