"""Convolutions that move one place at a time read a band of the image; what they may not is packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fuse.kernel.lower import Kernel
from fuse.testing import assert_fuses


def walks_a_band(lowered: Callable[..., Any], weight: Tensor, x: Tensor, **window: Any) -> bool:
    kernel = lowered(lambda x, w: torch.relu(F.conv2d(x, w, **window)), x, weight).kernel
    assert isinstance(kernel, Kernel), kernel
    return "fuse_windowed_product" in kernel.source


def test_patches_of_a_window_that_moves_by_one_are_not_packed(lowered: Callable[..., Any]) -> None:
    assert walks_a_band(lowered, torch.randn(8, 4, 3, 3), torch.randn(1, 4, 16, 30), padding=1)


@pytest.mark.parametrize(
    ("taps", "width", "window"),
    [
        ((3, 3), 30, {"stride": 2}),  # neighbouring places see elements two apart
        ((3, 3), 30, {"stride": (2, 1)}),
        ((1, 1), 30, {}),  # packed once for all channels, not once a tap
        ((3, 3), 9, {}),  # seven places of a row, in panels of sixteen
    ],
)
def test_others_are_packed(
    lowered: Callable[..., Any], taps: tuple[int, int], width: int, window: dict[str, Any]
) -> None:
    assert not walks_a_band(lowered, torch.randn(8, 4, *taps), torch.randn(1, 4, 16, width), **window)


def test_a_band_that_no_cache_holds_is_packed(lowered: Callable[..., Any]) -> None:
    assert not walks_a_band(lowered, torch.randn(2, 1024, 3, 3), torch.randn(1, 1024, 4, 130), padding=1)


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 13, 14)),  # two places of a panel are in no row
        (nn.Conv2d(5, 7, (3, 5), padding=(0, 4), dilation=(2, 1)), (3, 5, 30, 28)),
        (nn.Conv1d(6, 9, 5, padding=2), (2, 6, 200)),  # one row of many panels
        (nn.Conv2d(3, 8, 3, padding=6), (1, 3, 3, 22)),  # rows that see padding alone
        (nn.Conv2d(200, 20, 3), (1, 200, 8, 18)),  # deeper than is added up at once
        (nn.Conv2d(16, 40, 3, padding=1), (4, 16, 32, 32)),  # shared out to threads
    ],
)
def test_values(convolution: nn.Module, shape: tuple[int, ...]) -> None:
    with torch.no_grad():
        assert_fuses(nn.Sequential(convolution, nn.ReLU()), torch.randn(shape), launches=1)


def test_doubles() -> None:
    with torch.no_grad():
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()).double()
        assert_fuses(model, torch.randn(2, 3, 7, 16).double(), launches=1)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_window(data: st.DataObject) -> None:
    draw = data.draw
    taps, dilation = (
        (draw(st.integers(1, 4)), draw(st.integers(2, 4))),
        (draw(st.integers(1, 2)), draw(st.integers(1, 2))),
    )
    padding = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    width = draw(st.sampled_from([13, 16, 30, 45])) + dilation[1] * (taps[1] - 1) - 2 * padding[1]
    height = draw(st.integers(1, 9)) + dilation[0] * (taps[0] - 1)
    inner = nn.Conv2d(draw(st.integers(1, 4)), draw(st.integers(1, 20)), taps, 1, padding, dilation)
    with torch.no_grad():
        x = torch.randn(draw(st.integers(1, 3)), inner.in_channels, width, height).transpose(2, 3)
        assert_fuses(nn.Sequential(inner, nn.ReLU()), x)
