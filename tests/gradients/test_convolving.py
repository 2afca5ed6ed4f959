"""Steps that convolve are differentiated in a kernel; the gradient of the weight is taken for all steps at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuse.check.oracle import check
from fuse.gradients.differentiating import by_loops
from fuse.graph.backward.joint import capture_joint
from fuse.graph.loop import Loop

aten = torch.ops.aten
STEPS, BATCH, CHANNELS = 6, 2, 3


class Convolved(nn.Module):
    """``h = tanh(convolution(h) + x[t])``."""

    def __init__(self, made: Callable[..., nn.Module] = nn.Conv2d, taps: Any = 3, **how: Any) -> None:
        super().__init__()
        self.convolution = made(CHANNELS, CHANNELS, taps, **how)

    def forward(self, xs: Tensor, h: Tensor) -> Tensor:
        for x in xs:
            h = torch.tanh(self.convolution(h) + x)
        return h


class ConvLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Conv2d(2 * CHANNELS, 4 * CHANNELS, 3, padding=1)

    def forward(self, xs: Tensor, h: Tensor) -> Tensor:
        c, kept = h, []
        for x in xs:
            i, f, g, o = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            kept.append(h)
        return torch.stack(kept)


class Unrelated(Convolved):
    """The image does not depend on the step before: only the weight has a gradient from it."""

    def forward(self, xs: Tensor, h: Tensor) -> Tensor:
        for x in xs:
            h = torch.tanh(self.convolution(x) + h)
        return h


class LocationAware(nn.Module):
    """Attention that sees where it was: the weights of the step before are convolved, and the places are rows."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 4, 5, padding=2, bias=False)
        self.places, self.scores = nn.Linear(4, CHANNELS), nn.Linear(CHANNELS, 1)

    def forward(self, xs: Tensor, h: Tensor) -> Tensor:
        values = h.transpose(1, 2)
        weights = torch.softmax(values.sum(-1), -1)
        for x in xs:
            places = self.places(self.convolution(weights[:, None]).transpose(1, 2))
            scores = self.scores(torch.tanh(places + values + x.transpose(1, 2)))
            weights = torch.softmax(scores.squeeze(-1), -1)
        return weights


class OwnFilters(nn.Module):
    """Each step convolves each sample with taps that it computes: the shifts of a Neural Turing Machine."""

    def __init__(self, *taps: int, **how: Any) -> None:
        super().__init__()
        self.linear, self.shape, self.how = nn.Linear(CHANNELS, math.prod(taps)), taps, how

    def forward(self, xs: Tensor, h: Tensor) -> Tensor:
        for x in xs:
            taps = torch.softmax(self.linear(h.flatten(2).mean(2)), 1)
            filters = taps.repeat_interleave(CHANNELS, 0).view(BATCH * CHANNELS, 1, *self.shape)
            convolve = (F.conv1d, F.conv2d)[len(self.shape) - 1]
            apart = h.reshape(1, BATCH * CHANNELS, *h.shape[2:])
            moved = convolve(apart, filters, groups=BATCH * CHANNELS, **self.how)
            h = torch.tanh(moved.view(h.shape) + x)
        return h


class OwnMatrices(nn.Module):
    """Each step convolves with taps between all channels, made of the image itself."""

    def forward(self, xs: Tensor, h: Tensor) -> Tensor:
        for x in xs:
            taps = torch.tanh(h[0, :, :3].unsqueeze(1) + h[1, :, 1:4])
            h = torch.tanh(F.conv1d(h, taps, padding=1) + x)
        return h


def given(*places: int, steps: int = STEPS, trained: bool = True) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        torch.randn(steps, BATCH, CHANNELS, *places, requires_grad=trained),
        torch.randn(BATCH, CHANNELS, *places, requires_grad=trained),
    )


