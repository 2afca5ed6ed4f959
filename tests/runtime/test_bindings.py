"""Operators are called by PyTorch's own functions where those make the same call, and by the overload elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from fuse.runtime.programs.bindings import fastest

aten = torch.ops.aten
FLOATS, PLACES = torch.empty(4, 4, device="meta"), torch.empty(4, 4, device="meta", dtype=torch.int64)

SAME: dict[str, tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = {
    "sort": (aten.sort.default, (FLOATS, -1), {}),
    "stable sort": (aten.sort.stable, (FLOATS,), {"stable": True, "dim": 0}),
    "scatter_add": (aten.scatter_add.default, (FLOATS, -1, PLACES, FLOATS), {}),
    "a value scattered": (aten.scatter.value, (FLOATS, -1, PLACES, 1.5), {}),
    "qr": (aten.linalg_qr.default, (FLOATS,), {}),
    "solve": (aten._linalg_solve_ex.default, (FLOATS, FLOATS), {}),
    "fft": (aten._fft_r2c.default, (FLOATS, [1], 0, True), {}),
    "cat": (aten.cat.default, ([FLOATS, FLOATS], 1), {}),
    "convolution": (aten.convolution.default, (FLOATS, FLOATS, None, [1], [0], [1], True, [0], 1), {}),
}
OTHERWISE: dict[str, tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = {
    "no function of this name": (aten.index.Tensor, (FLOATS, [PLACES]), {}),
    "None in a list": (aten.index_put.default, (FLOATS, [None, PLACES], FLOATS), {}),
    "it consists of others": (aten.argsort.default, (FLOATS, -1), {}),
    "without tensors": (aten.arange.default, (4,), {}),
    "a list is returned": (aten.split.Tensor, (FLOATS, 2), {}),
    "written to": (aten.add.out, (FLOATS, FLOATS), {"out": FLOATS}),
}


@pytest.mark.parametrize("name", SAME)
def test_the_function_of_the_same_call_is_found(name: str) -> None:
    operator, args, kwargs = SAME[name]
    assert fastest(operator, args, kwargs) is not operator._op


@pytest.mark.parametrize("name", OTHERWISE)
def test_the_overload_is_called_where_no_function_makes_the_same_call(name: str) -> None:
    operator, args, kwargs = OTHERWISE[name]
    assert fastest(operator, args, kwargs) is operator._op


def test_an_overload_is_not_mistaken_for_another_of_its_name() -> None:
    """``torch.add`` of a tensor and a number is ``add.Tensor``, as torch wraps the number."""
    assert fastest(aten.add.Scalar, (FLOATS, 1), {}) is aten.add.Scalar._op


def test_nothing_is_computed_to_find_out() -> None:
    given = torch.ones(4, 4)
    fastest(aten.fill.Scalar, (given, 7), {})
    assert fastest(aten.mul.Tensor, (given, given), {}) is torch.mul
    assert given.eq(1).all()
