"""Gradients of small convolutions are products of their windows; of others, the library's operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check
from fuse.graph.joint import capture_joint
from fuse.graph.small_convolutions import MOST_WORK, formula

aten = torch.ops.aten

TAKEN: dict[str, tuple[nn.Module, Tensor]] = {
    "3x3": (nn.Conv2d(3, 8, 3, padding=1), torch.randn(2, 3, 6, 5)),
    "1x1": (nn.Conv2d(3, 8, 1), torch.randn(2, 3, 6, 5)),
    "no bias": (nn.Conv2d(3, 4, 2, bias=False), torch.randn(2, 3, 6, 5)),
    "places left over": (nn.Conv2d(2, 4, (3, 2), stride=(2, 3), padding=(1, 0)), torch.randn(1, 2, 8, 10)),
    "1d": (nn.Conv1d(2, 4, 3, stride=2, padding=2), torch.randn(3, 2, 9)),
    "3d": (nn.Conv3d(2, 3, 2, padding=1), torch.randn(2, 2, 3, 4, 5)),
    "float64": (nn.Conv2d(3, 4, 3, dtype=torch.float64), torch.randn(2, 3, 6, 5, dtype=torch.float64)),
}

NEAR_MISSES: dict[str, tuple[nn.Module, Tensor]] = {
    "groups": (nn.Conv2d(4, 8, 3, groups=2), torch.randn(2, 4, 6, 5)),
    "gaps": (nn.Conv2d(3, 8, 3, dilation=2), torch.randn(2, 3, 6, 5)),
    "transposed": (nn.ConvTranspose2d(3, 8, 3, stride=2), torch.randn(2, 3, 6, 5)),
    "the image is trained": (nn.Conv2d(3, 8, 3), torch.randn(2, 3, 6, 5, requires_grad=True)),
    "the bias alone": (nn.Conv2d(3, 8, 3).requires_grad_(False), torch.randn(2, 3, 6, 5)),
    "channels last": (nn.Conv2d(3, 8, 3), torch.randn(2, 3, 6, 5).to(memory_format=torch.channels_last)),
    "no images": (nn.Conv2d(3, 8, 3), torch.randn(0, 3, 6, 5)),
    "bfloat16": (nn.Conv2d(3, 8, 3, dtype=torch.bfloat16), torch.randn(2, 3, 6, 5, dtype=torch.bfloat16)),
    "large": (nn.Conv2d(16, 64, 3), torch.randn(8, 16, 16, 16)),
}
NEAR_MISSES["the bias alone"][0].bias.requires_grad_()  # type: ignore[union-attr]


def targets(model: nn.Module, x: Tensor) -> list[Any]:
    joint = capture_joint(nn.Sequential(model, nn.Tanh()), (x,))
    assert joint.backward is not None
    return [node.target for node in joint.backward.graph.nodes]


@pytest.mark.parametrize("name", TAKEN)
def test_the_gradient_of_the_weight_is_a_product(name: str) -> None:
    model, x = TAKEN[name]
    found = targets(model, x)
    assert aten.convolution_backward.default not in found
    assert found.count(aten.bmm.default) == 1
    report = check(nn.Sequential(model, nn.Tanh()), (x,), train=True)
    assert report.passed, report
    assert not report.fallbacks


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay(name: str) -> None:
    assert targets(*NEAR_MISSES[name]).count(aten.convolution_backward.default) == 1


@pytest.mark.parametrize("name", ["the bias alone", "channels last", "no images"])
def test_near_misses_are_right(name: str) -> None:
    report = check(nn.Sequential(NEAR_MISSES[name][0], nn.Tanh()), (NEAR_MISSES[name][1],), train=True)
    assert report.passed, report


@pytest.mark.parametrize(("places", "taken"), [((32, 32), True), ((32, 33), False)])
def test_large_ones_are_the_librarys(places: Sequence[int], taken: bool) -> None:
    x, weight = torch.empty(4, 4, *places, device="meta"), torch.empty(16, 4, 2, 2, device="meta")
    gradient = torch.empty(4, 16, *places, device="meta")
    args = (gradient, x, weight, [16], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True])
    assert gradient.numel() * weight[0].numel() == (MOST_WORK if taken else MOST_WORK // 32 * 33)
    assert (formula(aten.convolution_backward.default, args) is not None) is taken


def test_a_small_step_calls_no_operator() -> None:
    fused = fuse.compile(nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU6()))
    fused(torch.randn(2, 8, 14, 14)).square().sum().backward()
    run = fused.last_run
    assert run is not None
    assert run.backward is not None
    assert run.backward.aten == 0
    assert run.backward.launches == 3  # the mask and the bias; a product for each image; their sum
