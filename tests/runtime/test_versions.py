"""A compiled call raises the versions of the tensors that it writes as often as eager does: autograd relies on them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fuse


class Writer(nn.Module):
    def __init__(self, write: Callable[[Writer, Tensor], None]) -> None:
        super().__init__()
        self.write = write
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x)
        return self.layer(x) + self.mean


def in_place(model: Writer, x: Tensor) -> None:
    model.mean.mul_(0.9)


def through_data(model: Writer, x: Tensor) -> None:
    model.mean.data.mul_(0.9)


def several_times(model: Writer, x: Tensor) -> None:
    for row in x.detach():
        model.mean.mul_(0.9).add_(row)
    model.mean.data[1:].zero_()
    model.mean[:1] = 0


def an_argument(model: Writer, x: Tensor) -> None:
    x.mul_(2)
    x.data.sub_(1)


def without_gradients(model: Writer, x: Tensor) -> None:
    with torch.no_grad():
        model.mean.copy_(x.mean(0))


def versions_raised(model: nn.Module, call: nn.Module, modes: Callable[[], object]) -> list[list[int]]:
    raised = []
    for _ in range(3):
        x = torch.randn(3, 4)
        tensors = [x, *model.parameters(), *model.buffers()]
        before = [tensor._version for tensor in tensors]
        with modes():
            call(x)
        raised.append([tensor._version - old for tensor, old in zip(tensors, before, strict=True)])
    return raised


@pytest.mark.parametrize("modes", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", [in_place, through_data, several_times, an_argument, without_gradients])
def test_versions_are_raised_as_in_eager(write, modes):
    model = Writer(write)
    eager = copy.deepcopy(model)
    wanted = versions_raised(eager, eager, modes)
    fused = fuse.compile(model)
    assert versions_raised(model, fused, modes) == wanted
    assert not fused.last_run.fallbacks


@pytest.mark.parametrize("modes", [torch.enable_grad, torch.no_grad])
def test_a_write_to_a_tensor_that_autograd_saved_raises(modes):
    model = Writer(in_place)
    fused = fuse.compile(model)
    scale = torch.ones(4, requires_grad=True)
    for _ in range(2):
        loss = (scale * model.mean).sum()  # saves the mean
        with modes():
            fused(torch.randn(3, 4))
        assert not fused.last_run.fallbacks
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_write_through_data_does_not_raise():
    model = Writer(through_data)
    fused = fuse.compile(model)
    scale = torch.ones(4, requires_grad=True)
    for _ in range(2):
        loss = (scale * model.mean).sum()
        fused(torch.randn(3, 4))
        assert not fused.last_run.fallbacks
        scale.grad = None
        loss.backward()
        assert torch.equal(scale.grad, model.mean)  # as in eager: the gradient reads the new mean