def reversed_loops(model: nn.Module, *args: Tensor) -> list[Loop]:
    joint = capture_joint(model, args, differentiate=by_loops())
    assert joint.backward is not None
    return [module for module in joint.backward.modules() if isinstance(module, Loop)]


CONVOLVED: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "3x3": (Convolved(padding=1), (4, 5)),
    "1x1": (Convolved(taps=1), (4, 5)),
    "3x1": (Convolved(taps=(3, 1), padding=(1, 0), bias=False), (4, 5)),
    "same": (Convolved(taps=5, padding="same"), (4, 7)),
    "1d": (Convolved(nn.Conv1d, padding=1), (7,)),
    "3d": (Convolved(nn.Conv3d, padding=1), (3, 2, 4)),
    "ConvLSTM": (ConvLSTM(), (4, 5)),
    "dilated": (Convolved(padding=2, dilation=2), (4, 5)),
    "grouped": (Convolved(padding=1, groups=3), (4, 5)),
    "of inputs alone": (Unrelated(padding=1), (4, 5)),
    "of inputs alone, grouped": (Unrelated(padding=1, groups=3), (4, 5)),
    "of inputs alone, dilated": (Unrelated(padding=2, dilation=2), (4, 5)),
    "of attention": (LocationAware(), (7,)),
    "own filters": (OwnFilters(3, padding=1), (7,)),
    "own dilated filters": (OwnFilters(3, dilation=2, padding=2), (7,)),
    "own filters in two dimensions": (OwnFilters(3, 5, padding=(1, 2)), (4, 5)),
    "own matrices": (OwnMatrices(), (7,)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CONVOLVED)
def test_a_step_that_convolves_is_differentiated_in_one_kernel(name: str) -> None:
    model, places = CONVOLVED[name]
    report = check(model, given(*places), train=True)
    assert report.passed, report
    assert not report.fallbacks
    longer = check(model, given(*places, steps=2 * STEPS), train=True)
    assert longer.passed, longer
    assert longer.launches_after == report.launches_after


def test_the_weight_is_turned_round_once_and_its_gradient_taken_once() -> None:
    args = given(4, 5)
    (loop,) = reversed_loops(Convolved(padding=1), *args)
    targets = [node.target for node in loop.body.graph.nodes]
    assert aten.convolution.default in targets
    assert aten.convolution_backward.default not in targets
    assert aten.flip.default not in targets
    joint = capture_joint(Convolved(padding=1), args, differentiate=by_loops())
    behind = [node.target for node in joint.backward.graph.nodes]
    assert behind.count(aten.convolution_backward.default) == 1
    assert behind.count(aten.flip.default) == 1


@pytest.mark.parametrize(
    "model",
    [
        Convolved(nn.ConvTranspose2d, padding=1),
        Convolved(nn.ConvTranspose2d, padding=1, groups=3),
        Unrelated(nn.ConvTranspose2d, padding=1, groups=3),
        Convolved(taps=1, padding=1, stride=1),
    ],
    ids=["transposed", "transposed, grouped", "transposed, of inputs alone", "padded by more than the window"],
)
def test_other_convolutions_stay_right(model: nn.Module) -> None:
    if model.convolution.kernel_size == (1, 1):
        model.forward = lambda xs, h: torch.tanh(model.convolution(h)[:, :, 1:-1, 1:-1] + xs[0])
    report = check(model, given(4, 5), train=True)
    assert report.passed, report


def test_large_convolutions_stay_with_the_library() -> None:
    model = Convolved(padding=1)
    model.convolution = nn.Conv2d(CHANNELS, CHANNELS, 31, padding=15)
    args = given(16, 16)
    assert not any(loop.spec.persistent for loop in reversed_loops(model, *args))
    report = check(model, args, train=True)
    assert report.passed, report


def test_without_gradients_of_images_the_weight_has_its_own() -> None:
    report = check(Convolved(padding=1), given(4, 5, trained=False), train=True)
    assert report.passed, report
    assert not report.fallbacks
