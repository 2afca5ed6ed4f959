"""What the backward pass only compares is compared in the forward pass, and saved as truths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuse.check.oracle import check
from fuse.graph.backward.joint import capture_joint
from fuse.graph.function import Function
from fuse.graph.outputs import outputs_of
from fuse.report.show import show


def saved(run: Callable[..., Tensor], *args: Tensor) -> list[torch.dtype]:
    """The dtypes of what the forward half puts out for the backward half alone."""
    joint = capture_joint(Function(run), args)
    assert joint.backward is not None
    outputs, own = outputs_of(joint.forward.graph), joint.forward.meta["saved_from"]
    return [outputs[one.index].meta["val"].dtype for one in joint.given if one.kind == "saved" and one.index >= own]


def inputs(count: int) -> list[Tensor]:
    return [torch.randn(5, 28, requires_grad=True) for _ in range(count)]


@pytest.mark.parametrize(
    "activation",
    [F.relu6, lambda y: F.leaky_relu(y, 0.1), lambda y: y.clamp(-0.5, 0.5)],
    ids=["relu6", "leaky_relu", "clamp"],
)
def test_truths_are_saved_in_place_of_numbers(activation: Callable[[Tensor], Tensor]):
    def run(x: Tensor, w: Tensor) -> Tensor:
        return activation(torch.sin(x)) * w

    assert torch.float32 not in saved(lambda x, w: activation(torch.sin(x)) * 2, *inputs(2))
    checked = check(Function(run), inputs(2), train=True)
    assert checked.passed, str(checked)


def test_a_truth_of_two_numbers_one_of_which_is_saved_anyway():
    """The largest element's gradient asks whether it is not a number, and the quotient's reads it."""

    def run(x: Tensor, w: Tensor) -> Tensor:
        return w / torch.sin(x).max()

    assert torch.bool in saved(run, *inputs(2))
    checked = check(Function(run), inputs(2), train=True)
    assert checked.passed, str(checked)
    assert not checked.fallbacks


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
def test_a_convolution_writes_them_beside_its_result(norm: bool):
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 8, 3, padding=1), *([nn.BatchNorm2d(8)] if norm else []), nn.ReLU6()]
    model, x = nn.Sequential(*layers), torch.randn(2, 4, 14, 14)
    report = show(model, (x,), train=True)
    assert (report.after.launches, report.backward.after.launches) == ((4, 4) if norm else (1, 2))
    checked = check(model, (x,), train=True)
    assert checked.passed, str(checked)


def test_half_of_the_memory_of_a_step_is_enough():
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.ReLU6()), torch.randn(2, 8, 28, 28)
    held = capture_joint(model, (x,))
    outputs = outputs_of(held.forward.graph)[held.forward.meta["saved_from"] :]
    assert [out.meta["val"].dtype for out in outputs] == [torch.bool]


@pytest.mark.parametrize(
    ("run", "kept"),
    [
        (lambda x, w: F.relu6(torch.sin(x)) + torch.sin(x).exp().mm(w.t()).sum(), None),
        (lambda x, w: (y := torch.sin(x)) * F.relu6(y), torch.float32),  # the product reads y, too
        (lambda x, w: F.relu6(x) * 2, None),  # an input is there anyway
        (lambda x, w: F.relu6((x.sin() + 1) * w), torch.float32),  # w's gradient needs what it is computed from
    ],
    ids=["other reader", "product", "input", "computed again"],
)
def test_near_misses_are_right(run: Callable[..., Tensor], kept: torch.dtype | None):
    if kept is not None:
        assert kept in saved(run, *inputs(2))
    checked = check(Function(run), inputs(2), train=True)
    assert checked.passed, str(checked)


def test_truths_wider_than_the_numbers_are_not_saved():
    def run(x: Tensor, w: Tensor) -> Tensor:
        narrow = torch.sin(x).sum(1, keepdim=True)
        return w.clamp(narrow, narrow + 1) * 2

    assert torch.bool not in saved(run, *inputs(2))
    checked = check(Function(run), inputs(2), train=True)
    assert checked.passed, str(checked)
