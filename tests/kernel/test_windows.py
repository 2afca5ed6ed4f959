"""Convolutions read from padded planes of the image: values at every stride, padding, dilation and group."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fuse
from fuse.kernel.cpu.prelude import prelude, text_of_headers
from fuse.kernel.cpu.product_frame import HEADERS
from fuse.kernel.cpu.windows import Convolution, Share
from fuse.kernel.values import Patches, Value
from fuse.runtime.cpu import compiler, processor
from fuse.testing import assert_fuses


def in_one_kernel(convolution: nn.Module, shape: tuple[int, ...]) -> None:
    """A convolution and a ReLU are one kernel, and right."""
    torch.manual_seed(0)
    convolution.reset_parameters()  # a value that rounding moves across the zero of ReLU is in no run, or in all
    with torch.no_grad():
        assert_fuses(nn.Sequential(convolution, nn.ReLU()), torch.randn(shape), launches=1)


@pytest.mark.sampled
@pytest.mark.usefixtures("alternately_optimised")
@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 13, 14)),  # two places of a panel are in no row
        (nn.Conv2d(5, 7, (3, 5), padding=(0, 4), dilation=(2, 1)), (3, 5, 30, 28)),
        (nn.Conv1d(6, 9, 5, padding=2), (2, 6, 200)),  # one row of many panels
        (nn.Conv2d(3, 8, 3, padding=6), (1, 3, 3, 22)),  # rows that see padding alone
        (nn.Conv2d(200, 20, 3), (1, 200, 8, 18)),  # deeper than is added up at once
        (nn.Conv2d(16, 40, 3, padding=1), (4, 16, 32, 32)),  # images shared out to threads
        (nn.Conv2d(16, 40, 3, padding=1), (1, 16, 64, 64)),  # rows shared out
        (nn.Conv2d(64, 70, 3, padding=1), (1, 64, 7, 7)),  # outputs shared out
        (nn.Conv2d(300, 8, 3, padding=1), (1, 300, 40, 40)),  # planes of some rows, a last part of fewer
        (nn.Conv2d(3, 8, 3, stride=2, padding=1), (2, 3, 17, 40)),
        (nn.Conv2d(3, 8, (2, 3), stride=(3, 2), padding=(1, 2), dilation=(2, 3)), (2, 3, 17, 40)),
        (nn.Conv2d(3, 8, 1, stride=3), (2, 3, 17, 40)),  # places further apart than taps
        (nn.Conv2d(6, 9, 3, padding=1, groups=3), (2, 6, 9, 30)),
        (nn.Conv2d(6, 6, 3, padding=1, groups=6), (2, 6, 9, 30)),
        (nn.Conv1d(4, 8, 3, groups=2), (2, 4, 50)),
        (nn.Conv1d(300, 9, 5, padding=2), (1, 300, 3001)),  # parts of one long row
        (nn.Conv1d(300, 9, 5, stride=2, padding=4, dilation=3), (2, 300, 3001)),
        (nn.Conv1d(600, 6, 3, padding=200, groups=2), (1, 600, 1500)),  # parts that see padding alone
        (nn.Conv2d(300, 5, 3, padding=2), (1, 300, 3, 700)),
    ],
)
def test_values(convolution: nn.Conv1d | nn.Conv2d, shape: tuple[int, ...]) -> None:
    in_one_kernel(convolution, shape)


def test_doubles() -> None:
    with torch.no_grad():
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()).double()
        assert_fuses(model, torch.randn(2, 3, 7, 16).double(), launches=1)


NARROWER = ["-mno-avx512f", "-mno-avx"] if processor.is_x86() else []


@pytest.mark.parametrize("flag", NARROWER)
@pytest.mark.parametrize("groups", [2, 6])
def test_narrower_vectors(lowered: Callable[..., Any], flag: str, groups: int) -> None:
    x, weight, out = torch.randn(2, 6, 9, 30), torch.randn(18, 6 // groups, 3, 3), torch.full((2, 18, 9, 30), torch.nan)
    kernel = lowered(lambda x, w: F.conv2d(x, w, padding=1, groups=groups).relu(), x, weight).kernel
    library = compiler.build(prelude() + text_of_headers(kernel.headers) + kernel.source, flags=[flag])
    tensors = (x, weight, out, torch.empty(kernel.workspace_bytes, dtype=torch.uint8))
    getattr(library, kernel.name)((ctypes.c_void_p * 4)(*(tensor.data_ptr() for tensor in tensors)))
    torch.testing.assert_close(out, F.conv2d(x, weight, padding=1, groups=groups).relu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_one_kernel_serves_all_lengths_and_batches(threads: int) -> None:
    model = nn.Sequential(nn.Conv1d(32, 24, 3, padding=1), nn.ReLU()).eval()
    before, fused = torch.get_num_threads(), fuse.compile(model)
    torch.set_num_threads(threads)
    try:
        for batch, length in ((2, 5), (3, 9), (1, 300), (5, 70), (7, 17), (1, 1)):
            x = torch.randn(batch, 32, length)
            with torch.no_grad():
                torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)
    finally:
        torch.set_num_threads(before)


def test_a_call_splits_outputs_as_is_estimated_where_sizes_are_known() -> None:
    window = "images, 1, outputs, 64, 1, length, 0, 192, 64, 1, 0, 0, {1, 3}, {1, 1}, {0, 1}, {1, 1}, {1, length}"
    source = f"""
    extern "C" int64_t best(int64_t images, int64_t outputs, int64_t length, int64_t threads) {{
        return fuse_best(fuse_splits{{8}}, {{{window}, 1, length, length + 1}}, threads);
    }}"""
    best = compiler.build(prelude() + text_of_headers((*HEADERS, "windows.h")) + source).best
    found = set()
    for images, length, threads in product((1, 2, 3, 5, 8), (5, 17, 33, 70), (1, 2, 4, 16)):
        of = Convolution(Patches((images, 192, length), torch.float32, Value((images, 64, 1, length), torch.float32),
                                 (1, 3), (1, length), (1, 1), (0, 1), (1, 1)), 64)  # fmt: skip
        expected = min((1, 2, 4, 8), key=lambda splits: of.cycles(Share(1, length, splits), threads))
        assert best(images, 64, length, threads) == expected, (images, length, threads)
        found.add(expected)
    assert len(found) > 2


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_window(data: st.DataObject) -> None:
    draw = data.draw

    def pair(least: int, most: int) -> tuple[int, int]:
        return draw(st.integers(least, most)), draw(st.integers(least, most))

    taps, stride, padding, dilation = pair(1, 4), pair(1, 3), pair(0, 3), pair(1, 2)
    height, width = (
        draw(st.sampled_from(extents)) + d * (t - 1)
        for extents, t, d in zip(((1, 2, 5), (3, 16, 30, 45)), taps, dilation, strict=True)
    )
    groups, of_group = pair(1, 3)
    channels = groups * of_group
    inner = nn.Conv2d(channels, groups * draw(st.integers(1, 20)), taps, stride, padding, dilation, groups)
    with torch.no_grad():
        x = torch.randn(draw(st.integers(1, 3)), channels, width, height).transpose(2, 3)
        one_place = inner(x)[0, 0].numel() == 1  # a product of one column, which is left to the library
        assert_fuses(nn.Sequential(inner, nn.ReLU()), x, launches=2 if one_place else 1)
