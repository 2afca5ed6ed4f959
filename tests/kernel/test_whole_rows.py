from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuse
from fuse.graph.function import Function
from fuse.testing import assert_fuses


class Normed(nn.Module):
    """A product, the residual and its layer norm, as behind attention."""

    def __init__(self, depth: int = 48, columns: int = 40) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(depth, columns), nn.LayerNorm(columns)

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        return self.norm(self.linear(x) + r)


def test_a_layer_norm_joins_the_product_before_it() -> None:
    assert_fuses(Normed(), torch.randn(3, 33, 48), torch.randn(3, 33, 40), launches=1, fired={"product_epilogues": 1})


def test_doubles() -> None:
    assert_fuses(Normed().double(), torch.randn(64, 48).double(), torch.randn(64, 40).double(), launches=1)


def test_a_softmax_and_the_product_itself() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            y = x @ w
            return y.softmax(-1), y

    assert_fuses(Both(), torch.randn(70, 20), torch.randn(20, 50), launches=1)


def test_threads_share_rows() -> None:
    assert_fuses(Normed(130, 128), torch.randn(300, 130), torch.randn(300, 128), launches=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_in_its_row(value: float) -> None:
    x = torch.randn(64, 48)
    x[3, 5] = value
    assert_fuses(Normed(), x, torch.randn(64, 40), launches=1)


@settings(max_examples=8, deadline=None)
@given(rows=st.integers(64, 90), depth=st.integers(1, 40), columns=st.integers(2, 90), turned=st.booleans())
def test_any_shape(rows: int, depth: int, columns: int, turned: bool) -> None:
    class Softmax(nn.Module):
        def forward(self, x: Tensor, w: Tensor, r: Tensor) -> Tensor:
            return torch.softmax((x @ w) * 0.5 + r, -1) * r

    w = torch.randn(columns, depth).t() if turned else torch.randn(depth, columns)
    assert_fuses(Softmax(), torch.randn(rows, depth), w, torch.randn(columns), launches=1)


class OverRows(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).softmax(0)


class OverGroups(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).view(64, 4, 8).softmax(-1)


class Columns(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).softmax(-1)


@pytest.mark.parametrize(
    ("model", "rows", "depth", "reason"),
    [
        (OverRows(), 64, 16, "is not over its columns"),
        (OverGroups(), 64, 16, "is not over its columns"),
        (Columns(), 63, 16, "fewer than 64 rows"),
        (Columns(), 64, 4096, "too large"),
    ],
)
def test_near_misses_say_why(model: nn.Module, rows: int, depth: int, reason: str) -> None:
    report = assert_fuses(model, torch.randn(rows, depth), torch.randn(depth, 32) / depth**0.5, launches=2)
    assert any(reason in one.reason for one in report.rejected)


@pytest.mark.parametrize(
    "repeated",
    [
        lambda y, b: (y[None] + b[:, None, None]).softmax(-1),
        lambda y, b: nn.functional.layer_norm(y[None].expand(3, 64, 96) * b[:, None, None], (96,)),
        lambda y, b: (y.view(4, 16, 96)[:, None] + b[:, None, None]).softmax(-1).transpose(0, 1).contiguous(),
    ],
)
def test_a_product_that_is_repeated_in_what_is_reduced_stays_apart(repeated: Callable[..., Tensor]) -> None:
    model = Function(lambda x, w, b: repeated(x @ w, b))
    assert_fuses(model, torch.randn(64, 32), torch.randn(32, 96), torch.randn(3))


def test_rows_that_vary_have_one_kernel_however_few() -> None:
    """Also where a program for a size of its own has left such rows to the library before."""
    model, w = Columns(), torch.randn(16, 32) / 4
    with torch.no_grad():
        for rows in (9, 24):
            fuse.compile(model, dynamic_shapes=None)(torch.randn(rows, 16), w)
        fused = fuse.compile(model)
        for rows in (70, 40, 24, 9):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(fused(x, w), model(x, w), rtol=1e-4, atol=1e-5)
            assert fused.last_run is not None
            assert fused.last_run.launches == 1
