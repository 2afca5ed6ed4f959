"""A compiled call raises the versions of the tensors that it writes as often as eager does, as autograd relies on them;
and it changes the shapes of arguments that eager changes in place."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check
from tests.runtime.test_reassigned_data import Model, assert_same, both, facts, first


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


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_reading_tensors_that_share_memory_raises_no_version(mode):
    model = Model(lambda m, x: x @ m.w + m.t.sum() + m.mean.sum())
    model.t.data = model.mean[1:]
    model.mean = model.mean.detach().t()
    fused = fuse.compile(model)
    assert versions_raised(model, fused, mode) == [[0] * 5] * 3
    assert not fused.last_run.fallbacks


# ---- shapes ----------------------------------------------------------------------------------------------------------


def longer(m, x):
    if x.dim() == 2:
        x.unsqueeze_(-1)
    return (x * m.w[0, 0]).squeeze(-1) @ m.w


def turned(m, x):
    x.t_()
    return m.w @ torch.tanh(x), x, x[1:], x.T


def several(m, x):
    before = x[0]
    x.unsqueeze_(0).transpose_(0, 2)
    x.squeeze_(2)
    return (m.w @ x).sum() * before, x


def of_a_part(m, x):
    row = x[0].unsqueeze_(0)
    return row @ m.w


def of_a_buffer(m, x):
    m.mean.t_()
    return x @ m.w @ m.mean


def read_by_gradients(m, x):
    x.unsqueeze_(1)
    y = x[1:] * m.w[:2]
    return torch.tanh(x.squeeze(1) @ m.v) @ m.w * y.sum()


def in_a_loop(m, x):
    h = x.new_zeros(4)
    x.unsqueeze_(1)
    for row in x:
        h = torch.tanh(row.squeeze(0) + h @ m.w)
    return h


RESHAPING = [longer, turned, several, of_a_part, of_a_buffer, read_by_gradients, in_a_loop]


def reshaped(model: nn.Module, call: nn.Module, train: bool, rows: tuple[int, ...] = (3, 3, 3)) -> list[Any]:
    found = []
    for step, count in enumerate(rows):
        torch.manual_seed(step)
        x = torch.randn(count, 4)
        model.zero_grad()
        with torch.set_grad_enabled(train):
            result = call(x)
        same = [one is x for one in result] if isinstance(result, tuple) else None
        found.append([x.clone(), x.shape, x.stride(), x._version, same, *facts(model, [x, *result])])
        if train:
            first(result).square().sum().backward()
            found.append(facts(model))
    return found


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("function", RESHAPING)
def test_an_argument_gets_eagers_shape(function, train):
    wanted, got, fused = both(function, reshaped, train=train)
    assert_same(got, wanted)
    assert not fused.last_run.fallbacks


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("function", [longer, in_a_loop])
def test_an_argument_of_another_size_gets_eagers_shape(function, train):
    wanted, got, fused = both(function, reshaped, train=train, rows=(3, 9, 17, 6, 12))
    assert_same(got, wanted)
    assert not fused.last_run.fallbacks


@pytest.mark.parametrize("train", [True, False])
def test_the_check_puts_old_shapes_back(train):
    report = check(Model(longer), (torch.randn(3, 4),), train=train)
    assert report.passed, report


def test_a_gradient_raises_if_the_argument_was_written_meanwhile():
    for call in (model := Model(read_by_gradients), fuse.compile(model)):
        for _ in range(2):
            x = torch.randn(3, 4)
            loss = call(x).sum()
            x.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
    assert not call.last_run.fallbacks


def written_too(m, x):
    x.mul_(2)
    x.unsqueeze_(0)
    return x @ m.w


def to_other_strides(m, x):
    x.as_strided_((2, 4), (4, 1))
    return x @ m.w


def with_other_data(m, x):
    m.t.data = m.t.data + 1
    m.t.t_()
    return x @ m.w @ m.t


@pytest.mark.parametrize("function", [written_too, to_other_strides, with_other_data])
def test_near_misses_run_eager(function):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted, got, fused = both(function, reshaped, train=True)
    assert_same(got, wanted)
    assert len({fallback.reason for fallback in fused.last_run.fallbacks}) == 1


def test_an_argument_that_needs_gradients_keeps_its_shape_in_the_graph():
    model = Model(lambda m, x: x.unsqueeze_(0) @ m.w)
    for call in (model, fuse.compile(model)):
        leaf = torch.ones(3, 4, requires_grad=True)
        x = leaf * 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(x).sum().backward()
        assert x.shape == (1, 3, 4)
        torch.testing.assert_close(leaf.grad, 2 * model.w.detach().sum(1).expand(3, 4))
