"""Steps that convolve are differentiated in a kernel; the gradient of the weight is taken for all steps at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuse.check.oracle import check
from fuse.gradients.differentiating import by_loops
from fuse.graph.joint import capture_joint
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


@pytest.mark.parametrize(
    ("model", "places"),
    [
        (Convolved(padding=1), (4, 5)),
        (Convolved(taps=1), (4, 5)),
        (Convolved(taps=(3, 1), padding=(1, 0), bias=False), (4, 5)),
        (Convolved(taps=5, padding="same"), (4, 7)),
        (Convolved(nn.Conv1d, padding=1), (7,)),
        (Convolved(nn.Conv3d, padding=1), (3, 2, 4)),
        (ConvLSTM(), (4, 5)),
        (Unrelated(padding=1), (4, 5)),
        (LocationAware(), (7,)),
    ],
    ids=["3x3", "1x1", "3x1", "same", "1d", "3d", "ConvLSTM", "of inputs alone", "of attention"],
)
def test_a_step_that_convolves_is_differentiated_in_one_kernel(model: nn.Module, places: tuple[int, ...]) -> None:
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
        Convolved(padding=2, dilation=2),
        Convolved(padding=1, groups=3),
        Convolved(nn.ConvTranspose2d, padding=1),
        Convolved(taps=1, padding=1, stride=1),
    ],
    ids=["dilated", "grouped", "transposed", "padded by more than the window"],
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
