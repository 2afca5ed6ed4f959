"""Transposed convolutions with a stride of one as ordinary ones; with a larger one, a kernel of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check

PASS = "transposed_convolutions"


class Block(nn.Module):
    """A transposed convolution, and what is often behind it."""

    def __init__(self, inputs: int, outputs: int, taps: Any, dimensions: int = 2, **how: Any) -> None:
        super().__init__()
        kind = nn.ConvTranspose2d if dimensions == 2 else nn.ConvTranspose1d
        self.up = kind(inputs, outputs, taps, **how)

    def forward(self, x: Tensor) -> Tensor:
        return torch.clamp(F.leaky_relu(self.up(x)) * 2, -1, 1) / 2


def fired(model: nn.Module, *args: Tensor) -> int:
    report = fuse.show(model.eval(), args)
    return sum(one.count for one in report.fired if one.pass_name == PASS)


def reasons(model: nn.Module, *args: Tensor) -> set[str]:
    return {one.reason for one in fuse.show(model.eval(), args).rejected if one.pass_name == PASS}


STRIDE_ONE = {
    "3 x 3": (Block(4, 6, 3, padding=1), (2, 4, 8, 8)),
    "3 x 3 that grows": (Block(4, 6, 3, bias=False), (2, 4, 14, 14)),
    "oblong": (Block(4, 6, (3, 1), padding=(1, 0)), (2, 4, 7, 9)),
    "groups and dilation": (Block(4, 6, 3, padding=2, dilation=2, groups=2), (2, 4, 8, 8)),
    "one channel a group": (Block(6, 6, 3, padding=1, groups=6), (3, 6, 8, 8)),
    "one dimension": (Block(8, 8, 3, 1, padding=1, groups=4), (2, 8, 30)),
    "one tap": (Block(4, 6, 1), (2, 4, 8, 8)),
}
STRIDE_TWO = {
    "3 x 3": (Block(8, 16, 3, stride=2, padding=1, output_padding=1), (2, 8, 16, 16)),
    "one image": (Block(8, 8, 3, stride=2), (1, 8, 60, 60)),
    "groups": (Block(32, 32, 3, stride=2, padding=1, groups=2, bias=False), (2, 32, 16, 16)),
    "along one dimension": (Block(8, 16, 3, stride=(2, 1), padding=1), (2, 8, 16, 16)),
    "5 x 5 at 4, dilated": (Block(8, 16, 5, stride=4, padding=3, dilation=2), (2, 8, 16, 16)),
    "4 x 4": (Block(8, 16, 4, stride=2, padding=1), (2, 8, 16, 16)),
    "2 x 2": (Block(8, 16, 2, stride=2), (2, 8, 16, 16)),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", STRIDE_ONE)
def test_a_stride_of_one_is_a_convolution_with_what_follows(name: str, train: bool) -> None:
    """The weight is turned round by one small kernel."""
    model, shape = STRIDE_ONE[name]
    x = torch.randn(shape)
    checked = check(model, (x,), train=train)
    assert checked.passed, checked
    assert not checked.fallbacks
    if not train:
        assert fired(model, x) == 1
        assert checked.launches_after == 2


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", STRIDE_TWO)
def test_with_a_larger_stride_it_is_one_kernel_with_what_follows(name: str, train: bool) -> None:
    model, shape = STRIDE_TWO[name]
    x = torch.randn(shape)
    checked = check(model, (x,), train=train)
    assert checked.passed, checked
    assert not checked.fallbacks
    if not train:
        assert not fired(model, x)
        assert checked.launches_after == 1


def test_one_place_of_each_image_is_left_to_the_library() -> None:
    checked = check(Block(8, 8, 3, stride=2, padding=1), (torch.randn(700, 8, 1, 1),))
    assert checked.passed, checked
    assert checked.launches_after == 2


NEAR_MISSES = {
    "a long weight": (Block(64, 64, 3, padding=1), (1, 64, 4, 4), "weight is larger"),
    "more cropped than taps reach": (Block(8, 8, 3, padding=3), (2, 8, 9, 9), "crops more"),
    "it grows by much": (Block(4, 4, 3), (16, 4, 4, 4), "multiply zeros"),
    "double": (Block(8, 16, 3).double(), (2, 8, 16, 16), "left to the library"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay_and_are_right(name: str) -> None:
    model, shape, reason = NEAR_MISSES[name]
    x = torch.randn(shape, dtype=model.up.weight.dtype)
    assert not fired(model, x)
    assert any(reason in one for one in reasons(model, x)), reasons(model, x)
    checked = check(model, (x,))
    assert checked.passed, checked
    assert not checked.fallbacks


def test_an_image_in_an_order_of_its_own_stays() -> None:
    model, shape = STRIDE_ONE["3 x 3"]
    x = torch.randn(shape).to(memory_format=torch.channels_last)
    assert not fired(model, x)
    assert check(model, (x,)).passed


def test_an_ordinary_convolution_is_not_looked_at() -> None:
    assert not reasons(nn.Conv2d(4, 6, 3), torch.randn(2, 4, 8, 8))


class Twice(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, 3) * 0.2)
        self.steps = steps

    def forward(self, h: Tensor) -> Tensor:
        for _ in range(self.steps):
            h = torch.tanh(F.conv_transpose1d(h, self.weight, padding=1))
        return h


def test_a_weight_is_turned_once() -> None:
    checked = check(Twice(2), (torch.randn(2, 6, 40),))
    assert checked.passed, checked
    assert checked.launches_after == 3


def test_a_loop_of_transposed_convolutions_is_one_kernel() -> None:
    checked = check(Twice(8), (torch.randn(2, 6, 40),))
    assert checked.passed, checked
    assert checked.launches_after == 1


def test_a_weight_that_changes_is_turned_in_the_next_call() -> None:
    model, shape = STRIDE_ONE["3 x 3"]
    fused, x = fuse.compile(model), torch.randn(shape)
    with torch.no_grad():
        fused(x)
        model.up.weight.data.mul_(-0.5)
        torch.testing.assert_close(fused(x), model(x))
