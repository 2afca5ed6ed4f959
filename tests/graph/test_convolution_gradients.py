"""Gradients of the weights of small convolutions are kernels, of those without overlaps products, those of biases sums;
others are the library's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check
from fuse.graph.backward.convolution_gradients import MOST_SUMS, is_small
from fuse.graph.backward.joint import capture_joint
from fuse.runtime.cpu import blas_speed

aten = torch.ops.aten

TAKEN: dict[str, tuple[nn.Module, Tensor]] = {
    "3x3": (nn.Conv2d(3, 8, 3, padding=1), torch.randn(2, 3, 6, 5)),
    "1x1": (nn.Conv2d(3, 8, 1), torch.randn(2, 3, 6, 5)),
    "no bias": (nn.Conv2d(3, 4, 2, bias=False), torch.randn(2, 3, 6, 5)),
    "places left over": (nn.Conv2d(2, 4, (3, 2), stride=(2, 3), padding=(1, 0)), torch.randn(1, 2, 8, 10)),
    "rows in vectors, every second": (nn.Conv2d(3, 5, 7, stride=2, padding=3), torch.randn(2, 3, 43, 66)),
    "much padding": (nn.Conv2d(3, 5, 3, padding=5), torch.randn(2, 3, 13, 18)),
    "outputs and taps left over": (nn.Conv2d(5, 7, 3), torch.randn(3, 5, 9, 11)),
    "1d": (nn.Conv1d(2, 4, 3, stride=2, padding=2), torch.randn(3, 2, 9)),
    "groups": (nn.Conv2d(4, 8, 3, groups=2), torch.randn(2, 4, 6, 5)),
    "each channel alone": (nn.Conv2d(6, 12, 3, padding=1, groups=6), torch.randn(2, 6, 9, 20)),
    "gaps": (nn.Conv2d(3, 8, 3, dilation=2), torch.randn(2, 3, 6, 7)),
    "float64": (nn.Conv2d(3, 4, 3, dtype=torch.float64), torch.randn(2, 3, 6, 5, dtype=torch.float64)),
    "in bands": (nn.Conv2d(3, 8, 5, padding=2), torch.randn(2, 3, 301, 160)),
    "many images": (nn.Conv2d(2, 4, 3), torch.randn(40, 2, 30, 30)),
    "transposed": (nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1), torch.randn(2, 6, 7, 9)),
    "transposed, groups": (nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2), torch.randn(2, 6, 7, 9)),
}

PRODUCTS: dict[str, tuple[nn.Module, Tensor]] = {
    "pixels": (nn.Conv2d(64, 40, 1), torch.randn(3, 64, 21, 20)),
    "pixels of one image": (nn.Conv2d(64, 40, 1, bias=False), torch.randn(1, 64, 21, 20)),
    "pixels of a line": (nn.Conv1d(64, 40, 1), torch.randn(2, 64, 300)),
    "patches": (nn.Conv2d(3, 64, 8, 8), torch.randn(2, 3, 32, 24)),
    "patches of one image, no bias": (nn.Conv2d(3, 64, (8, 16), (8, 16), bias=False), torch.randn(1, 3, 32, 32)),
    "patches of a line": (nn.Conv1d(8, 160, 16, 16), torch.randn(2, 8, 96)),
    "patches in float64": (nn.Conv2d(3, 64, 8, 8, dtype=torch.float64), torch.randn(2, 3, 16, 24, dtype=torch.float64)),
}

NEAR_MISSES: dict[str, tuple[nn.Module, Tensor]] = {
    "3d": (nn.Conv3d(2, 3, 2, padding=1), torch.randn(2, 2, 3, 4, 5)),
    "the image is trained": (nn.Conv2d(3, 8, 3), torch.randn(2, 3, 6, 5, requires_grad=True)),
    "the bias alone": (nn.Conv2d(3, 8, 3).requires_grad_(False), torch.randn(2, 3, 6, 5)),
    "channels last": (nn.Conv2d(3, 8, 3), torch.randn(2, 3, 6, 5).to(memory_format=torch.channels_last)),
    "no images": (nn.Conv2d(3, 8, 3), torch.randn(0, 3, 6, 5)),
    "bfloat16": (nn.Conv2d(3, 8, 3, dtype=torch.bfloat16), torch.randn(2, 3, 6, 5, dtype=torch.bfloat16)),
    "many taps": (nn.Conv2d(64, 64, 3), torch.randn(1, 64, 5, 5)),
    "many sums of few pixels": (nn.Conv2d(64, 64, 1), torch.randn(1, 64, 5, 5)),
    "every second pixel": (nn.Conv2d(64, 40, 1, 2), torch.randn(2, 64, 41, 41)),
    "pixels around the image": (nn.Conv2d(64, 40, 1, padding=1), torch.randn(2, 64, 19, 19)),
    "pixels in groups": (nn.Conv2d(64, 160, 1, groups=2), torch.randn(2, 64, 41, 41)),
    "patches that leave out the last columns": (nn.Conv2d(3, 64, 8, 8), torch.randn(2, 3, 32, 31)),
    "patches that overlap": (nn.Conv2d(3, 64, 8, 7), torch.randn(2, 3, 29, 29)),
    "patches around the image": (nn.Conv2d(3, 64, 8, 8, 4), torch.randn(2, 3, 24, 24)),
    "patches with gaps": (nn.Conv2d(3, 64, 8, 8, dilation=2), torch.randn(2, 3, 32, 32)),
    "small patches": (nn.Conv2d(64, 64, 4, 4), torch.randn(2, 64, 16, 16)),
    "patches, few outputs": (nn.Conv2d(20, 8, 8, 8), torch.randn(2, 20, 16, 16)),
    "patches, transposed": (nn.ConvTranspose2d(16, 64, 8, 8), torch.randn(2, 16, 4, 4)),
}
NEAR_MISSES["the bias alone"][0].bias.requires_grad_()  # type: ignore[union-attr]


def calls(model: nn.Module, x: Tensor) -> list[Any]:
    joint = capture_joint(nn.Sequential(model, nn.Tanh()), (x,))
    assert joint.backward is not None
    return [node for node in joint.backward.graph.nodes if node.target is aten.convolution_backward.default]


def checked_backward(model: nn.Module, x: Tensor) -> Any:
    """The backward pass of ``tanh(model(x))``, whose gradients are right."""
    report = check(nn.Sequential(model, nn.Tanh()), (x,), train=True)
    assert report.passed, report
    assert not report.fallbacks
    fused = fuse.compile(nn.Sequential(copy.deepcopy(model), nn.Tanh()))
    y = fused(x)
    y.backward(torch.ones_like(y))
    return fused.last_run.backward


@pytest.mark.sampled
@pytest.mark.parametrize("name", TAKEN)
def test_the_gradient_of_the_weight_is_a_kernel(name: str) -> None:
    model, x = TAKEN[name]
    (call,) = calls(model, x)
    assert list(call.args[-1]) == [False, True, False]
    backward = checked_backward(model, x)
    assert (backward.aten, backward.launches) == (0, 2)


@pytest.mark.sampled
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_gradient_of_the_weight_is_a_product(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas_speed, "is_slow", lambda: False)  # else the product is a kernel on some machines
    model, x = PRODUCTS[name]
    assert not calls(model, x)
    backward = checked_backward(model, x)
    assert (backward.aten, backward.libraries) == (0, 1)
    assert backward.kernels <= 2  # d with its sum; the patches, or the sum over images


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay(name: str) -> None:
    (call,) = calls(*NEAR_MISSES[name])
    assert list(call.args[-1]) != [False, True, False]


@pytest.mark.parametrize(
    "name", ["the bias alone", "channels last", "no images", "3d", "every second pixel", "patches around the image"]
)
def test_near_misses_are_right(name: str) -> None:
    report = check(nn.Sequential(NEAR_MISSES[name][0], nn.Tanh()), (NEAR_MISSES[name][1],), train=True)
    assert report.passed, report


@pytest.mark.parametrize(("outputs", "taken"), [(MOST_SUMS // 9, True), (MOST_SUMS // 9 + 1, False)])
def test_large_ones_are_the_librarys(outputs: int, taken: bool) -> None:
    assert is_small((outputs, 1, 3, 3), 1) is taken
    assert is_small((outputs * 8, 1, 3, 3), 8) is taken


@pytest.mark.parametrize("strange", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [(0, 0, 0, 0), (1, 2, 4, 19), (0, 1, 8, 7)])
def test_numbers_that_are_not_finite_reach_the_sums_that_they_belong_to(
    strange: float, place: tuple[int, int, int, int]
) -> None:
    """A kernel multiplies zeros that lie between rows by what a tap sees there: that is no part of a sum."""
    model = nn.Conv2d(3, 4, 3, dtype=torch.float64)
    x = torch.randn(2, 3, 9, 20, dtype=torch.float64)
    x[place] = strange
    fused = fuse.compile(copy.deepcopy(model))
    dy = torch.randn(2, 4, 7, 18, dtype=torch.float64)
    model(x).backward(dy)
    fused(x).backward(dy)
    # place by place, as the definition says
    expected = torch.zeros_like(model.weight)
    for v in range(3):
        for u in range(3):
            seen = x[:, :, v : v + 7, u : u + 18]
            expected[:, :, v, u] = (dy[:, :, None] * seen[:, None]).sum([0, 3, 4])
    torch.testing.assert_close(fused.weight.grad, expected, equal_nan=True)


def test_other_numbers_of_images_are_right() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.Tanh())
    fused = fuse.compile(copy.deepcopy(model))
    for images in (4, 7, 1, 5, 12):
        x = torch.randn(images, 3, 19, 22)
        for one in (model, fused):
            one.zero_grad()
            one(x).square().sum().backward()
        for own, other in zip(fused.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, atol=1e-4, rtol=1e-4)


def test_a_small_step_calls_no_operator() -> None:
    fused = fuse.compile(nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU6()))
    fused(torch.randn(2, 8, 14, 14)).square().sum().backward()
    run = fused.last_run
    assert run is not None
    assert run.backward is not None
    assert run.backward.aten == 0
    assert run.backward.launches == 2  # the mask and the gradient of the bias; that of the weight
