"""Convolutions whose channels lie side by side: values at every stride, padding and dilation, packed before or not."""

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
from fuse.graph.function import Function
from fuse.kernel.cpu.prelude import prelude, text_of_headers
from fuse.runtime.cpu import compiler, processor
from fuse.testing import assert_fuses

LAST = torch.channels_last


def relu_behind(convolution: nn.Module) -> nn.Module:
    return nn.Sequential(convolution, nn.ReLU()).to(memory_format=LAST)


@pytest.mark.sampled
@pytest.mark.usefixtures("alternately_optimised")
@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 13, 14)),
        (nn.Conv2d(5, 7, (3, 5), padding=(0, 4), dilation=(2, 1)), (3, 5, 30, 28)),  # taps that lie apart
        (nn.Conv2d(5, 7, 3, padding=2, dilation=2), (3, 5, 30, 28)),
        (nn.Conv2d(16, 33, 1), (2, 16, 9, 9)),  # read in place, with a last panel of one output
        (nn.Conv2d(16, 32, 3), (2, 16, 9, 9)),
        (nn.Conv2d(16, 32, 1, stride=2), (2, 16, 9, 8)),
        (nn.Conv2d(3, 64, 7, 2, 3), (1, 3, 64, 64)),
        (nn.Conv2d(4, 16, 3, stride=3), (1, 4, 17, 40)),
        (nn.Conv2d(600, 24, 3, padding=1), (1, 600, 7, 7)),  # a stretch deeper than is added up at once
        (nn.Conv2d(64, 160, 3, padding=1), (1, 64, 7, 7)),  # outputs shared out to threads
        (nn.Conv2d(64, 64, 3, padding=1), (1, 64, 56, 56)),  # rows shared out
    ],
)
@pytest.mark.parametrize("image", [LAST, torch.contiguous_format])
def test_values(convolution: nn.Module, shape: tuple[int, ...], image: torch.memory_format) -> None:
    with torch.no_grad():
        assert_fuses(relu_behind(convolution), torch.randn(shape).contiguous(memory_format=image), launches=1)


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [(nn.Conv2d(4, 9, 3, padding=6), (1, 4, 3, 22)), (nn.Conv2d(2, 9, 1, padding=5), (1, 2, 1, 1))],
)
def test_places_that_see_padding_alone(convolution: nn.Module, shape: tuple[int, ...]) -> None:
    """Compared with places side by side: oneDNN may crash on channels side by side here."""
    x = torch.randn(shape)
    with torch.no_grad():
        expected = convolution(x).relu()
        fused = fuse.compile(relu_behind(convolution))
        torch.testing.assert_close(fused(x.contiguous(memory_format=LAST)), expected, rtol=1e-4, atol=1e-5)
        assert fused.last_run.kernels == fused.last_run.launches == 1


def test_doubles_without_a_bias() -> None:
    model = relu_behind(nn.Conv2d(3, 20, 3, padding=1, bias=False)).double()
    with torch.no_grad():
        assert_fuses(model, torch.randn(2, 3, 7, 16).double(), launches=1)


def test_a_part_of_an_image() -> None:
    image = torch.randn(2, 24, 24, 20).contiguous(memory_format=LAST)
    for part in (
        image[:, :, 3:19, 2:],
        image[:, 4:12],
        image.flip(2),
        image.expand(2, 24, 24, 20)[:1].expand(3, -1, -1, -1),
    ):
        with torch.no_grad():
            assert_fuses(relu_behind(nn.Conv2d(part.shape[1], 16, 3, padding=1)), part, launches=1)


def test_weights_are_read_in_every_call() -> None:
    model = relu_behind(nn.Conv2d(8, 32, 3))
    fused, x = fuse.compile(model), torch.randn(2, 8, 9, 9)
    with torch.no_grad():
        fused(x)
        model[0].weight.mul_(2)
        torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)


NARROWER = ["-mno-avx512f", "-mno-avx"] if processor.is_x86() else []


@pytest.mark.parametrize("flag", NARROWER)
def test_narrower_vectors(lowered: Callable[..., Any], flag: str) -> None:
    x, weight = (torch.randn(*shape).contiguous(memory_format=LAST) for shape in ((2, 6, 9, 30), (70, 6, 3, 3)))
    expected = F.conv2d(x, weight, padding=1).relu()
    out = torch.full_like(expected, torch.nan)
    kernel = lowered(lambda x, w: F.conv2d(x, w, padding=1).relu(), x, weight).kernel
    library = compiler.build(prelude() + text_of_headers(kernel.headers) + kernel.source, flags=[flag])
    tensors = (x, weight, out, torch.empty(kernel.workspace_bytes, dtype=torch.uint8))
    getattr(library, kernel.name)((ctypes.c_void_p * 4)(*(tensor.data_ptr() for tensor in tensors)))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(8, 8, 3, groups=2),  # groups
        nn.ConvTranspose2d(8, 8, 3),
        nn.Conv2d(8, 8, 3).bfloat16(),
    ],
)
def test_near_misses_are_left_to_the_library(convolution: nn.Module) -> None:
    x = torch.randn(1, 8, 9, 9).to(next(convolution.parameters()).dtype).contiguous(memory_format=LAST)
    with torch.no_grad():
        assert_fuses(relu_behind(convolution), x, launches=2)


def test_weights_that_lie_otherwise_are_left_to_the_library() -> None:
    """Images decide how a result lies; a weight with its taps side by side is no matrix then."""

    model = Function(lambda x, weight: F.conv2d(x, weight).relu())
    x = torch.randn(1, 8, 9, 9).contiguous(memory_format=LAST)
    assert_fuses(model, x, torch.randn(16, 8, 3, 3), launches=2)
    assert_fuses(model, x, torch.randn(16, 8, 1, 1), launches=1)


@pytest.mark.usefixtures("unoptimised")
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_window(data: st.DataObject) -> None:
    draw = data.draw

    def pair(least: int, most: int) -> tuple[int, int]:
        return draw(st.integers(least, most)), draw(st.integers(least, most))

    taps, stride, dilation = pair(1, 4), pair(1, 3), pair(1, 2)
    padding = tuple(draw(st.integers(0, (t - 1) * d)) for t, d in zip(taps, dilation, strict=True))
    height, width = (
        draw(st.sampled_from((1, 2, 5, 16, 30))) + d * (t - 1) for t, d in zip(taps, dilation, strict=True)
    )
    channels, outputs = draw(st.integers(2, 9)), draw(st.integers(2, 40))
    inner = nn.Conv2d(channels, outputs, taps, stride, padding, dilation)
    x = torch.randn(draw(st.integers(1, 3)), channels, height, width)
    x = x.contiguous(memory_format=draw(st.sampled_from((LAST, torch.contiguous_format))))
    with torch.no_grad():
        assert_fuses(relu_behind(inner), x)
