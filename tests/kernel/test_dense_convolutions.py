"""Convolutions as products on patches: values, layouts and what is left to the library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuse
from fuse.kernel.cpu.prelude import prelude, text_of_headers
from fuse.runtime.cpu import compiler
from fuse.testing import assert_fuses


class Normalised(nn.Module):
    """A convolution, batch norm with statistics of its own, an activation."""

    def __init__(self, convolution: nn.Module, channels: int) -> None:
        super().__init__()
        self.convolution = convolution
        self.norm = nn.BatchNorm2d(channels)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.convolution(x)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Normalised(nn.Conv2d(6, 6, 3, padding=1, bias=False), 6)
        self.second = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(self.first(x)) + x)


WINDOWS = [
    nn.Conv2d(3, 8, 3, padding=1),
    nn.Conv2d(3, 8, 3, stride=2, padding=1),
    nn.Conv2d(3, 8, 1),
    nn.Conv2d(3, 8, 5, padding=4, dilation=2),
    nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False),
    nn.Conv2d(3, 8, (3, 1), stride=(1, 2), padding=(1, 0)),
    nn.Conv2d(3, 8, 3, padding=5),
]


@pytest.mark.usefixtures("alternately_optimised")
@pytest.mark.parametrize("convolution", WINDOWS)
def test_batch_norm_and_activation_join_the_convolution(convolution: nn.Module) -> None:
    with torch.no_grad():
        assert_fuses(Normalised(convolution, 8), torch.randn(2, 3, 13, 18), launches=1)


def test_a_residual_block_is_a_launch_for_each_convolution() -> None:
    with torch.no_grad():
        assert_fuses(Residual().eval(), torch.randn(2, 6, 9, 9), launches=2, fired={"product_epilogues": 2})


def test_a_convolution_alone_calls_no_library() -> None:
    with torch.no_grad():
        assert_fuses(nn.Conv2d(40, 33, 3), torch.randn(1, 40, 30, 41), launches=1)


@pytest.mark.sampled
@pytest.mark.usefixtures("alternately_optimised")
@pytest.mark.parametrize("size", [(1, 2), (3, 5), (8, 8), (9, 13), (28, 28), (40, 41), (1, 700)])
@pytest.mark.parametrize("batch", [1, 3])
def test_pixels_are_read_in_place_up_to_the_last_block(size: tuple[int, int], batch: int) -> None:
    """The last block of an image is narrower than a vector: what follows in memory is no number here."""
    memory = torch.full((batch * 5 * size[0] * size[1] + 200,), float("nan"))
    x = memory[: -200 or None].view(batch, 5, *size)
    x.copy_(torch.randn(x.shape))
    with torch.no_grad():
        assert_fuses(nn.Sequential(nn.Conv2d(5, 9, 1), nn.ReLU()), x, launches=1)


PATCHES = [
    (nn.Conv2d(3, 40, 16, 16), (2, 3, 32, 48)),
    (nn.Conv2d(3, 70, 4, 4), (1, 3, 20, 36)),
    (nn.Conv2d(3, 40, (5, 7), (5, 7), bias=False), (3, 3, 16, 29)),
    (nn.Conv1d(4, 33, 8, 8), (2, 4, 75)),
    (nn.Conv2d(3, 40, 16, 16, dtype=torch.float64), (2, 3, 32, 32)),
]


@pytest.mark.usefixtures("alternately_optimised")
@pytest.mark.parametrize(("convolution", "shape"), PATCHES)
def test_patches_are_read_in_place(convolution: nn.Module, shape: tuple[int, ...], lowered: Callable[..., Any]) -> None:
    x = torch.randn(shape, dtype=convolution.weight.dtype)
    with torch.no_grad():
        assert_fuses(nn.Sequential(convolution, nn.SiLU()), x, launches=1)
        assert "fuse_places" in lowered(convolution.forward, x).kernel.source


OTHER_PATCHES = [
    (nn.Conv2d(3, 40, 16, 15), (2, 3, 32, 48)),
    (nn.Conv2d(3, 40, 16, 16, padding=1), (2, 3, 32, 48)),
    (nn.Conv2d(3, 40, 8, 8, dilation=2), (2, 3, 32, 48)),
    (nn.Conv2d(3, 40, 3, 3), (2, 3, 9, 12)),
    (nn.Conv2d(3, 16, 16, 16), (2, 3, 32, 48)),
    (nn.Conv2d(4, 80, 8, 8, groups=2), (2, 4, 32, 48)),
]


@pytest.mark.usefixtures("alternately_optimised")
@pytest.mark.parametrize(("convolution", "shape"), OTHER_PATCHES)
def test_other_patches_are_copied(convolution: nn.Module, shape: tuple[int, ...], lowered: Callable[..., Any]) -> None:
    x = torch.randn(shape)
    with torch.no_grad():
        assert_fuses(nn.Sequential(convolution, nn.SiLU()), x, launches=1)
        assert "fuse_places" not in lowered(convolution.forward, x).kernel.source


def test_patches_of_a_transposed_image_are_copied(lowered: Callable[..., Any]) -> None:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return torch.conv2d(x.mT, weight, stride=8)

    x, weight = torch.randn(2, 3, 16, 32), torch.randn(40, 3, 8, 8)
    made = lowered(forward, x, weight).kernel.source
    assert "fuse_places" not in made


def test_patches_of_any_number_of_images() -> None:
    model = nn.Conv2d(3, 40, 8, 8)
    fused = fuse.compile(model)
    with torch.no_grad():
        for images, height in ((4, 16), (7, 16), (1, 24), (5, 40), (12, 8)):
            x = torch.randn(images, 3, height, 24)
            torch.testing.assert_close(fused(x), model(x))


@pytest.mark.parametrize("groups", [2, 4])
def test_groups(groups: int) -> None:
    with torch.no_grad():
        assert_fuses(Normalised(nn.Conv2d(4, 8, 3, groups=groups), 8), torch.randn(2, 4, 9, 9), launches=1)


def test_one_dimension() -> None:
    with torch.no_grad():
        assert_fuses(nn.Sequential(nn.Conv1d(5, 7, 4, 2, 3), nn.SiLU()), torch.randn(3, 5, 31), launches=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_reaches_its_neighbours_only(value: float) -> None:
    x = torch.randn(1, 3, 12, 12)
    x[0, 1, 4, 5] = value
    with torch.no_grad():
        assert_fuses(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()), x, launches=1)


def test_an_image_that_is_a_view() -> None:
    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.inner(x[:, 1:4, 2:, ::2].contiguous()[:, :, :-1]))

    with torch.no_grad():
        assert_fuses(View(), torch.randn(2, 5, 12, 14))


LEFT = [
    (nn.Conv3d(2, 4, 3), (1, 2, 5, 6, 7)),
]


@pytest.mark.parametrize(("convolution", "shape"), LEFT)
def test_others_are_left_to_the_library(convolution: nn.Module, shape: tuple[int, ...]) -> None:
    with torch.no_grad():
        model = nn.Sequential(convolution, nn.ReLU())
        assert_fuses(model, torch.randn(shape), launches=2, fired={"product_epilogues": 0})


def test_gradients_go_through() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Tanh()), torch.randn(2, 3, 8, 8, requires_grad=True)
    fused = fuse.compile(model)
    got = torch.autograd.grad(fused(x).sum(), [x, *model.parameters()])
    for one, other in zip(got, torch.autograd.grad(model(x).sum(), [x, *model.parameters()]), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("unoptimised")
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_window(data: st.DataObject) -> None:
    draw = data.draw
    channels, outputs, batch = draw(st.integers(1, 5)), draw(st.integers(1, 20)), draw(st.integers(1, 3))
    taps, stride, padding, dilation = (
        (draw(st.integers(*bounds)), draw(st.integers(*bounds))) for bounds in ((1, 4), (1, 3), (0, 3), (1, 2))
    )
    size = [draw(st.integers(dilation[d] * (taps[d] - 1) + 2, 20)) for d in range(2)]
    model = nn.Conv2d(channels, outputs, taps, stride, padding, dilation, bias=draw(st.booleans()))
    with torch.no_grad():
        assert_fuses(nn.Sequential(model, nn.ReLU()), torch.randn(batch, channels, *size))


def test_the_last_block_of_pixels_is_multiplied_with_zeros_beyond_the_image(lowered: Callable[..., Any]) -> None:
    """Not with what is in the workspace: subnormal numbers there made a step three times as long."""
    x, weight = torch.randn(2, 64, 28, 28), torch.randn(64, 64, 1, 1)
    kernel = lowered(lambda x, w: torch.nn.functional.conv2d(x, w).relu(), x, weight).kernel
    workspace, out = torch.ones(kernel.workspace_bytes // 4, dtype=torch.int32), torch.empty(2, 64, 28, 28)
    tensors = (x, weight, out, workspace)
    library = compiler.build(prelude() + text_of_headers(kernel.headers) + kernel.source)
    getattr(library, kernel.name)((ctypes.c_void_p * 4)(*(tensor.data_ptr() for tensor in tensors)))
    torch.testing.assert_close(out, torch.nn.functional.conv2d(x, weight).relu(), rtol=1e-4, atol=1e-4)
    start = -workspace.data_ptr() % 64 // 4 + 2 * 64  # aligned; before it two distances for each channel
    assert not (workspace[start : start + 64 * 64] == 1).any()
