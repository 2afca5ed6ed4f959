"""Pools over small windows as elementwise kernels, and those that are left to PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fuse.check.oracle import check
from fuse.testing import assert_fuses
from tests.samples import Holder

POOLS = {
    "max": lambda x: F.max_pool2d(x, 2),
    "max, overlapping": lambda x: F.max_pool2d(x, 3, stride=2, padding=1),
    "max, dilated": lambda x: F.max_pool2d(x, (2, 3), stride=1, dilation=(3, 2)),
    "max, beyond the end": lambda x: F.max_pool2d(x, 3, stride=3, ceil_mode=True),
    "max of rows": lambda x: F.max_pool1d(x[0], 2),
    "max of boxes": lambda x: F.max_pool3d(x, 2),
    "mean": lambda x: F.avg_pool2d(x, 2),
    "mean with padding": lambda x: F.avg_pool2d(x, 3, stride=1, padding=1),
    "mean by a divisor": lambda x: F.avg_pool2d(x, 3, stride=2, padding=1, divisor_override=5),
    "mean of one row": lambda x: F.avg_pool1d(x[0], 4),
    "mean of boxes": lambda x: F.avg_pool3d(x, (1, 2, 2)),
    "mean of an image without batch": lambda x: F.avg_pool2d(x[0], 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (4, 3)),
}


@pytest.mark.parametrize("name", POOLS)
def test_a_pool_joins_what_follows(name: str) -> None:
    assert_fuses(Holder(lambda _, x: POOLS[name](x) * 2), torch.randn(2, 3, 12, 9), launches=1)


def test_the_maxima_of_integers() -> None:
    x = torch.arange(-60, 60, dtype=torch.int32).view(1, 2, 6, 10)
    assert_fuses(Holder(lambda _, x: F.max_pool2d(x, 3, 2, 1) * 2), x, launches=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_floats(dtype: torch.dtype) -> None:
    pools = Holder(lambda _, x: F.avg_pool2d(x, 2) + F.max_pool2d(x, 2))
    assert_fuses(pools, torch.randn(2, 3, 6, 8).to(dtype), launches=1)


LEFT = {
    "mean without padding in the count": lambda x: F.avg_pool2d(x, 3, padding=1, count_include_pad=False),
    "mean beyond the end": lambda x: F.avg_pool2d(x, 2, ceil_mode=True),
    "adaptive with windows of several sizes": lambda x: F.adaptive_avg_pool2d(x, (5, 3)),
    "a large window": lambda x: F.max_pool2d(x, 5),
    "positions": lambda x: F.max_pool2d(x, 2, return_indices=True)[1],
}


@pytest.mark.parametrize("name", LEFT)
def test_others_are_left_to_pytorch(name: str) -> None:
    assert_fuses(Holder(lambda _, x: LEFT[name](x) * 2), torch.randn(2, 3, 12, 9), launches=2)


def test_overlapping_windows_do_not_compute_what_they_read_again() -> None:
    assert_fuses(Holder(lambda _, x: F.max_pool2d(torch.tanh(x), 3, 1, 1)), torch.randn(1, 2, 8, 8), launches=2)


def test_what_is_no_number_stays_in_its_windows() -> None:
    x = torch.randn(1, 2, 8, 8)
    x[0, 0, 2, 3], x[0, 1, 5, 5], x[0, 1, :2, :2] = torch.nan, torch.inf, -torch.inf
    assert_fuses(Holder(lambda _, x: (F.max_pool2d(x, 2) * 2, F.avg_pool2d(x, 2) * 2)), x)


@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d])
def test_channels_side_by_side(pool: object) -> None:
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    assert_fuses(Holder(lambda _, x: pool(x, 2) * 2), x)


def test_gradients_find_the_maxima() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.Tanh())
    assert check(model, (torch.randn(1, 2, 8, 8, requires_grad=True),), train=True).passed


@settings(max_examples=8, deadline=None)
@given(
    taps=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padded=st.booleans(),
    size=st.tuples(st.integers(5, 9), st.integers(5, 9)),
    transposed=st.booleans(),
)
def test_any_window(
    taps: tuple[int, int], stride: tuple[int, int], padded: bool, size: tuple[int, int], transposed: bool
) -> None:
    padding = (taps[0] // 2, taps[1] // 2) if padded else 0

    def pools(_: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.max_pool2d(x, taps, stride, padding) + 1, F.avg_pool2d(x, taps, stride, padding) + 1

    x = torch.randn(2, 3, *size)
    assert_fuses(Holder(pools), x.mT if transposed else x)
