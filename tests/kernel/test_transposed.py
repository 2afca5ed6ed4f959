"""Transposed convolutions, a convolution for each phase of the stride: values at every window, group and size."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fuse
from fuse.kernel.cpu.prelude import prelude, text_of_headers
from fuse.runtime.cpu import compiler, processor
from fuse.testing import assert_fuses
from tests.kernel.test_windows import in_one_kernel

UP1, UP2 = nn.ConvTranspose1d, nn.ConvTranspose2d


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("up", "shape"),
    [
        (UP2(16, 40, 3, 2, 1, 1), (4, 16, 16, 16)),
        (UP2(8, 7, 2, 2), (2, 8, 9, 30)),
        (UP2(8, 7, 4, 2, 1), (2, 8, 9, 30)),
        (UP2(8, 7, 3, 2, 2), (2, 8, 9, 30)),  # the image is not padded
        (UP2(4, 9, (2, 5), (3, 1), (0, 4), (1, 0)), (2, 4, 5, 6)),  # along one dimension there is one phase
        (UP2(4, 9, 1, 3, output_padding=2), (2, 4, 5, 6)),  # phases without taps
        (UP2(4, 9, 3, 2, 3, 1, dilation=3), (2, 4, 7, 40)),
        (UP2(4, 9, 3, 3, 4, 2, dilation=(4, 3)), (2, 4, 7, 40)),
        (UP2(4, 9, 2, 4, 5), (2, 4, 7, 40)),  # pixels that no place reads
        (UP2(3, 1, 4, 2, 1), (2, 3, 33, 33)),  # one output: blocks of many panels
        (UP2(6, 9, 3, 2, 1, groups=3), (2, 6, 9, 30)),
        (UP2(6, 6, 3, 2, 1, groups=6), (2, 6, 9, 30)),
        (UP2(150, 8, 3, 2, 1), (1, 150, 40, 40)),  # deeper than is added up at once; bands of rows, the last of fewer
        (UP2(64, 70, 3, 2, 1), (1, 64, 7, 7)),  # outputs shared out to threads
        (UP1(6, 9, 16, 8, 4), (2, 6, 50)),
        (UP1(100, 9, 4, 2, 1), (1, 100, 3001)),  # parts of one long row
        (UP1(100, 9, 5, 3, 2, dilation=2), (1, 100, 3001)),
        (UP2(90, 5, 3, 2, 2), (1, 90, 3, 900)),  # parts of rows of several phases
    ],
)
def test_values(up: nn.ConvTranspose1d | nn.ConvTranspose2d, shape: tuple[int, ...]) -> None:
    in_one_kernel(up, shape)


def test_doubles() -> None:
    with torch.no_grad():
        model = nn.Sequential(UP2(3, 8, 3, 2, 1), nn.ReLU()).double()
        assert_fuses(model, torch.randn(2, 3, 7, 16).double(), launches=1)


def test_a_transposed_convolution_alone_calls_no_library() -> None:
    with torch.no_grad():
        assert_fuses(UP2(40, 33, 2, 2), torch.randn(1, 40, 30, 41), launches=1)


def test_a_batch_norm_and_a_sum_join() -> None:
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = UP2(6, 8, 2, 2), nn.BatchNorm2d(8)

        def forward(self, x: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.norm(self.up(x)) + skipped)

    with torch.no_grad():
        assert_fuses(Up().eval(), torch.randn(2, 6, 9, 11), torch.randn(2, 8, 18, 22), launches=1)


NEAR_MISSES = {
    "a large weight, a small image": (UP2(512, 64, 2, 2), torch.randn(1, 512, 4, 4), "weight of a transposed"),
    "channels-last": (
        UP2(8, 8, 3, 2).to(memory_format=torch.channels_last),
        torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last),
        "not contiguous",
    ),
    "many phases": (UP1(4, 4, 3, 65), torch.randn(2, 4, 9), "phases"),
    "three dimensions": (nn.ConvTranspose3d(4, 4, 3, 2), torch.randn(2, 4, 5, 5, 5), "one or two dimensions"),
    "bfloat16": (UP2(4, 4, 3, 2).bfloat16(), torch.randn(2, 4, 5, 5).bfloat16(), "bfloat16"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_left_to_the_library(name: str) -> None:
    up, x, reason = NEAR_MISSES[name]
    model = nn.Sequential(up, nn.ReLU())
    assert any(reason in one.reason for one in fuse.show(model, (x,)).rejected)
    with torch.no_grad():
        assert_fuses(model, x, launches=2)


NARROWER = ["-mno-avx512f", "-mno-avx"] if processor.is_x86() else []


@pytest.mark.parametrize("flag", NARROWER)
@pytest.mark.parametrize("groups", [2, 6])
def test_narrower_vectors(lowered: Callable[..., Any], flag: str, groups: int) -> None:
    x, weight, out = torch.randn(2, 6, 9, 30), torch.randn(6, 3, 3, 3), torch.full((2, 3 * groups, 17, 59), torch.nan)
    kernel = lowered(lambda x, w: F.conv_transpose2d(x, w, None, 2, 1, 0, groups).relu(), x, weight).kernel
    library = compiler.build(prelude() + text_of_headers(kernel.headers) + kernel.source, flags=[flag])
    tensors = (x, weight, out, torch.empty(kernel.workspace_bytes, dtype=torch.uint8))
    getattr(library, kernel.name)((ctypes.c_void_p * 4)(*(tensor.data_ptr() for tensor in tensors)))
    expected = F.conv_transpose2d(x, weight, None, 2, 1, 0, groups).relu()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_one_kernel_serves_all_lengths_and_batches(threads: int) -> None:
    model = nn.Sequential(UP1(32, 24, 4, 2, 1), nn.ReLU()).eval()
    before, fused = torch.get_num_threads(), fuse.compile(model)
    torch.set_num_threads(threads)
    try:
        for batch, length in ((2, 5), (3, 9), (1, 300), (5, 70), (7, 17), (1, 1), (2, 2000)):
            x = torch.randn(batch, 32, length)
            with torch.no_grad():
                torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)
    finally:
        torch.set_num_threads(before)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_window(data: st.DataObject) -> None:
    draw = data.draw

    def pair(least: int, most: int) -> tuple[int, int]:
        return draw(st.integers(least, most)), draw(st.integers(least, most))

    taps, stride, dilation, (groups, of_group) = pair(1, 4), pair(1, 3), pair(1, 3), pair(1, 3)
    stride = (stride[0], max(stride[1], 2))
    padding = [draw(st.integers(0, d * (t - 1) + 1)) for t, d in zip(taps, dilation, strict=True)]
    more = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
    inner = UP2(
        groups * of_group, groups * draw(st.integers(1, 20)), taps, stride, padding, more, groups, dilation=dilation
    )
    height, width = (draw(st.sampled_from((3, 5, 16, 45))) + 2 * p for p in padding)  # the result has several places
    x = torch.randn(draw(st.integers(1, 3)), groups * of_group, height, width)
    with torch.no_grad():
        assert_fuses(nn.Sequential(inner, nn.ReLU()), x.mT.contiguous().mT, launches=1)
