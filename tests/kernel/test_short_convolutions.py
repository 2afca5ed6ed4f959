"""Convolutions of a few taps in single channels are elementwise work; all others stay library calls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fuse.testing import assert_fuses


class Causal(nn.Module):
    """What stands in front of a state-space model: a causal convolution of every channel, then an activation."""

    def __init__(self, channels: int = 24, **options: int | bool) -> None:
        super().__init__()
        settings = {"kernel_size": 4, "groups": channels, "padding": 3, **options}
        self.convolution = nn.Conv1d(channels, channels, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(self.convolution(x.transpose(1, 2))[:, :, : x.shape[1]].transpose(1, 2))


def test_a_causal_convolution_runs_with_what_follows() -> None:
    assert_fuses(Causal(), torch.randn(3, 40, 24), launches=1, fired={"fuse_pointwise": 1})


def test_a_convolution_alone_is_one_kernel() -> None:
    class Alone(Causal):
        def forward(self, x: Tensor) -> Tensor:
            return self.convolution(x)

    assert_fuses(Alone(5, kernel_size=3, padding=1), torch.randn(2, 5, 9), launches=1)


@pytest.mark.parametrize(
    "options",
    [{"kernel_size": 5}, {"groups": 12}, {"groups": 1}],
    ids=["five taps", "two channels a group", "all channels"],
)
def test_near_misses_stay_library_calls(options: dict[str, int]) -> None:
    assert_fuses(Causal(**options), torch.randn(3, 40, 24), launches=2, fired={})


def test_several_results_a_channel_are_a_product_of_groups() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv1d(6, 12, 3, groups=6)

        def forward(self, x: Tensor) -> Tensor:
            return self.convolution(x).relu()

    assert_fuses(Doubled(), torch.randn(2, 6, 20), launches=1, fired={"fuse_pointwise": 0, "product_epilogues": 1})


@settings(max_examples=8, deadline=None)
@given(
    channels=st.sampled_from([1, 3, 17]),
    length=st.integers(7, 20),  # four taps, two apart, reach over seven
    taps=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 4),
    dilation=st.integers(1, 2),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_any_window_computes_what_eager_does(
    channels: int, length: int, taps: int, stride: int, padding: int, dilation: int, bias: bool, dtype: torch.dtype
) -> None:
    model = nn.Conv1d(
        channels, channels, taps, stride=stride, padding=padding, dilation=dilation, groups=channels, bias=bias
    )
    assert_fuses(nn.Sequential(model, nn.Tanh()).to(dtype), torch.randn(2, channels, length, dtype=dtype), launches=1)
