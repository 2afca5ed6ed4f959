"""Models that make parameters and register buffers in ``forward``: compiled calls leave what eager's leave."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check
from tests.runtime.test_reassigned_data import Model, assert_same, both, called, facts, trained


def moving_average(m, x):
    y = torch.tanh(x @ m.w)
    m.t = nn.Parameter(m.t * 0.9 + (y.t() @ y) * 0.1)
    return y


def without_gradients(m, x):
    m.t = nn.Parameter(m.t.data * 0.9, requires_grad=False)
    return torch.tanh(x @ m.w) @ m.t


def the_old_one_has_a_gradient(m, x):
    y = torch.tanh(x @ m.v) @ m.w
    m.v = nn.Parameter(m.v * 0.5)
    return y


def assigned_without_being_read(m, x):
    m.t = nn.Parameter(x.mean(0).repeat(4, 1))
    return x @ m.w


def shares_memory(m, x):
    m.t = nn.Parameter(m.mean[1:])
    m.mean = m.mean * 0.9
    m.v = nn.Parameter(m.mean)
    return x @ m.w


def the_same_twice(m, x):
    m.t = m.v = nn.Parameter(m.t * 0.5)
    return x @ m.w, m.t


def exchanged(m, x):
    m.w, m.v = m.v, m.w
    return torch.tanh(x @ m.w) @ m.v


def registered_again(m, x):
    m.register_parameter("t", nn.Parameter(m.t * 0.5))
    m.register_buffer("mean", m.mean * 0.9 + x.detach().sum())
    return x @ m.w + m.mean[: len(x)]


def by_name(m, x):
    for name in ("t", "mean"):
        old = getattr(m, name)
        setattr(m, name, nn.Parameter(old + 1) if name in m._parameters else old + 1)
    return x @ m.w


def none(m, x):
    m.t = None
    return x @ m.w


def quantised(m, x):
    """A codebook that follows its members, as in a VQ-VAE."""
    z = torch.tanh(x @ m.w)
    distance = z.square().sum(1, keepdim=True) + m.v.square().sum(1) - 2 * z @ m.v.t()
    code = F.one_hot(distance.argmin(1), 4).type(z.dtype)
    q = code @ m.v
    m.mean = m.mean * 0.9 + 0.1 * code.sum(0)
    m.t = nn.Parameter(m.t * 0.9 + 0.1 * code.t() @ z)
    m.v = nn.Parameter(m.t / m.mean.sum().abs())
    return (z + (q - z).detach()) + (q.detach() - z).square()


def registered_by_the_first_call(m, x):
    m.extra = nn.Parameter(m.w.detach() * 0.5)
    m.register_buffer("another", x.detach() + 1)
    return x @ m.w + m.another.sum()


FUSED = [
    registered_by_the_first_call,
    moving_average,
    without_gradients,
    the_old_one_has_a_gradient,
    assigned_without_being_read,
    shares_memory,
    the_same_twice,
    registered_again,
    by_name,
    none,
    quantised,
]


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("function", FUSED)
def test_training_is_fused_and_leaves_eagers_state(function, forwards):
    wanted, got, fused = both(function, trained, forwards=forwards)
    assert_same(got, wanted)
    assert not fused.last_run.fallbacks


@pytest.mark.sampled
@pytest.mark.parametrize("function", [*FUSED, exchanged])
def test_inference_is_fused(function):
    wanted, got, fused = both(function, called, modes=[torch.no_grad] * 5)
    assert_same(got, wanted)
    assert not fused.last_run.fallbacks


@pytest.mark.parametrize("function", FUSED)
def test_modes_may_change_from_call_to_call(function):
    wanted, got, _ = both(function, called, modes=[torch.no_grad, torch.enable_grad] * 3)
    assert_same(got, wanted)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("function", [moving_average, quantised, registered_again])
def test_the_check_puts_old_parameters_back(function, train):
    report = check(Model(function), (torch.randn(3, 4),), train=train)
    assert report.passed, report


class Loop(nn.Module):
    """A loop, whose gradients are taken rolled where nothing speaks against it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.w = nn.Parameter(torch.randn(4, 4) * 0.3)
        self.t = nn.Parameter(torch.randn(4, 4), requires_grad=False)

    def forward(self, xs: Tensor) -> Tensor:
        h = xs[0]
        for x in xs:
            h = torch.tanh(x + h @ self.w + h @ self.t)
        if self.how == "a parameter":
            self.t = nn.Parameter(self.t * 0.5, requires_grad=False)
        if self.how == "data":
            self.t.data = self.t.data * 0.5
        if self.how == "data in place":
            self.t.data.mul_(0.5)
        return h


@pytest.mark.parametrize("how", ["a parameter", "data", "data in place"])
@pytest.mark.parametrize("forwards", [1, 2])
def test_weights_that_a_loop_reads_change_behind_it(how, forwards):
    made = Loop(how).double()
    model, eager = copy.deepcopy(made), copy.deepcopy(made)
    fused = fuse.compile(model)
    for step in range(3):
        for one, call in ((model, fused), (eager, eager)):
            torch.manual_seed(step)
            one.zero_grad()
            sum(call(torch.randn(20, 3, 4, dtype=torch.float64)).sum() for _ in range(forwards)).backward()
        assert_same(facts(model), facts(eager))
    assert not fused.last_run.fallbacks
    assert not fused.last_run.backward.fallbacks


# ---- near misses -----------------------------------------------------------------------------------------------------


class Own(nn.Parameter):
    pass


def of_a_subclass(m, x):
    m.t = Own(m.t * 0.5)
    return x @ m.w


def with_a_gradient_of_its_own(m, x):
    m.v = nn.Parameter(m.v * 0.9)
    return torch.tanh(x @ m.w) @ m.v


def in_another_registry(m, x):
    if "mean" in m._buffers:
        m.mean = nn.Parameter(m.mean * 0.5)
    else:
        del m.mean
        m.register_buffer("mean", torch.ones(4, 4))
    return x @ m.w


def persistent_no_longer(m, x):
    m.register_buffer("mean", m.mean + 1, persistent="mean" in m._non_persistent_buffers_set)
    return x @ m.w


def read_in_another_way(m, x):
    y = x @ list(m.parameters())[2]
    m.t = nn.Parameter(x.mean(0).repeat(4, 1))
    return y @ m.w


@pytest.mark.parametrize(
    "function",
    [of_a_subclass, with_a_gradient_of_its_own, in_another_registry, persistent_no_longer, read_in_another_way],
)
def test_near_misses_run_eager(function):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted, got, fused = both(function, trained)
    assert_same(got, wanted)
    assert len({fallback.reason for fallback in fused.last_run.fallbacks}) == 1


def test_the_class_of_a_parameter_is_kept():
    wanted, got = Model(of_a_subclass), Model(of_a_subclass)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model in (wanted, fuse.compile(got)):
            model(torch.ones(3, 4))
    assert type(wanted.t) is type(got.t) is Own


def test_a_wrong_value_raises_as_in_eager():
    def function(m: nn.Module, x: Tensor) -> Tensor:
        m.t = m.t * 2
        return x @ m.w

    for model in (Model(function), fuse.compile(Model(function))):
        with pytest.raises(TypeError, match="cannot assign"):
            model(torch.ones(3, 4))


class Tied(nn.Module):
    """Two layers share a weight or a buffer until the first call."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.buffer = buffer
        self.one, self.two = nn.Module(), nn.Module()
        tensor = torch.randn(4, 4)
        for layer in (self.one, self.two):
            if buffer:
                layer.register_buffer("w", tensor)
            else:
                layer.w = self.one.w if layer is self.two else nn.Parameter(tensor)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.one.w + torch.tanh(x) @ self.two.w
        value = self.one.w.detach() * 0.5
        self.one.w = value if self.buffer else nn.Parameter(value)
        return y


@pytest.mark.parametrize("buffer", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_tie_ends_where_one_of_the_two_is_assigned(buffer, mode):
    made = Tied(buffer)
    model, eager = copy.deepcopy(made), copy.deepcopy(made)
    fused = fuse.compile(model)
    for _ in range(4):
        x = torch.randn(3, 4)
        with mode():
            assert_same(fused(x).detach(), eager(x).detach())
        assert_same(facts(model), facts(eager))
    assert not fused.last_run.fallbacks
